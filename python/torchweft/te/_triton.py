"""Triton's interpreter on simulated devices: no driver of a GPU, no measurements, no copies of tensors, and no access
to memory outside of the tensors of a kernel."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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


class _Memory(threading.local):
    """The interpreter's accesses to memory, which raise outside of the tensors of the kernel that runs. On a GPU such
    an access is illegal; here it would read or overwrite what belongs to the process."""

    def __init__(self, unchecked: Any) -> None:
        self._unchecked = unchecked
        self._kernel = ""
        self._ranges: list[tuple[int, int]] = []  # addresses: of the first byte, and after the last one

    @contextmanager
    def of(self, kernel: str, arguments: Iterable[Any]) -> Iterator[None]:
        before = self._kernel, self._ranges
        self._kernel, self._ranges = kernel, list(_ranges(arguments))
        try:
            yield
        finally:
            self._kernel, self._ranges = before

    def _check(self, what: str, addresses: Any, mask: Any, size: int) -> None:
        used = addresses[mask]
        if not used.size:
            return
        first, last = int(used.min()), int(used.max()) + size
        if any(begin <= first and last <= end for begin, end in self._ranges):
            return
        outside = sum(not any(begin <= a and a + size <= end for begin, end in self._ranges) for a in used.flat)
        if outside:
            raise IndexError(
                f"the Triton kernel {self._kernel} {what} {outside} of {used.size} elements outside of its tensors; on "
                "a GPU this is an illegal memory access. Check the sizes that it was given."
            )

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check("reads", addresses, mask, other.dtype.itemsize)
        return self._unchecked.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, value: Any, mask: Any) -> Any:
        self._check("writes", addresses, mask, value.dtype.itemsize)
        return self._unchecked.store(addresses, value, mask)

    def atomic_cas(self, addresses: Any, compared: Any, value: Any, order: Any) -> Any:
        self._check("writes", addresses, ..., value.dtype.itemsize)
        return self._unchecked.atomic_cas(addresses, compared, value, order)

    def atomic_rmw(self, operation: Any, addresses: Any, value: Any, mask: Any, order: Any) -> Any:
        self._check("writes", addresses, mask, value.dtype.itemsize)
        return self._unchecked.atomic_rmw(operation, addresses, value, mask, order)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unchecked, name)


def _ranges(arguments: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """The memory of all tensors among the arguments of a kernel."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _ranges(argument)
        argument = getattr(argument, "base", argument)  # of a descriptor, or of a tensor with another dtype
        if isinstance(argument, torch.Tensor):
            storage = argument.untyped_storage()
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def install() -> None:
    """Prepares Triton, if it is installed, to interpret the kernels of Transformer Engine. Imports Triton, which reads
    TRITON_INTERPRET then."""
    if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return
    try:
        from triton.runtime import driver, interpreter
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    if isinstance(getattr(driver, "_active", None), _Driver):
        return
    driver.set_active(_Driver())
    _interpret_library()
    prune, run = Autotuner.prune_configs, interpreter.GridExecutor.__call__
    memory = interpreter._interpreter = _Memory(interpreter._interpreter)

    def prune_to_largest(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        return [max(prune(self, kwargs), key=_block_elements)]

    def run_on_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [_on_host(argument) for argument in args]
        named = {name: _on_host(value) for name, value in kwargs.items()}
        with memory.of(self.fn.__name__, [*given, *named.values()]):
            return run(self, *given, **named)

    Autotuner.prune_configs = prune_to_largest
    interpreter.GridExecutor.__call__ = run_on_host
