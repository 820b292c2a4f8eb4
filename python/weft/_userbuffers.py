"""The names by which Transformer Engine sets up communication under GEMMs, so that code moves over as it is.

Here nothing has to be set up: a group's workspace is shared by all layers, grows with the rows it is asked for, and is
made at the first call. These functions check what they are given and keep it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# What each communication does: gathers or scatters, and the methods that can.
_GATHER, _SCATTER, _EITHER = ("ring_exchange",), ("ring_exchange", "pipeline"), ("bulk", "ring_exchange", "pipeline")
COMMUNICATIONS = {
    "qkv_fprop": _GATHER,
    "fc1_fprop": _GATHER,
    "proj_fprop": _SCATTER,
    "fc2_fprop": _SCATTER,
    "proj_dgrad": _GATHER,
    "fc2_dgrad": _GATHER,
    "qkv_dgrad": _EITHER,
    "fc1_dgrad": _EITHER,
    "qkv_wgrad": ("bulk",),
    "fc1_wgrad": ("bulk",),
    "proj_wgrad": ("external",),
    "fc2_wgrad": ("external",),
}

_configuration: dict[str, Any] | None = None


def initialize_ub(
    shape: Sequence[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: Sequence[Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: dict[str, dict[str, Any]] | Sequence[dict[str, dict[str, Any]]] | None = None,
    bootstrap_backend: str | None = None,
    with_cublasmp: bool = False,
) -> None:
    """Checks the arguments. `shape` binds nothing: layers of any width and any number of rows share one workspace."""
    global _configuration
    if _configuration is not None:
        raise RuntimeError("initialize_ub was called before; call destroy_ub first")
    if use_fp8 or any("FP8" in str(mode) for mode in quantization_modes or ()):
        raise NotImplementedError("initialize_ub: FP8 buffers are not there; leave use_fp8 and quantization_modes out")
    if len(shape) != 2 or min(shape) < 0:
        raise ValueError(f"initialize_ub: shape is {list(shape)}, expected [tokens, hidden size]")
    if tp_size < 1:
        raise ValueError(f"initialize_ub: tp_size is {tp_size}, expected 1 or more")
    configurations = [ub_cfgs] if isinstance(ub_cfgs, dict) else list(ub_cfgs or ())
    for configuration in configurations:
        _check(configuration)
    _configuration = {"shape": list(shape), "tp_size": tp_size, "dtype": dtype, "ub_cfgs": configurations}


def _check(configuration: dict[str, dict[str, Any]]) -> None:
    for name, options in configuration.items():
        if name not in COMMUNICATIONS:
            raise ValueError(f"initialize_ub: no communication is called {name!r}; known: {', '.join(COMMUNICATIONS)}")
        method = options.get("method", COMMUNICATIONS[name][0])
        if method not in COMMUNICATIONS[name]:
            known = " or ".join(COMMUNICATIONS[name])
            raise ValueError(f"initialize_ub: the method of {name!r} is {method!r}, expected {known}")


def destroy_ub() -> None:
    """Forgets what `initialize_ub` was given. Nothing if it was not called."""
    global _configuration
    _configuration = None
