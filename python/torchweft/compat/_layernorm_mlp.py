"""LayerNormMLP: norm, linear, activation, linear as one pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import ops
from .._native import on_meta
from ._module import BoundSequential, CompatModule, divide_evenly, reject_gathered_output

# name -> (operation, output features of FC1 / input features of FC2)
ACTIVATIONS: dict[str, tuple[type, int]] = {
    "gelu": (ops.GELU, 1),
    "qgelu": (ops.QGELU, 1),
    "relu": (ops.ReLU, 1),
    "srelu": (ops.SReLU, 1),
    "silu": (ops.SiLU, 1),
    "glu": (ops.GLU, 2),
    "geglu": (ops.GEGLU, 2),
    "qgeglu": (ops.QGEGLU, 2),
    "reglu": (ops.ReGLU, 2),
    "sreglu": (ops.SReGLU, 2),
    "swiglu": (ops.SwiGLU, 2),
    "clamped_swiglu": (ops.ClampedSwiGLU, 2),
}


class LayerNormMLP(CompatModule):
    """Computes y = f(norm(x) W1ᵀ + b1) W2ᵀ + b2.

    The Parameters are `layer_norm_weight`, `layer_norm_bias`, `fc1_weight`, `fc1_bias`, `fc2_weight` and `fc2_bias`.

    Args:
        hidden_size: size of the last dimension of input and output.
        ffn_hidden_size: size between the two linears, over all ranks.
        eps: of the norm.
        sequence_parallel: input and output are sharded by their first dimension.
        return_bias: also return `fc2_bias` instead of adding it.
        get_rng_state_tracker: returns the random states from which the weights are initialized.
        tp_group, tp_size: tensor-parallel group, or the number of ranks.
        init_method, output_layer_init_method: initialize the weights of FC1 and FC2 in place.
        bias: add biases.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        activation, activation_params: name of the activation and its arguments.
        fuse_wgrad_accumulation: add weight gradients to ``main_grad``.
        params_dtype, device: of the Parameters.
        return_layernorm_output: also return the output of the norm.
        return_layernorm_output_gathered: not supported under sequence parallelism.
        set_parallel_mode: shard FC1 by columns and FC2 by rows.
        zero_centered_gamma: the norm scales by 1 + gamma.
        delay_wgrad_compute: compute weight gradients in :meth:`backward_dw`.
        checkpoint: recompute the activations in backward.

    Shape:
        - inp: ``(*, hidden_size)``.
        - Output: same as `inp`.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        delay_wgrad_compute: bool = False,
        checkpoint: bool = False,
        **unused: Any,
    ) -> None:
        self._setup(
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            tp_group=tp_group if set_parallel_mode else None,
            tp_size=tp_size if set_parallel_mode else 1,
            get_rng_state_tracker=get_rng_state_tracker,
            params_dtype=params_dtype,
            device=device,
            delay_wgrad_compute=delay_wgrad_compute,
            unused=unused,
        )
        if activation not in ACTIVATIONS:
            raise ValueError(f"LayerNormMLP: activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}.")
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.normalization, self.eps, self.zero_centered_gamma = normalization, eps, zero_centered_gamma
        self.activation, self.activation_params = activation, activation_params or {}
        self.use_bias, self.return_bias, self.checkpoint = bias, return_bias, checkpoint
        self.return_layernorm_output, self.set_parallel_mode = return_layernorm_output, set_parallel_mode
        reject_gathered_output(self, return_layernorm_output_gathered)
        self._declare_all(init_method, output_layer_init_method)
        self.reset_parameters(defer_init=on_meta(self))

    def _declare_all(self, init: Any, output_init: Any) -> None:
        self._declare_norm(self.normalization, self.hidden_size, self.zero_centered_gamma)
        column, row = ("column", "row") if self.set_parallel_mode else (None, None)
        fc2_features = divide_evenly(self, self.ffn_hidden_size, self.tp_size)
        fc1_features = fc2_features * ACTIVATIONS[self.activation][1]
        self._declare_weight("fc1_weight", (fc1_features, self.hidden_size), init, column)
        self._declare_bias("fc1_bias", (fc1_features,), column, self.use_bias)
        self._declare_weight("fc2_weight", (self.hidden_size, fc2_features), output_init, row)
        self._declare_bias("fc2_bias", (self.hidden_size,), row, self.use_bias)

    def _needs_group(self) -> bool:
        return self.set_parallel_mode

    def _build(self) -> BoundSequential:
        activation, times = ACTIVATIONS[self.activation]
        norm, names = self._norm()
        pipeline = BoundSequential(self)
        pipeline.add(norm, **names)
        if self.return_layernorm_output:
            pipeline.add(ops.MakeExtraOutput())
        column, row = ("column", "row") if self.set_parallel_mode else (None, None)
        hidden, ffn = self.hidden_size, self.ffn_hidden_size
        fc1_bias = "fc1_bias" if self.use_bias else None
        fc2_bias = "fc2_bias" if self.use_bias and not self.return_bias else None
        self._add_linear(pipeline, (hidden, times * ffn), column, "fc1_weight", fc1_bias)
        pipeline.add(activation(**self.activation_params))
        self._add_linear(pipeline, (ffn, hidden), row, "fc2_weight", fc2_bias)
        return pipeline

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Returns y, with `return_bias` also `fc2_bias`, with `return_layernorm_output` also norm(x).

        Args:
            inp: the input.
            is_first_microbatch: if True, weight gradients overwrite ``main_grad`` instead of being added to it, and
                the weights are quantized once, for all calls with False that follow; None: for this call.
        """
        pipeline = self._get_pipelines(inp)

        def run(x: torch.Tensor) -> Any:
            with self._quantized_weights(is_first_microbatch):
                return pipeline.sequential(x)

        if self.checkpoint and torch.is_grad_enabled():
            from ._distributed import checkpoint

            output = checkpoint(run, inp)
        else:
            output = run(inp)
        output, normed = output if self.return_layernorm_output else (output, None)
        self._first_microbatch(output, is_first_microbatch)
        results: tuple[Any, ...] = (output,)
        if self.return_bias:
            results += (self.fc2_bias,)
        if self.return_layernorm_output:
            results += (normed,)
        return results if len(results) > 1 else output
