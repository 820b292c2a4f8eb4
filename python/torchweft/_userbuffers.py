"""Transformer Engine's functions that set up the overlap of communication with GEMMs, so that callers run unchanged.

weft needs no setup: all layers of a process group share one workspace, which is allocated at the first call and grows
with the number of rows. These functions check and store their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import _C

# Overlapped collectives of Transformer Engine, with the methods that each supports.
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
    """Checks the arguments of Transformer Engine's userbuffers. weft itself needs no setup.

    Args:
        shape: [tokens, hidden size]. Layers of any width and number of rows share one workspace, so it sets no limit.
        tp_size: number of tensor-parallel ranks.
        use_fp8: not supported.
        quantization_modes: FP8 modes are not supported.
        dtype: dtype of the buffers; stored only.
        ub_cfgs: options by collective, e.g. ``{"qkv_fprop": {"method": "ring_exchange"}}``, or a list of such
            dictionaries. Names and methods are checked.
        bootstrap_backend: ignored.
        with_cublasmp: ignored.

    Raises:
        RuntimeError: if it was already called; call :func:`destroy_ub` first.
    """
    global _configuration
    if _configuration is not None:
        raise RuntimeError("initialize_ub: already initialized. Call destroy_ub() first.")
    if use_fp8 or any("FP8" in str(mode) for mode in quantization_modes or ()):
        raise NotImplementedError("initialize_ub: FP8 buffers are not supported. Omit use_fp8 and quantization_modes.")
    if len(shape) != 2 or min(shape) < 0:
        raise ValueError(f"initialize_ub: shape is {list(shape)}, expected [tokens, hidden size].")
    if tp_size < 1:
        raise ValueError(f"initialize_ub: tp_size is {tp_size}, expected 1 or more.")
    configurations = [ub_cfgs] if isinstance(ub_cfgs, dict) else list(ub_cfgs or ())
    for configuration in configurations:
        _check(configuration)
    _configuration = {"shape": list(shape), "tp_size": tp_size, "dtype": dtype, "ub_cfgs": configurations}


def _check(configuration: dict[str, dict[str, Any]]) -> None:
    for name, options in configuration.items():
        if name not in COMMUNICATIONS:
            raise ValueError(
                f"initialize_ub: unknown collective {name!r} in ub_cfgs."
                f"{_C.did_you_mean(name, list(COMMUNICATIONS))} Known: {', '.join(COMMUNICATIONS)}."
            )
        method = options.get("method", COMMUNICATIONS[name][0])
        if method not in COMMUNICATIONS[name]:
            known = " or ".join(COMMUNICATIONS[name])
            raise ValueError(f"initialize_ub: the method of {name!r} is {method!r}, expected {known}.")


def destroy_ub() -> None:
    """Discards the arguments of :func:`initialize_ub`. Does nothing if it was not called."""
    global _configuration
    _configuration = None
