"""Names of the Transformer Engine compatibility layer: the object behind each, and the names that are not supported.

`SUPPORTED` and `UNSUPPORTED` cover Transformer Engine's `pytorch` namespace, `TE_OPS` and `UNSUPPORTED_OPS` its
`pytorch.ops`. Each name has "same", how it differs, or why it is not supported. docs/compat.md is generated from them.
"""

from __future__ import annotations

from typing import Any

from .. import ops, recipe
from .._grouped_parameters import deinterleave_glu, interleave_glu
from .._userbuffers import destroy_ub, initialize_ub
from . import (
    _attention,
    _cross_entropy,
    _distributed,
    _grouped_linear,
    _layernorm_mlp,
    _linear,
    _multihead_attention,
    _norm,
    _optimizers,
    _padding,
    _permutation,
    _recipes,
    _rotary,
    _router,
    _transformer_layer,
)

VERSION = "2.9.0+torchweft"  # the release whose API it follows; frameworks compare it


def deinterleave_glu_tensor(tensor: Any, interleave_size: int) -> Any:
    """Transformer Engine's name of :func:`torchweft.deinterleave_glu`."""
    return deinterleave_glu(tensor, interleave_size)


def interleave_glu_tensor(tensor: Any, interleave_size: int) -> Any:
    """Transformer Engine's name of :func:`torchweft.interleave_glu`."""
    return interleave_glu(tensor, interleave_size)


# ---- transformer_engine.pytorch -------------------------------------------------------------------------------------

SAME = "same"
_CUDA = "GPU only"
_QUANTIZED = "quantized tensors are not supported outside of linears"
_COMPOSED = "composed of weft's operations; arguments about GPU buffers are accepted and ignored"
_REGION = (
    "quantizes linears; custom recipes return weft's quantizers; with install(recipes='high_precision') runs "
    "unquantized with one warning"
)
_INIT = (
    "weights of module classes are ordinary Parameters with quantized values and take no less memory; raises for "
    "`transformer_engine.pytorch.ops`; with install(recipes='high_precision') has no effect"
)
_NO_PADDING = "not needed: weft's quantized GEMMs take any number of rows, with NVFP4's transform multiples of 16"
_EMULATED = "always True; the reason says that it is emulated"

# name: (object, SAME or how it differs)
SUPPORTED: dict[str, tuple[Any, str]] = {
    "ops": (None, "weft's operations; see below"),
    "Linear": (_linear.Linear, _COMPOSED),
    "LayerNormLinear": (
        _linear.LayerNormLinear,
        _COMPOSED + "; `return_layernorm_output_gathered` raises under sequence parallelism",
    ),
    "LayerNormMLP": (
        _layernorm_mlp.LayerNormMLP,
        _COMPOSED + "; `return_layernorm_output_gathered` raises under sequence parallelism",
    ),
    "GroupedLinear": (
        _grouped_linear.GroupedLinear,
        _COMPOSED + "; with `single_grouped_weight` the Parameter is a plain tensor `[groups, out, in]`, not a "
        "GroupedTensor; `delay_wgrad_compute` sets `skip_backward_post_hook` on weights only",
    ),
    "LayerNorm": (_norm.LayerNorm, SAME),
    "RMSNorm": (_norm.RMSNorm, SAME),
    "DotProductAttention": (
        _attention.DotProductAttention,
        "torch's scaled_dot_product_attention for padding and arbitrary masks, biases and torch.compile; the number "
        "of query heads is checked, too; no padding between packed sequences; of a pair of padding masks only the "
        "keys' mask is used; context parallelism gathers keys and values for every `cp_comm_type`, with causal masks "
        "or none; no ALiBi or KV cache",
    ),
    "MultiheadAttention": (_multihead_attention.MultiheadAttention, "as DotProductAttention"),
    "TransformerLayer": (
        _transformer_layer.TransformerLayer,
        "as MultiheadAttention; `drop_path_rate` drops samples in both layouts; `fuse_wgrad_accumulation` does not "
        "require `fuse_qkv_params`; `parallel_attention_mlp` works with any norm and residual",
    ),
    "RotaryPositionEmbedding": (
        _rotary.RotaryPositionEmbedding,
        "`pretrained_max_position_embeddings` raises",
    ),
    "checkpoint": (
        _distributed.checkpoint,
        "always torch's non-reentrant checkpoint; `distribute_saved_activations` raises",
    ),
    "CudaRNGStatesTracker": (
        _distributed.CudaRNGStatesTracker,
        "`torchweft.RNGStatesTracker`: states of the CPU's generator",
    ),
    "moe_permute": (_permutation.moe_permute, "the row id map has a different layout: [tokens, experts or choices]"),
    "moe_permute_with_probs": (_permutation.moe_permute_with_probs, "the row id map has a different layout"),
    "moe_unpermute": (_permutation.moe_unpermute, "takes the row id map of weft's `moe_permute`"),
    "moe_sort_chunks_by_index": (_permutation.moe_sort_chunks_by_index, SAME),
    "moe_sort_chunks_by_index_with_probs": (_permutation.moe_sort_chunks_by_index_with_probs, SAME),
    "Fp8Padding": (_padding.Fp8Padding, "weft's quantized GEMMs need it only for NVFP4's transform, multiples of 16"),
    "Fp8Unpadding": (_padding.Fp8Unpadding, "as Fp8Padding"),
    "parallel_cross_entropy": (
        _cross_entropy.parallel_cross_entropy,
        "does not overwrite the logits in backward; `reduce_loss` averages over the targets that are not ignored",
    ),
    "autocast": (_recipes.autocast, _REGION),
    "fp8_autocast": (_recipes.fp8_autocast, _REGION),
    "quantized_model_init": (_recipes.quantized_model_init, _INIT),
    "fp8_model_init": (_recipes.fp8_model_init, _INIT),
    "is_fp8_available": (_recipes.is_fp8_available, _EMULATED),
    "is_mxfp8_available": (_recipes.is_mxfp8_available, _EMULATED),
    "is_fp8_block_scaling_available": (_recipes.is_fp8_block_scaling_available, _EMULATED),
    "is_nvfp4_available": (_recipes.is_nvfp4_available, _EMULATED),
    "is_bf16_available": (_recipes.is_bf16_available, "always True"),
    "QuantizerRole": (recipe.QuantizerRole, "of linears only, without a name"),
    "get_default_recipe": (recipe.get_default_recipe, "always `Float8CurrentScaling()`"),
    "initialize_ub": (initialize_ub, "only checks its arguments: overlapping communication with GEMMs needs no setup"),
    "destroy_ub": (destroy_ub, SAME),
    "optimizers": (None, "`FusedAdam` is `torchweft.optim.FusedAdam`, `FusedSGD` torch's SGD"),
    "interleave_glu_tensor": (interleave_glu_tensor, SAME),
    "deinterleave_glu_tensor": (deinterleave_glu_tensor, SAME),
    "QuantizedTensor": (_recipes.QuantizedTensor, "for isinstance() only, which is always False"),
    "Float8Tensor": (_recipes.Float8Tensor, "for isinstance() only, which is always False"),
    "MXFP8Tensor": (_recipes.MXFP8Tensor, "for isinstance() only, which is always False"),
    "Float8BlockwiseQTensor": (_recipes.Float8BlockwiseQTensor, "for isinstance() only, which is always False"),
    "NVFP4Tensor": (_recipes.NVFP4Tensor, "for isinstance() only, which is always False"),
}

