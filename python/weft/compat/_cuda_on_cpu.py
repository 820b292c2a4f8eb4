"""Runs scripts that ask for CUDA on the CPU: devices in calls of torch, ``.cuda()``, autocast and functions of
torch.cuda."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

_MISSING = object()
# By object and name: who replaced an attribute by which value. The first entry is the original.
_replacements: dict[tuple[int, str], list[tuple[object, Any]]] = {}


def replace_attribute(who: object, owner: Any, name: str, value: Any) -> None:
    """Replaces an attribute until `who` restores it. Several may replace one, and restore it in any order."""
    stack = _replacements.setdefault((id(owner), name), [(None, getattr(owner, name, _MISSING))])
    stack.append((who, value))
    setattr(owner, name, value)


def restore_attribute(who: object, owner: Any, name: str) -> None:
    """Undoes :func:`replace_attribute`: the newest replacement that is left applies, or the original."""
    stack = _replacements[id(owner), name]
    stack[:] = [entry for entry in stack if entry[0] is not who]
    if len(stack) == 1:
        del _replacements[id(owner), name]
    if stack[-1][1] is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, stack[-1][1])


def remove_mode(mode: TorchFunctionMode) -> None:
    """Removes a mode of this thread, also below others."""
    above: list[Any] = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)


def is_cuda(value: Any) -> bool:
    """Whether an argument of a call is a CUDA device: "cuda", "cuda:1" or torch.device("cuda")."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


def _cpu_instead(value: Any) -> Any:
    """Returns "cpu" for a CUDA device or the index of a GPU, other values as they are."""
    return "cpu" if is_cuda(value) or type(value) is int else value


class CudaToCpuMode(TorchFunctionMode):
    """Makes calls of torch that name a CUDA device use the CPU, in this thread."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = ["cpu" if is_cuda(value) else value for value in args]
        kwargs = {name: "cpu" if is_cuda(value) else value for name, value in (kwargs or {}).items()}
        if "device" in kwargs:
            kwargs["device"] = _cpu_instead(kwargs["device"])
        if func is torch.Tensor.to and len(args) > 1:
            args[1] = _cpu_instead(args[1])
        return func(*args, **kwargs)


def _stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``.cuda()`` of a tensor or module that stays on the CPU."""
    return self


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))  # torch.manual_seed calls torch.cuda.manual_seed_all


def _module_to(to: Callable[..., Any]) -> Callable[..., Any]:
    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _cpu_instead(kwargs["device"])
        return to(self, *(_cpu_instead(value) for value in args[:1]), *args[1:], **kwargs)

    return on_cpu


def _load(load: Callable[..., Any]) -> Callable[..., Any]:
    def on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(f, _cpu_instead(map_location), *args, **kwargs)

    return on_cpu


def _autocast_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """autocast("cuda") as autocast("cpu"), with the default dtype of CUDA."""

    def on_cpu(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        init(self, device_type, dtype, enabled, cache_enabled)

    return on_cpu


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _attributes() -> list[tuple[Any, str, Any]]:
    """Returns (object, name, replacement) of what is replaced."""
    autocast, set_device = torch.amp.autocast_mode.autocast, torch.set_default_device
    of_torch_cuda = {
        "current_device": _returns(0),
        "device_count": _returns(1),
        "empty_cache": _returns(None),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "is_bf16_supported": _returns(True),
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "max_memory_allocated": _returns(0),
        "memory_allocated": _returns(0),
        "reset_peak_memory_stats": _returns(None),
        "set_device": _returns(None),
        "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
        "synchronize": _returns(None),
    }
    return [
        (torch.Tensor, "cuda", _stay),
        (torch.Tensor, "pin_memory", _stay),
        (torch.nn.Module, "cuda", _stay),
        (torch.nn.Module, "to", _module_to(torch.nn.Module.to)),
        (torch, "load", _load(torch.load)),
        (torch, "set_default_device", lambda device: set_device(_cpu_instead(device))),
        (autocast, "__init__", _autocast_on_cpu(autocast.__init__)),
        *((torch.cuda, name, value) for name, value in of_torch_cuda.items()),
    ]


class CudaOnCpu:
    """The redirection of CUDA to the CPU, from construction to :meth:`remove`."""

    def __init__(self) -> None:
        self._attributes = _attributes()
        for owner, name, value in self._attributes:
            replace_attribute(self, owner, name, value)
        self._mode = CudaToCpuMode()
        _push_mode(self._mode)

    def remove(self) -> None:
        """Restores everything."""
        remove_mode(self._mode)
        for owner, name, _ in self._attributes:
            restore_attribute(self, owner, name)
