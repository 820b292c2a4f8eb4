"""Runs megatron-core on the CPU::

from torchweft.compat import megatron

megatron.install()  # import transformer_engine resolves to weft, too
from megatron.core.models.gpt import GPTModel
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from . import transformer_engine
from ._cuda_on_cpu import CudaOnCpu, CudaToCpuMode

__all__ = ["install", "installed", "on_cpu", "uninstall"]

HOW_TO_INSTALL = (
    "pip install --no-deps megatron-core==0.16.1; it imports numpy and packaging, and psutil to save a checkpoint"
)
_RANDOM = "megatron.core.tensor_parallel.random"
_LAYERS = "megatron.core.tensor_parallel.layers"


class Redirection(NamedTuple):
    """A module attribute that is replaced while installed. `why` has the lines of megatron-core 0.16.1 that need it."""

    module: str
    name: str
    value: Any
    why: str


def _set_cpu_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _add_weight_gradient(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad += dyᵀ x"""
    main_grad.addmm_(dy.t().to(main_grad.dtype), x.to(main_grad.dtype))


def _on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


_APEX_WGRAD = SimpleNamespace(wgrad_gemm_accum_fp32=_add_weight_gradient, wgrad_gemm_accum_fp16=_add_weight_gradient)

REDIRECTIONS = (
    Redirection(
        _RANDOM,
        "_set_cuda_rng_state",
        _set_cpu_state,
        "states of the random number tracker: tensor_parallel/random.py:111 defers it until CUDA is initialized, which "
        "never happens",
    ),
    Redirection(
        _LAYERS,
        "fused_weight_gradient_mlp_cuda",
        _APEX_WGRAD,
        "Apex extension for gradient_accumulation_fusion of the output layer: tensor_parallel/layers.py:569",
    ),
    Redirection(_LAYERS, "_grad_accum_fusion_available", True, "checks for Apex: tensor_parallel/layers.py:924"),
    Redirection(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _on_cpu,
        "sizes of the all-to-all of experts are converted if they are on a GPU: transformer/moe/moe_utils.py:1093",
    ),
)


MODE_WHY = {
    "Tensor.type()": "clipping requires gradients of type `torch.cuda.FloatTensor`: optimizer/clip_grads.py:167",
}


class _MegatronMode(CudaToCpuMode):
    """Also reports CUDA tensor types in Tensor.type()."""

    def redirect(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        result = super().redirect(func, args, kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def _is_relevant(record: logging.LogRecord) -> bool:
    """Log filter: drops the warning of tensor_parallel/random.py:265 about the CPU's random state, always true here."""
    return "CPU RNG state changed" not in record.getMessage()


_redirected: CudaOnCpu | None = None


def install(recipes: str | None = None, replace: bool = False) -> None:
    """Makes megatron-core run on the CPU with weft as its Transformer Engine, in this process.

    CUDA is redirected to the CPU as by ``transformer_engine.install(cuda="cpu")``. Call it before megatron.core is
    imported, in the thread that runs the model: ``device="cuda"`` and ``Tensor.type()`` are redirected in that thread
    only. A second call only sets `recipes`.

    Args:
        recipes: see :func:`torchweft.compat.transformer_engine.install`, which it calls.
        replace: see :func:`torchweft.compat.transformer_engine.install`.

    Raises:
        ImportError: if megatron-core is not installed, or was imported before without Transformer Engine.
        RuntimeError: if torch has CUDA.
    """
    global _redirected
    if torch.cuda.is_available():
        raise RuntimeError(
            "torchweft.compat.megatron.install: torch has CUDA, and megatron-core would no longer use it. Call "
            "install() only on machines without a GPU."
        )
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
    own = ((module, entry.name, entry.value) for module, entry in zip(modules, REDIRECTIONS, strict=True))
    _redirected = CudaOnCpu(_MegatronMode(), own)
    logging.getLogger(_RANDOM).addFilter(_is_relevant)


def uninstall() -> None:
    """Undoes :func:`install`, except for `transformer_engine`, which megatron-core keeps. No-op if not installed."""
    global _redirected
    if _redirected is None:
        return
    _redirected.remove()
    _redirected = None
    logging.getLogger(_RANDOM).removeFilter(_is_relevant)


def installed() -> bool:
    """Whether megatron-core currently runs on the CPU."""
    return _redirected is not None


@contextmanager
def on_cpu(recipes: str | None = None, replace: bool = False) -> Iterator[None]:
    """Context manager that calls :func:`install`, and :func:`uninstall` at its end unless it was installed before.

    Args:
        recipes, replace: see :func:`install`.
    """
    was_installed = installed()
    install(recipes, replace)
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"torchweft.compat.megatron: cannot import {name} ({error}). To install it: {HOW_TO_INSTALL}."
        ) from error


def _check_install_order() -> None:
    if not _import("megatron.core.extensions.transformer_engine").HAVE_TE:
        raise ImportError(
            "torchweft.compat.megatron: megatron.core was imported before install() and found no Transformer Engine. "
            "Call install() before the first import of megatron.core."
        )
