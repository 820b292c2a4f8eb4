"""Triton's interpreter on simulated devices: no driver of a GPU, no measurements, no copies of tensors."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from .. import _device


class _Driver:
    """What Triton asks the driver of a device for while it interprets kernels."""

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda kernel_call, quantiles: [0.0 for _ in quantiles]


def _block_elements(config: Any) -> int:
    """Returns the product of a configuration's block sizes. The interpreter's time grows with the programs."""
    return math.prod(size for size in config.kwargs.values() if isinstance(size, int))


def _interpret_library() -> None:
    """Replaces the functions of Triton's own library that are compiled for a GPU, because torch imported Triton before
    TRITON_INTERPRET was set."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for module in [module for name, module in sys.modules.items() if name.startswith("triton.")]:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, InterpretedFunction(value.fn))


def _on_host(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(_on_host(element) for element in argument)
    return _device.host_alias(argument) if isinstance(argument, torch.Tensor) and argument.is_cuda else argument


def install() -> None:
    """Prepares Triton, if it is installed, to interpret the kernels of Transformer Engine. Imports Triton, which reads
    TRITON_INTERPRET then."""
    if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return
    try:
        from triton.runtime import driver
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        return
    if isinstance(getattr(driver, "_active", None), _Driver):
        return
    driver.set_active(_Driver())
    _interpret_library()
    prune, run = Autotuner.prune_configs, GridExecutor.__call__

    def prune_to_largest(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        return [max(prune(self, kwargs), key=_block_elements)]

    def run_on_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, *map(_on_host, args), **{name: _on_host(value) for name, value in kwargs.items()})

    Autotuner.prune_configs = prune_to_largest
    GridExecutor.__call__ = run_on_host
