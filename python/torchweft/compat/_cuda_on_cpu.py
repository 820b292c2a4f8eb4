"""Runs scripts that ask for CUDA on the CPU: devices in calls of torch, ``.cuda()``, autocast, streams and functions
of torch.cuda."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed.device_mesh
import torch.distributed.distributed_c10d as c10d
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

_MISSING = object()
# By object and name: the replacements of an attribute that are still in place, the oldest first.
_replacements: dict[tuple[int, str], list[Replacement]] = {}


class Replacement:
    """Another value of an attribute, from construction to :meth:`remove`. Several may replace one attribute, and be
    removed in any order. A function calls the original after it was removed, since another library may have kept or
    wrapped it.

    Args:
        owner: module or class that has the attribute, or inherits it.
        name: its name.
        value: its new value. A class must make objects of the original class after the removal: :class:`_CudaObject`.
    """

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._owner, self._name, self.active = owner, name, True
        self.original: Any = getattr(owner, name, _MISSING)
        self._own: Any = vars(owner).get(name, _MISSING)  # missing if it is inherited
        self._value = self._while_active(value) if callable(value) and not isinstance(value, type) else value
        _replacements.setdefault((id(owner), name), []).append(self)
        setattr(owner, name, self._value)

    def _while_active(self, value: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (value if self.active else self.original)(*args, **kwargs)

    def remove(self) -> None:
        """Restores the attribute, unless something else has replaced or wrapped this value: that stays in place."""
        self.active = False
        stack = _replacements[id(self._owner), self._name]
        while stack and not stack[-1].active and stack[-1]._in_place():
            stack.pop()._restore()
        if not stack:
            del _replacements[id(self._owner), self._name]

    def _in_place(self) -> bool:
        return vars(self._owner).get(self._name, _MISSING) is self._value

    def _restore(self) -> None:
        if self._own is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)


def remove_mode(mode: TorchFunctionMode) -> None:
    """Removes a mode of this thread, also below others. No-op if something else has removed it."""
    above: list[Any] = []
    while _len_torch_function_stack() and (top := _pop_mode()) is not mode:
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
    """Makes calls of torch that name a CUDA device use the CPU, in this thread, while it is active."""

    active = True

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.redirect(func, args, kwargs or {}) if self.active else func(*args, **(kwargs or {}))

    def redirect(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls a function with the CPU in place of CUDA devices."""
        if func is torch.device and any(is_cuda(value) or type(value) is int for value in args[:1]):
            return torch.device("cpu")
        args = ["cpu" if is_cuda(value) else value for value in args]
        kwargs = {name: "cpu" if is_cuda(value) else value for name, value in kwargs.items()}
        if "device" in kwargs:
            kwargs["device"] = _cpu_instead(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
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


def _mesh_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    def on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, _cpu_instead(device_type), *args, **kwargs)

    return on_cpu


def _with_gloo(function: Callable[..., Any], position: int) -> Callable[..., Any]:
    """A function that creates a process group; `position` is that of its argument `backend`."""

    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        if len(given) > position and "nccl" in str(given[position]):
            given[position] = "gloo"
        if "nccl" in str(kwargs.get("backend")):
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        return function(*given, **kwargs)

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


class _CudaObject:
    """Base of classes in place of those of torch.cuda. Where no redirection is left, they make objects of those."""

    replaces: ClassVar[str]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        stack = _replacements.get((id(torch.cuda), cls.replaces), [])
        if any(replacement.active for replacement in stack):
            return super().__new__(cls)
        original = stack[0].original if stack else getattr(torch.cuda, cls.replaces)
        return original(*args, **kwargs)


class CpuDevice(_CudaObject, nullcontext[Any]):
    """torch.cuda.device, which has no effect."""

    replaces = "device"


