"""Triton's interpreter on simulated devices: no driver of a GPU, no measurements, no copies of tensors, and no access
to memory outside of the tensors of a kernel. Kernels of Transformer Engine that are known run as operations."""

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
from . import _triton_kernels

_LEAST_ADDRESS = 1 << 32  # smaller integers are no addresses


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


def _rounding(convert: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter's conversion of numbers, which itself truncates float32 to bfloat16. GPUs round to nearest."""
    import numpy as np
    from triton import language as tl

    def converted(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if source != tl.float32 or target != tl.bfloat16:
            return convert(values, source, target, mode)
        bits = np.frombuffer(values.tobytes(), dtype=np.uint32)
        nearest = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        not_a_number = (bits & 0x7FFFFFFF) > 0x7F800000
        return np.where(not_a_number, (bits >> 16 | 0x40).astype(np.uint16), nearest).reshape(values.shape)

    return converted


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
        # Addresses: of the first byte, and after the last one. None: any, for a kernel that is given addresses.
        self._ranges: list[tuple[int, int]] | None = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restores after a kernel what the one that called it may access."""
        before = self._kernel, self._ranges
        try:
            yield
        finally:
            self._kernel, self._ranges = before

    def allow(self, kernel: str, arguments: Iterable[Any]) -> None:
        """The kernel may access the memory of these tensors, which are on the host."""
        given = list(_flat(arguments))
        self._kernel, self._ranges = kernel, None
        if not any(map(_holds_addresses, given)):
            storages = [t.untyped_storage() for t in given if isinstance(t, torch.Tensor)]
            self._ranges = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]

    def _check(self, what: str, addresses: Any, mask: Any, size: int) -> None:
        used = addresses[mask]
        if self._ranges is None or not used.size:
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


def _flat(arguments: Iterable[Any]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _flat(argument)
        else:
            yield getattr(argument, "base", argument)  # of a descriptor, or of a tensor with another dtype


def _holds_addresses(argument: Any) -> bool:
    """Whether an argument may be an address, or a table of them."""
    if isinstance(argument, torch.Tensor):
        integers = argument.dtype in (torch.int64, torch.uint64) and argument.numel() > 0
        return integers and int(argument.view(torch.int64).abs().max()) >= _LEAST_ADDRESS
    return isinstance(argument, int) and abs(argument) >= _LEAST_ADDRESS


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
    hosted = interpreter.GridExecutor._init_args_hst
    interpreter._convert_float = _rounding(interpreter._convert_float)
    memory = interpreter._interpreter = _Memory(interpreter._interpreter)

    def prune_to_largest(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        return [max(prune(self, kwargs), key=_block_elements)]

    def run_on_host(self: Any, *args: Any, **kwargs: Any) -> Any:
        hosts, named = tuple(map(_on_host, args)), {name: _on_host(value) for name, value in kwargs.items()}
        if operations := _triton_kernels.known(self.fn):
            return _triton_kernels.run(operations, self.fn, hosts, named)
        with memory.restored():
            return run(self, *hosts, **named)

    def host_arguments(self: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given, named = hosted(self, args, kwargs)
        memory.allow(self.fn.__name__, [*given, *named.values()])
        return given, named

    Autotuner.prune_configs = prune_to_largest
    interpreter.GridExecutor._init_args_hst = host_arguments
    interpreter.GridExecutor.__call__ = run_on_host
