"""Runs scripts that ask for CUDA on the CPU: devices in calls of torch, ``.cuda()``, autocast and a few functions of
torch.cuda."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def is_cuda(value: Any) -> bool:
    """Whether an argument of a call is a CUDA device: "cuda", "cuda:1" or torch.device("cuda")."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


class CudaToCpuMode(TorchFunctionMode):
    """Makes calls of torch that name a CUDA device use the CPU, in this thread."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = ["cpu" if is_cuda(value) else value for value in args]
        kwargs = {name: "cpu" if is_cuda(value) else value for name, value in (kwargs or {}).items()}
        if type(kwargs.get("device")) is int:  # the index of a GPU
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args[1] = "cpu"
        return func(*args, **kwargs)


def _stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``.cuda()`` of a tensor or module that stays on the CPU."""
    return self


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))  # torch.manual_seed calls torch.cuda.manual_seed_all


def _autocast_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """autocast("cuda") as autocast("cpu"), with the default dtype of CUDA."""

    def on_cpu(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        init(self, device_type, dtype, enabled, cache_enabled)

    return on_cpu


class CudaOnCpu:
    """What :func:`install` replaced, for :func:`uninstall`."""

    def __init__(self) -> None:
        self._mode = CudaToCpuMode()
        self._replaced: list[tuple[Any, str, Any]] = []
        nothing: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
        zero: Callable[..., int] = lambda *args, **kwargs: 0  # noqa: E731
        self._replacements: list[tuple[Any, str, Any]] = [
            (torch.Tensor, "cuda", _stay),
            (torch.nn.Module, "cuda", _stay),
            (torch.amp.autocast_mode.autocast, "__init__", _autocast_on_cpu(torch.amp.autocast_mode.autocast.__init__)),
            (torch.cuda, "current_device", zero),
            (torch.cuda, "set_device", nothing),
            (torch.cuda, "synchronize", nothing),
            (torch.cuda, "empty_cache", nothing),
            (torch.cuda, "reset_peak_memory_stats", nothing),
            (torch.cuda, "memory_allocated", zero),
            (torch.cuda, "max_memory_allocated", zero),
            (torch.cuda, "manual_seed", _seed),
            (torch.cuda, "manual_seed_all", _seed),
        ]

    def enter(self) -> None:
        for owner, name, value in self._replacements:
            self._replaced.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def exit(self) -> None:
        self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        while self._replaced:
            setattr(*self._replaced.pop())