# name: why it is not supported
UNSUPPORTED: dict[str, str] = {
    "make_graphed_callables": f"{_CUDA}: CUDA graphs",
    "get_cpu_offload_context": f"{_CUDA}: activations are on the CPU already",
    "mark_not_offload": f"{_CUDA}: activations are on the CPU already",
    "ManualOffloadSynchronizer": f"{_CUDA}: activations are on the CPU already",
    "get_cudnn_version": f"{_CUDA}: cuDNN",
    "get_device_compute_capability": f"{_CUDA}: CPUs have no compute capability",
    "UserBufferQuantizationMode": _QUANTIZED,
    "constants": f"{_CUDA}: tables of GPU types and kernels",
    "CPLoadBalancingStrategy": "context parallelism always has two chunks of a sequence per rank",
    "DType": _QUANTIZED,
    "InferenceParams": "KV caches are not supported",
    "GatedDeltaNetAttention": "only softmax attention is supported",
    "FusedMLAQUpProjFunction": _QUANTIZED,
    "FusedMLAQUpProjRopeQuant": _QUANTIZED,
    "moe_permute_and_pad_with_probs": _NO_PADDING,
    "apply_recipe": _QUANTIZED,
    "CusolverMpCtx": f"{_CUDA}: cuSOLVER",
    "newton_schulz": f"{_CUDA}: cuSOLVER",
    "newton_schulz_tp": f"{_CUDA}: cuSOLVER",
    "onnx_export": "use torch.export, which works on weft's operations",
    **dict.fromkeys(
        "DelayedScalingRequest Float8BlockQuantizer Float8BlockwiseQTensorStorage Float8CurrentScalingQuantizer "
        "Float8Quantizer Float8TensorStorage HybridQuantizedTensor HybridQuantizedTensorStorage HybridQuantizer "
        "IdentityQuantizer IdentityTensor IdentityTensorStorage MXFP8Quantizer MXFP8TensorStorage NVFP4Quantizer "
        "NVFP4TensorStorage QuantizedTensorStorage Quantizer QuantizerRequest prepare_for_saving "
        "quantizer_factory restore_from_func_ctx restore_from_saved".split(),
        _QUANTIZED,
    ),
}

