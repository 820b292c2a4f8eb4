"""Transformer Engine's `_extra_state` of delayed scaling: a pickle in a uint8 tensor, read as data."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import torch

from .._delayed_scaling import MAX_LENGTH
from ._lazy_tensor import ConversionError, checked_shape, nonnegative_ints, row_major_strides
from ._pickle_globals import PLAIN_GLOBALS, STORAGES, AllowedCall, OpaqueObject
from ._unpickler import MAX_NAME, Globals, Unpickler, load

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of torch.save without a zip file
_MAX_STORAGES = 64  # of a state
_MODULE_SLOTS = 3, 2  # quantizers of a GEMM: input, weight, output; grad_output, grad_input
_OPERATION_SLOTS = 2, 1  # input, weight; grad_output


def read_extra_state(content: bytes, where: str) -> list[list[torch.Tensor]] | None:
    """Returns for each GEMM the states of (input, weight) and of (grad_output): float32 [1 + history, tensors], scales
    and then the history, whose first row is that of the current step. None if the recipe has no state.

    Raises:
        ConversionError: for anything that is not such a pickle.
    """
    state = load(content, where, _globals(), _reject_storage)
    if not isinstance(state, dict):
        raise ConversionError(f"{where} contains a {type(state).__name__}, expected Transformer Engine's state")
    if "forward" in state or "backward" in state:
        forward, backward, slots = state.get("forward"), state.get("backward"), _OPERATION_SLOTS
    else:
        forward, backward, slots = state, state, _MODULE_SLOTS
    if not isinstance(forward, dict) or "scale_fwd" not in forward:
        return None
    parts = [
        _part(forward, "fwd", slots[0], where),
        _part(backward if isinstance(backward, dict) else {}, "bwd", slots[1], where),
    ]
    if len(parts[0]) != len(parts[1]):
        raise ConversionError(f"{where} has {len(parts[0])} GEMMs in forward and {len(parts[1])} in backward")
    two = slots is _MODULE_SLOTS and len(parts[1]) == 2
    if two and not parts[1][1][1:].any() and parts[1][0][1:, 1].any():
        raise ConversionError(f"{where} has the order of gradients of an early release of Transformer Engine 2")
    return [[fwd[:, :2].clone(), bwd[:, :1].clone()] for fwd, bwd in zip(*parts, strict=True)]


def _part(state: dict[Any, Any], suffix: str, slots: int, where: str) -> list[torch.Tensor]:
    """Returns the scales and histories of one direction, for each GEMM."""
    scale, history = state.get(f"scale_{suffix}"), state.get(f"amax_history_{suffix}")
    if not isinstance(scale, torch.Tensor) or not isinstance(history, torch.Tensor):
        raise ConversionError(f"{where} has no scales and histories of delayed scaling ({suffix})")
    fits = (
        (scale.dtype, history.dtype) == (torch.float32, torch.float32)
        and (scale.dim(), history.dim()) == (1, 2)
        and len(scale) == history.shape[1]
        and len(scale) >= slots
        and len(scale) % slots == 0
        and 1 <= len(history) <= MAX_LENGTH
    )
    if not fits:
        raise ConversionError(
            f"{where} has scales {list(scale.shape)} and histories {list(history.shape)} that do not belong together"
        )
    return list(torch.cat([scale[None], history]).split(slots, 1))


# ---- tensors in a pickle: torch.save of each storage, without a zip file --------------------------------------------


@dataclass(frozen=True)
class _StorageRef:
    key: str
    dtype: torch.dtype
    count: int


def _reject_storage(pid: Any) -> Any:
    raise ConversionError("it contains a tensor without data")


def _storage_ref(pid: Any) -> _StorageRef:
    if not isinstance(pid, tuple) or len(pid) != 6 or not isinstance(pid[2], str):
        raise ValueError("the data of a tensor has no name")
    if not isinstance(pid[1], torch.dtype) or pid[5] is not None:
        raise ValueError("the data of a tensor has an unsupported type")
    return _StorageRef(pid[2], pid[1], *nonnegative_ints((pid[4],), "the size of a storage"))


def _storage(content: Any) -> torch.Tensor:
    """As torch.storage._load_from_bytes, but returns a tensor of all elements. The content: magic number, protocol,
    system, a storage, the names of storages, then for each of them its number of elements and its data."""
    if type(content) is not bytes:
        raise ValueError("the data of a tensor is not bytes")
    values, position = [], 0
    for _ in range(5):
        unpickler = Unpickler(content[position:], "a tensor", _STORAGE_GLOBALS, _storage_ref)
        values.append(unpickler.load())
        position += unpickler.position
    magic, protocol, system, ref, names = values
    if magic != _MAGIC or protocol != _PROTOCOL or not isinstance(system, dict) or not system.get("little_endian"):
        raise ValueError("the data of a tensor has an unknown format")
    if not isinstance(ref, _StorageRef) or names != [ref.key]:
        raise ValueError("the data of a tensor is not one storage")
    size = ref.count * ref.dtype.itemsize
    if len(content) != position + 8 + size or struct.unpack_from("<q", content, position)[0] != ref.count:
        raise ValueError("the data of a tensor has another size than its storage")
    return torch.frombuffer(bytearray(content[position + 8 :]), dtype=ref.dtype) if size else torch.empty(0)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> torch.Tensor:
    """As torch._utils._rebuild_tensor_v2, for contiguous tensors."""
    if not isinstance(storage, torch.Tensor):
        raise ValueError("a tensor has no data")
    sizes = checked_shape(shape, storage.dtype)
    (first,) = nonnegative_ints((offset,), "the offset of a tensor")
    count = math.prod(sizes)
    if tuple(strides) != row_major_strides(sizes) or first + count > len(storage):
        raise ValueError("a tensor is not contiguous, or exceeds its storage")
    return storage[first : first + count].view(sizes)


def _member(owner: Any, name: Any) -> OpaqueObject:
    """A member of an enum, as Python 3.11 pickles it."""
    if not isinstance(owner, OpaqueObject) or not isinstance(name, str):
        raise ValueError("it reads an attribute of something other than an enum")
    if len(owner.name) + len(name) > 2 * MAX_NAME:
        raise ValueError("the name of an enum's member is too long")
    return OpaqueObject(f"{owner.name}.{name}")


_STORAGE_GLOBALS: Globals = {("torch", name): dtype for name, dtype in STORAGES.items()}


def _globals() -> Globals:
    """Returns the globals of one pickle, which reads a limited number of storages."""
    calls = iter(range(_MAX_STORAGES))

    def limited_storage(content: Any) -> torch.Tensor:
        if next(calls, None) is None:
            raise ValueError(f"it has more than {_MAX_STORAGES} tensors")
        return _storage(content)

    return PLAIN_GLOBALS | {
        ("builtins", "getattr"): AllowedCall(_member),
        ("torch.storage", "_load_from_bytes"): AllowedCall(limited_storage),
        ("torch._utils", "_rebuild_tensor_v2"): AllowedCall(_tensor),
    }
