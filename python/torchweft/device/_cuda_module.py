"""The names of `torch._C` that a build of torch for the CPU lacks. With them torch's own `torch.cuda` runs."""

from __future__ import annotations

import importlib
import threading
import time
import types
import uuid
from typing import TYPE_CHECKING, Any

import torch
from torch import _C

from .. import _device

if TYPE_CHECKING:
    from ._simulate import SimulatedDevices

CUDA_VERSION = "13.0"  # what torch.version.cuda says: that of the CUDA build of torch on the package index
_CUDA = 1  # c10::DeviceType::CUDA


# What `torch.cuda` and Inductor import of CUDA graphs and of their memory pools.
_OF_GRAPHS = (
    "_cuda_CUDAAllocator_AllocatorState",
    "_cuda_beginAllocateCurrentStreamToPool",
    "_cuda_beginAllocateCurrentThreadToPool",
    "_cuda_beginAllocateToPool",
    "_cuda_endAllocateCurrentStreamToPool",
    "_cuda_endAllocateToPool",
    "_cuda_releasePool",
    "_cuda_getCheckpointState",
    "_cuda_setCheckpointPoolState",
    "_cuda_checkPoolLiveAllocations",
)


def _unsupported(name: str, why: str) -> Any:
    def raise_error(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"simulated device: {name} is not supported: {why}")

    return raise_error


_raise_for_graph = _unsupported("a CUDA graph", "it records kernels of a GPU. Run the function without a graph.")


class _Graph:
    """The base of `torch.cuda.CUDAGraph`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        _raise_for_graph()


class DeviceProperties(types.SimpleNamespace):
    """What `torch.cuda.get_device_properties` returns."""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, L2_cache_size={self.L2_cache_size >> 20}MB)"
        )


def _properties(index: int, devices: SimulatedDevices) -> DeviceProperties:
    major, minor = devices.capability
    return DeviceProperties(
        name=devices.name,
        major=major,
        minor=minor,
        total_memory=devices.memory,
        multi_processor_count={8: 108, 9: 132, 10: 148}.get(major, 108),
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=166912 if major == 8 else 232448,
        shared_memory_per_multiprocessor=167936 if major == 8 else 233472,
        L2_cache_size=40 << 20 if major == 8 else 50 << 20,
        memory_clock_rate=1593000,
        memory_bus_width=5120,
        clock_rate=1410000,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName=devices.name,
        uuid=uuid.uuid5(uuid.NAMESPACE_OID, f"torchweft.device/{index}"),
        pci_bus_id=index,
        pci_device_id=0,
        pci_domain_id=0,
    )


class _StreamBase(torch.Stream):
    """The base of `torch.cuda.Stream`."""

    def __new__(
        cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0, **kwargs: Any
    ) -> Any:
        if kwargs.pop("stream_ptr", 0):
            _unsupported("an external stream", "it belongs to a GPU.")()
        if device_type:
            return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
        return super().__new__(cls, device=torch.device("cuda", _device.current_device()), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    @property
    def priority(self) -> int:
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -5)


class _EventBase(torch.Event):
    """The base of `torch.cuda.Event`."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **kwargs: Any
    ) -> Any:
        if interprocess:
            _unsupported("an event between processes", "CUDA IPC has no counterpart here.")()
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    @property
    def cuda_event(self) -> int:
        return self.event_id

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(torch.cuda.current_stream() if stream is None else stream)
        self._recorded = time.perf_counter()

    def elapsed_time(self, end_event: Any) -> float:
        if not hasattr(self, "_recorded") or not hasattr(end_event, "_recorded"):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return float(1e3 * (end_event._recorded - self._recorded))

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(torch.cuda.current_stream() if stream is None else stream)


def _current_stream(index: int) -> tuple[int, int, int]:
    stream = torch.accelerator.current_stream(torch.device("cuda", index))
    return (stream.stream_id, stream.device_index, _CUDA)


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    _device.exchange_device(device_index)
    torch.accelerator.set_stream(torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))


def _exchange_device(index: int) -> int:
    """Returns -1 and changes nothing for a negative index, as torch's function does."""
    return _device.exchange_device(index) if index >= 0 else -1


def _maybe_exchange_device(index: int) -> int:
    """Another function than `_exchange_device`: Dynamo tells them apart."""
    return _exchange_device(index)


def _set_device(index: int) -> None:
    _exchange_device(index)


class _Ranges:
    """NVTX: counts the depth of ranges and shows them to nobody."""

    def __init__(self) -> None:
        self._depth = threading.local()

    def rangePushA(self, message: str) -> int:
        self._depth.value = getattr(self._depth, "value", 0) + 1
        return int(self._depth.value) - 1

    def rangePop(self) -> int:
        self._depth.value = getattr(self._depth, "value", 0) - 1
        return int(self._depth.value)

    def markA(self, *args: Any) -> None:
        pass

    def rangeStartA(self, message: str) -> int:
        return 0

    rangeEnd = deviceRangeStart = deviceRangeEnd = markA


def _cudart(devices: SimulatedDevices) -> types.SimpleNamespace:
    """What `torch.cuda.cudart()` returns: the functions that succeed here, and their error codes."""
    success = types.SimpleNamespace(success=0)

    def succeed(*args: Any) -> int:
        return 0

    return types.SimpleNamespace(
        cudaError=success,
        cudaGetErrorString=lambda code: "no error",
        cudaProfilerStart=succeed,
        cudaProfilerStop=succeed,
        cudaHostRegister=succeed,
        cudaHostUnregister=succeed,
        cudaStreamCreate=succeed,
        cudaStreamDestroy=succeed,
        cudaMemGetInfo=_device.memory_info,
    )