# The same for `pytorch.ops`; docs/from_te_ops.md lists the general differences.
OPS_DIFFERENCES: dict[str, str] = {
    "Quantize": "returns its input; the linear that follows quantizes it",
    "AllReduce": "dx = dy regardless of `reduce_in_backward`, as in Transformer Engine; `torchweft.ops.AllReduce` "
    "honors it",
    "Dropout": "uses torch's generator; every p from 0 to 1 is exact",
    "Linear": "Parameters and `state_dict` keys are `weight` and `bias`; Transformer Engine's keys load, and "
    "`te_keys=True` writes them",
    "Sequential": "too many extra inputs raise; hooks of contained operations run",
    "register_forward_fusion": "returns a handle with `remove()`",
    "register_backward_fusion": "returns a handle with `remove()`",
}
UNSUPPORTED_OPS: dict[str, str] = {
    "AdaptiveLayerNorm": "not implemented; newer than weft's operations",
    "is_op_fuser_grouped_tensor_path_supported": f"{_CUDA}: reports which kernels apply",
}
OPS: dict[str, Any] = {name: getattr(ops, name) for name in ops.__all__} | {"AllReduce": _distributed.AllReduce}
TE_OPS = (
    "AddExtraInput AllGather AllReduce BasicLinear BasicOperation Bias ClampedSwiGLU ConstantScale Dropout "
    "FusedOperation FusibleOperation GEGLU GELU GLU GroupedLinear Identity L2Normalization LayerNorm Linear "
    "MakeExtraOutput QGEGLU QGELU Quantize RMSNorm ReGLU ReLU ReduceScatter Reshape SReGLU SReLU "
    "ScaledClampedQGeGLU ScaledSReLU ScaledSiTUGLU ScaledSwiGLU ScaledTanhSReLU Sequential SiLU SiTUGLU "
    "SwiGLU "
    "register_backward_fusion register_forward_fusion"
).split()


# ---- the modules ----------------------------------------------------------------------------------------------------

_PYTORCH = {name: value for name, (value, _) in SUPPORTED.items() if value is not None}
_RECIPES = {name: getattr(recipe, name) for name in recipe.__all__ if name != "get_default_recipe"}
_QUANTIZATION = {
    name: getattr(_recipes, name)
    for name in (
        "FP8GlobalStateManager autocast fp8_autocast fp8_model_init quantized_model_init get_default_recipe "
        "get_default_fp8_recipe is_bf16_available is_fp8_available is_mxfp8_available is_fp8_block_scaling_available "
        "is_nvfp4_available check_fp8_support check_mxfp8_support check_fp8_block_scaling_support check_nvfp4_support"
    ).split()
}
_TENSORS = {name: value for name, value in _PYTORCH.items() if name.endswith("Tensor")}
_MODULES = ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "LayerNorm", "RMSNorm")
_ATTENTION = ("DotProductAttention", "MultiheadAttention", "RotaryPositionEmbedding")
_ROTARY = {name: getattr(_rotary, name) for name in ("RotaryPositionEmbedding", "apply_rotary_pos_emb")}

MODULES: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": VERSION},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": _RECIPES,
    "transformer_engine.pytorch": _PYTORCH,
    "transformer_engine.pytorch.ops": OPS,
    "transformer_engine.pytorch.module": {name: _PYTORCH[name] for name in (*_MODULES, "initialize_ub", "destroy_ub")},
    "transformer_engine.pytorch.attention": {name: _PYTORCH[name] for name in _ATTENTION} | _ROTARY,
    "transformer_engine.pytorch.attention.rope": _ROTARY,
    "transformer_engine.pytorch.transformer": {
        "TransformerLayer": _transformer_layer.TransformerLayer,
        "DropPath": _transformer_layer.DropPath,
    },
    "transformer_engine.pytorch.distributed": {name: getattr(_distributed, name) for name in _distributed.__all__},
    "transformer_engine.pytorch.cross_entropy": {"parallel_cross_entropy": _cross_entropy.parallel_cross_entropy},
    "transformer_engine.pytorch.fp8": _QUANTIZATION,
    "transformer_engine.pytorch.quantization": _QUANTIZATION,
    "transformer_engine.pytorch.tensor": _TENSORS,
    "transformer_engine.pytorch.quantized_tensor": {"QuantizedTensor": _recipes.QuantizedTensor},
    "transformer_engine.pytorch.float8_tensor": {"Float8Tensor": _recipes.Float8Tensor},
    "transformer_engine.pytorch.optimizers": {name: getattr(_optimizers, name) for name in _optimizers.__all__},
    "transformer_engine.pytorch.permutation": {k: v for k, v in _PYTORCH.items() if k.startswith("moe_")},
    "transformer_engine.pytorch.router": {
        name: value for name, value in vars(_router).items() if name.startswith("fused_") or name == "RoutingMapFormat"
    },
}


def unsupported_reason(module: str, name: str) -> str:
    """Returns why `module` has no attribute `name`."""
    if module == "transformer_engine.pytorch.ops" and name in UNSUPPORTED_OPS:
        return UNSUPPORTED_OPS[name]
    if module.startswith("transformer_engine.pytorch") and name in UNSUPPORTED:
        return UNSUPPORTED[name]
    if module == "transformer_engine":
        return "only the PyTorch frontend is available"
    return "unknown name; docs/compat.md lists all supported names"
