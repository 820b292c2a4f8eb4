"""Answers on the CPU what megatron-core asks of CUDA, when asked::

from weft.compat import megatron

megatron.install()  # from here on transformer_engine is weft, too
from megatron.core.models.gpt import GPTModel
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from . import transformer_engine

HOW_TO_INSTALL = (
    "pip install --no-deps megatron-core==0.16.1; it imports numpy and packaging, and psutil to save a checkpoint"
)
_RANDOM = "megatron.core.tensor_parallel.random"
_LAYERS = "megatron.core.tensor_parallel.layers"


class Redirection(NamedTuple):
    """An attribute of a module that is something else while installed; `why` has lines of megatron-core 0.16.1."""

    module: str
    name: str
    value: Any
    why: str


def _cpu_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _add_weight_gradient(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad += dyᵀ·x"""
    main_grad.addmm_(dy.t().to(main_grad.dtype), x.to(main_grad.dtype))


_APEX_WGRAD = SimpleNamespace(wgrad_gemm_accum_fp32=_add_weight_gradient, wgrad_gemm_accum_fp16=_add_weight_gradient)

REDIRECTIONS = (
    Redirection(
        "torch.cuda",
        "current_device",
        lambda: torch.device("cpu"),
        "where buffers are made: distributed/param_and_grad_buffer.py:806, tensor_parallel/mappings.py:141 and "
        "tensor_parallel/layers.py:552; where angles of positions go: rotary_pos_embedding.py:162",
    ),
    Redirection(
        "torch.cuda",
        "synchronize",
        lambda device=None: None,
        "a checkpoint waits for copies from the GPU: dist_checkpointing/strategies/filesystem_async.py:230",
    ),
    Redirection(
        "torch.cuda",
        "manual_seed",
        torch.manual_seed,
        "states of the random number tracker: tensor_parallel/random.py:237 and 422; without CUDA it does nothing",
    ),
    Redirection("torch.cuda", "get_rng_state", _cpu_state, "the same states: tensor_parallel/random.py:235 and 238"),
    Redirection("torch.cuda.random", "get_rng_state", _cpu_state, "the same, in fork(): tensor_parallel/random.py:55"),
    Redirection(
        _RANDOM,
        "_set_cuda_rng_state",
        _set_cpu_state,
        "the same: tensor_parallel/random.py:111 puts it off until CUDA starts, which is never",
    ),
    Redirection(
        _LAYERS,
        "fused_weight_gradient_mlp_cuda",
        _APEX_WGRAD,
        "gradient_accumulation_fusion of the output layer is an extension of Apex: tensor_parallel/layers.py:569",
    ),
    Redirection(_LAYERS, "_grad_accum_fusion_available", True, "asks for it: tensor_parallel/layers.py:924"),
)


MODE_WHY = {
    'device="cuda"': "where small tensors are made: pipeline_parallel/schedules.py:596, optimizer/clip_grads.py:103 "
    "and 174, optimizer/optimizer.py:907",
    "Tensor.type()": "gradients must be `torch.cuda.FloatTensor` to be clipped: optimizer/clip_grads.py:167",
}


class _CudaToCpuMode(TorchFunctionMode):
    """What is made on "cuda" is made on the CPU; the type of a tensor reads as if it were on a GPU."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def _is_relevant(record: logging.LogRecord) -> bool:
    """tensor_parallel/random.py:265 warns whenever numbers are drawn on the CPU; here they all are."""
    return "CPU RNG state changed" not in record.getMessage()


_MISSING = object()
_mode: _CudaToCpuMode | None = None
_replaced_attributes: list[tuple[Any, str, Any]] = []


def install(recipes: str | None = None, replace: bool = False) -> None:
    """From now on megatron-core computes on the CPU and its Transformer Engine is weft, in this process.

    `recipes` and `replace` are those of `transformer_engine.install`, which it calls. New tensors and types of tensors
    are redirected in the thread that calls it. Call it before megatron.core is imported. A second call changes nothing
    but `recipes`.
    """
    global _mode
    if torch.cuda.is_available():
        raise RuntimeError("weft.compat.megatron: torch has CUDA here; megatron-core would be kept from using it")
    was_installed = transformer_engine.installed()
    transformer_engine.install(recipes=recipes, replace=replace)
    if installed():
        return
    try:
        modules = [_import(redirection.module) for redirection in REDIRECTIONS]
        _check_install_order()
    except ImportError:
        if not was_installed:
            transformer_engine.uninstall()
        raise
    for module, (_, name, value, _) in zip(modules, REDIRECTIONS, strict=True):
        _replaced_attributes.append((module, name, getattr(module, name, _MISSING)))
        setattr(module, name, value)
    logging.getLogger(_RANDOM).addFilter(_is_relevant)
    _mode = _CudaToCpuMode()
    _mode.__enter__()


def uninstall() -> None:
    """Undoes `install`, but for `transformer_engine`, which megatron-core holds on to. Nothing if it was not called."""
    global _mode
    if _mode is None:
        return
    _mode.__exit__(None, None, None)
    _mode = None
    logging.getLogger(_RANDOM).removeFilter(_is_relevant)
    while _replaced_attributes:
        module, name, value = _replaced_attributes.pop()
        if value is _MISSING:
            delattr(module, name)
        else:
            setattr(module, name, value)


def installed() -> bool:
    """Whether megatron-core computes on the CPU now."""
    return _mode is not None


@contextmanager
def on_cpu(recipes: str | None = None, replace: bool = False) -> Iterator[None]:
    """`install()` inside, `uninstall()` after."""
    install(recipes, replace)
    try:
        yield
    finally:
        uninstall()


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"weft.compat.megatron: {name} does not import ({error}). {HOW_TO_INSTALL}") from error


def _check_install_order() -> None:
    if not _import("megatron.core.extensions.transformer_engine").HAVE_TE:
        raise ImportError(
            "megatron.core was imported before weft.compat.megatron.install() and has no Transformer Engine; "
            "install() goes before the first import of megatron.core"
        )