class CpuEvent(_CudaObject):
    """A CUDA event on the CPU, where work is done before a call returns, except for asynchronous collectives, whose
    handles must be waited for: waiting does nothing."""

    replaces = "Event"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        """Stores the time."""
        self._time = time.perf_counter()

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Returns the milliseconds between the records of this event and of another one."""
        return (end_event._time - self._time) * 1e3

    def wait(self, stream: Any = None) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """Returns True."""
        return True


class CpuStream(_CudaObject, nullcontext[Any]):
    """A CUDA stream on the CPU, as :class:`CpuEvent`."""

    replaces = "Stream"
    device, priority, cuda_stream = torch.device("cpu"), 0, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(self)

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Records an event, a new one if none is given, and returns it."""
        event = event or CpuEvent()
        event.record()
        return event

    def wait_stream(self, stream: Any) -> None:
        """Does nothing."""

    def wait_event(self, event: Any) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """Returns True."""
        return True


@cache
def _stream() -> CpuStream:
    return CpuStream()


def _current_stream(device: Any = None) -> CpuStream:
    return _stream()


def _cpu_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _attributes() -> list[tuple[Any, str, Any]]:
    """Returns (object, name, replacement) of what is replaced."""
    autocast, set_device = torch.amp.autocast_mode.autocast, torch.set_default_device
    init_group, new_group = _with_gloo(c10d.init_process_group, 0), _with_gloo(c10d.new_group, 2)
    mesh = torch.distributed.device_mesh.DeviceMesh
    of_torch_cuda = {
        "Event": CpuEvent,
        "Stream": CpuStream,
        "current_device": _returns(0),
        "current_stream": _current_stream,
        "default_stream": _current_stream,
        "device": CpuDevice,
        "device_count": _returns(1),
        "empty_cache": _returns(None),
        "get_rng_state": _cpu_state,
        "is_bf16_supported": _returns(True),
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "max_memory_allocated": _returns(0),
        "memory_allocated": _returns(0),
        "reset_peak_memory_stats": _returns(None),
        "set_device": _returns(None),
        "set_stream": _returns(None),
        "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
        "stream": lambda stream: nullcontext(stream),
        "synchronize": _returns(None),
    }
    return [
        (torch.Tensor, "cuda", _stay),
        (torch.Tensor, "pin_memory", _stay),
        (torch.Tensor, "record_stream", _returns(None)),
        (torch.nn.Module, "cuda", _stay),
        (torch.nn.Module, "to", _module_to(torch.nn.Module.to)),
        (torch, "load", _load(torch.load)),
        (torch, "set_default_device", lambda device: set_device(_cpu_instead(device))),
        (autocast, "__init__", _autocast_on_cpu(autocast.__init__)),
        (mesh, "__init__", _mesh_on_cpu(mesh.__init__)),
        *((owner, "init_process_group", init_group) for owner in (c10d, torch.distributed)),
        *((owner, "new_group", new_group) for owner in (c10d, torch.distributed)),
        (torch.cuda.random, "get_rng_state", _cpu_state),
        *((torch.cuda, name, value) for name, value in of_torch_cuda.items()),
    ]


class CudaOnCpu:
    """The redirection of CUDA to the CPU, from construction to :meth:`remove`.

    Args:
        mode: redirects calls of torch; None: :class:`CudaToCpuMode`.
        attributes: further (object, name, replacement).
    """

    def __init__(self, mode: CudaToCpuMode | None = None, attributes: Iterable[tuple[Any, str, Any]] = ()) -> None:
        self._mode, self._thread = mode or CudaToCpuMode(), threading.get_ident()
        backward = self._in_backward(torch.autograd.graph._engine_run_backward)
        backwards = [(owner, "_engine_run_backward", backward) for owner in (torch.autograd, torch.autograd.graph)]
        self._replacements = [Replacement(*entry) for entry in (*_attributes(), *backwards, *attributes)]
        _push_mode(self._mode)

    def _in_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """torch's backward, in which the mode applies to functions written in Python; torch disables it while it calls
        a function that the mode has redirected, and backward is one."""

        def on_cpu(*args: Any, **kwargs: Any) -> Any:
            with self._mode if threading.get_ident() == self._thread else nullcontext():
                return run(*args, **kwargs)

        return on_cpu

    def remove(self) -> None:
        """Restores what nothing else has replaced or wrapped since; the rest has no effect any more.

        Raises:
            RuntimeError: in another thread than the one that constructed this object.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError("CUDA was redirected to the CPU in another thread. Call uninstall() there.")
        for replacement in self._replacements:
            replacement.remove()
        self._mode.active = False
        remove_mode(self._mode)
