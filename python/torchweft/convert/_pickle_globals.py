"""Globals that a pickle may reference, mapped to plain data. No class or function of another module is reachable."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._lazy_tensor import ConversionError, nonnegative_ints

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


@dataclass(frozen=True)
class AllowedCall:
    """A global that a pickle may call. `make` checks the arguments and returns plain data."""

    make: Callable[..., Any]


class BytesIOContent:
    """Replaces an io.BytesIO; keeps its content."""

    def __init__(self, content: Any = b"") -> None:
        self.set_state((content,))

    def set_state(self, state: Any) -> None:
        if not isinstance(state, tuple) or not state or type(state[0]) is not bytes:
            raise ValueError("the state of a BytesIO is not bytes")
        self.content = state[0]


class OpaqueObject:
    """Replaces a class of OPAQUE_MODULES, or an instance: keeps the name and arguments and imports nothing."""

    def __init__(self, name: str, args: tuple[Any, ...] | None = None) -> None:
        self.name, self.args = name, args

    def make(self, *args: Any) -> OpaqueObject:
        return OpaqueObject(self.name, args)

    def __repr__(self) -> str:
        return self.name if self.args is None else f"{self.name}({', '.join(map(repr, self.args))})"


OPAQUE_MODULES = ("megatron.", "numpy", "signal", "transformer_engine.")  # prefixes of module names


class DcpObject:
    """Replaces an object of torch.distributed.checkpoint: keeps the name of its class and its state."""

    def __init__(self, kind: str, args: tuple[Any, ...] = ()) -> None:
        self.kind, self.args, self.state = kind, args, None

    def field(self, name: str, *default: Any) -> Any:
        """Returns an attribute, or `default`; raises ConversionError without either."""
        if isinstance(self.state, dict) and name in self.state:
            return self.state[name]
        if default:
            return default[0]
        raise ConversionError(f"a {self.kind} has no {name}")


# ---- tables ---------------------------------------------------------------------------------------------------------


def make_set(items: Any = ()) -> set[Any]:
    if not isinstance(items, (list, tuple)):
        raise ValueError("a set is built from something other than a list")
    return set(checked_keys(items))


def make_path(*parts: Any) -> str:
    if not all(isinstance(part, str) for part in parts):
        raise ValueError("a part of a path is not a string")
    return "/".join(parts).replace("//", "/")


def make_bytes(text: Any, encoding: Any) -> bytes:
    """Decodes bytes as protocol 2 writes them."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("it has bytes that are not encoded as latin1")
    return text.encode("latin-1")


def make_device(kind: Any, *index: Any) -> torch.device:
    if not isinstance(kind, str) or len(kind) > 64:
        raise ValueError("the name of a device is not a string")
    return torch.device(kind, *nonnegative_ints(index, "a device's index"))


ATOMIC_TYPES = {str, int, bool, float, bytes, type(None)}


def checked_keys(items: Sequence[Any]) -> Sequence[Any]:
    """Returns `items`; raises unless each is cheap to hash, without recursion, as a key of a dict or set."""
    for item in items:
        plain = type(item) in ATOMIC_TYPES or isinstance(item, (torch.dtype, DcpObject))
        if not plain and not (type(item) is tuple and len(item) <= 64 and ATOMIC_TYPES.issuperset(map(type, item))):
            raise ValueError(
                f"a {type(item).__name__} is a key of a dict or an element of a set, expected a plain value"
            )
    return items


PLAIN_GLOBALS: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): AllowedCall(lambda: argparse.Namespace()),
    ("collections", "OrderedDict"): AllowedCall(lambda: {}),
    ("builtins", "set"): AllowedCall(make_set),
    ("__builtin__", "set"): AllowedCall(make_set),
    ("_io", "BytesIO"): AllowedCall(BytesIOContent),
    ("torch", "Size"): AllowedCall(lambda sizes=(): nonnegative_ints(sizes, "a size")),
    ("torch", "device"): AllowedCall(make_device),
    ("torch.serialization", "_get_layout"): AllowedCall(lambda name: "strided"),
    ("pathlib", "PosixPath"): AllowedCall(make_path),
    ("_codecs", "encode"): AllowedCall(make_bytes),
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}
DCP = "torch.distributed.checkpoint."
DCP_CLASSES = {
    "metadata": "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "filesystem": "_StorageInfo",
    "planner": "SavePlan WriteItem TensorWriteData WriteItemType",
}
DCP_GLOBALS = PLAIN_GLOBALS | {
    (DCP + module, kind): AllowedCall(lambda *args, kind=kind: DcpObject(kind, args))
    for module, kinds in DCP_CLASSES.items()
    for kind in kinds.split()
}