def _names(devices: SimulatedDevices) -> dict[str, Any]:
    """The names of `torch._C`, and what they do here."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    major, minor = devices.capability
    return {
        "_cuda_init": nothing,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getDeviceCount": _device.device_count,
        "_cuda_getDevice": _device.current_device,
        "_cuda_setDevice": _set_device,
        "_cuda_exchangeDevice": _exchange_device,
        "_cuda_maybeExchangeDevice": _maybe_exchange_device,
        "_cuda_getCurrentStream": _current_stream,
        "_cuda_getCurrentRawStream": lambda index: _current_stream(index)[0],
        "_cuda_getDefaultStream": lambda index: (0, index, _CUDA),
        "_cuda_setStream": _set_stream,
        "_cuda_getStreamFromExternal": _unsupported("an external stream", "it belongs to a GPU."),
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_synchronize": nothing,
        "_cuda_sleep": nothing,
        "_cuda_hasPrimaryContext": lambda index: True,
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_getArchFlags": lambda: f"sm_{major}{minor}",
        "_cuda_canDeviceAccessPeer": lambda device, peer: device != peer,
        "_cuda_set_sync_debug_mode": nothing,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_ipc_collect": nothing,
        "_cuda_clearCublasWorkspaces": nothing,
        "_cuda_getCurrentBlasHandle": _unsupported("a cuBLAS handle", "there is no cuBLAS."),
        "_cuda_getCurrentSolverHandle": _unsupported("a cuSOLVER handle", "there is no cuSOLVER."),
        "_cuda_emptyCache": _device.empty_cache,
        "_cuda_memoryStats": _device.memory_stats,
        "_cuda_resetPeakMemoryStats": _device.reset_peak_stats,
        "_cuda_resetAccumulatedMemoryStats": _device.reset_accumulated_stats,
        "_cuda_setMemoryFraction": _device.set_memory_fraction,
        "_cuda_getMemoryFraction": _device.memory_fraction,
        "_cuda_memorySnapshot": lambda *args: {"segments": [], "device_traces": [], "allocator_settings": {}},
        "_cuda_record_memory_history": nothing,
        "_cuda_record_memory_history_legacy": nothing,
        "_cuda_isHistoryEnabled": lambda: False,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_cudaCachingAllocator_enable": nothing,
        "_cuda_cudaCachingAllocator_set_allocator_settings": nothing,
        "_cuda_lock_mutex": nothing,
        "_cuda_unlock_mutex": nothing,
        "_cuda_get_cudnn_benchmark_limit": lambda: 0,
        "_cuda_set_cudnn_benchmark_limit": nothing,
        "_cuda_jiterator_compile_and_launch_kernel": _unsupported("a jiterator kernel", "it is written in CUDA."),
        "_cuda_tunableop_is_enabled": lambda: False,
        "_CUDAGraph": _Graph,
        "_graph_pool_handle": _raise_for_graph,
        **{name: _raise_for_graph for name in _OF_GRAPHS if not hasattr(_C, name)},
        "_CudaDeviceProperties": DeviceProperties,
        "_CudaStreamBase": _StreamBase,
        "_CudaEventBase": _EventBase,
        "_cudart": _cudart(devices),
        "_has_cuda": True,
    }


def _tensor_type(name: str, dtype: torch.dtype) -> type:
    """Makes `torch.cuda.FloatTensor` and its kin."""

    class Meta(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == dtype

        def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
            device = torch.device("cuda", _device.current_device())
            if len(args) == 1 and not isinstance(args[0], int | torch.Size):
                return torch.as_tensor(args[0], dtype=dtype, device=device)
            sizes = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
            return torch.empty(sizes or (0,), dtype=dtype, device=device, **kwargs)

    names = {"__module__": "torch.cuda", "__qualname__": name, "dtype": dtype, "is_cuda": True}
    return Meta(f"torch.cuda.{name}", (), names)  # Tensor.type reads this name


TENSOR_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


def install(devices: SimulatedDevices) -> None:
    """Fills `torch._C` and what `torch.cuda` took from it when it was imported."""
    names = _names(devices)
    for name, value in names.items():
        setattr(_C, name, value)
    cuda = torch.cuda
    # Their classes derive from the bases above.
    streams, graphs = importlib.reload(cuda.streams), importlib.reload(cuda.graphs)
    every = [_properties(index, devices) for index in range(devices.count)]
    in_cuda = {
        "Stream": streams.Stream,
        "Event": streams.Event,
        "ExternalStream": streams.ExternalStream,
        **{name: getattr(graphs, name) for name in graphs.__all__},
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _maybe_exchange_device,
        "_CudaDeviceProperties": DeviceProperties,
        "_is_in_bad_fork": names["_cuda_isInBadFork"],
        "_cudart": names["_cudart"],
        "_get_device_properties": every.__getitem__,
        "default_generators": tuple(_device.default_generator(index) for index in range(devices.count)),
        "is_bf16_supported": lambda including_emulation=True: devices.capability >= (8, 0) or including_emulation,
        **{name: _tensor_type(name, dtype) for name, dtype in TENSOR_TYPES.items()},
    }
    for name, value in in_cuda.items():
        setattr(cuda, name, value)
    setattr(cuda.nvtx, "_nvtx", _Ranges())  # noqa: B010
    torch.version.cuda = CUDA_VERSION
    torch.backends.cudnn.enabled = False  # torch warns where it looks for cuDNN and does not find it
    cuda._lazy_init()
