"""Runs scripts that ask for CUDA on the CPU: devices in calls of torch, ``.cuda()``, autocast, streams and functions
of torch.cuda."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed.device_mesh
import torch.distributed.distributed_c10d as c10d
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
    try:
        while (top := _pop_mode()) is not mode:
            above.append(top)
    finally:
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
        if func is torch.device and any(is_cuda(value) or type(value) is int for value in args[:1]):
            return torch.device("cpu")
        args = ["cpu" if is_cuda(value) else value for value in args]
        kwargs = {name: "cpu" if is_cuda(value) else value for name, value in (kwargs or {}).items()}
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


class CpuEvent:
    """A CUDA event on the CPU, where work is done before a call returns, except for asynchronous collectives, whose
    handles must be waited for: waiting does nothing."""

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


class CpuStream(nullcontext[Any]):
    """A CUDA stream on the CPU, as :class:`CpuEvent`."""

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


_STREAM = CpuStream()


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
        "current_stream": _returns(_STREAM),
        "default_stream": _returns(_STREAM),
        "device": nullcontext,
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
        "stream": nullcontext,
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
        self._mode, self._thread, self._removed = mode or CudaToCpuMode(), threading.get_ident(), False
        backward = self._in_backward(torch.autograd.graph._engine_run_backward)
        backwards = [(owner, "_engine_run_backward", backward) for owner in (torch.autograd, torch.autograd.graph)]
        self._attributes = [*_attributes(), *backwards, *attributes]
        for owner, name, value in self._attributes:
            replace_attribute(self, owner, name, value)
        _push_mode(self._mode)

    def _in_backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """torch's backward, in which the mode applies to functions written in Python; torch disables it while it calls
        a function that the mode has redirected, and backward is one."""

        def on_cpu(*args: Any, **kwargs: Any) -> Any:
            applies = threading.get_ident() == self._thread and not self._removed
            with self._mode if applies else nullcontext():
                return run(*args, **kwargs)

        return on_cpu

    def remove(self) -> None:
        """Restores everything. Raises RuntimeError in another thread than the one that constructed this object."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("CUDA was redirected to the CPU in another thread. Call uninstall() there.")
        self._removed = True
        for owner, name, _ in self._attributes:
            restore_attribute(self, owner, name)
        remove_mode(self._mode)
