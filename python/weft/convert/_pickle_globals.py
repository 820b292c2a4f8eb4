"""What a pickle may name, and the plain values that stand for it; no class or function of another module is here."""

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
    """A global that a pickle may call; `make` checks its arguments and returns plain data."""

    make: Callable[..., Any]


class BytesIOContent:
    """Stands for an io.BytesIO, of which it keeps the content."""

    def __init__(self, content: Any = b"") -> None:
        self.set_state((content,))

    def set_state(self, state: Any) -> None:
        if not isinstance(state, tuple) or not state or type(state[0]) is not bytes:
            raise ValueError("the state of a BytesIO is not bytes")
        self.content = state[0]


class OpaqueObject:
    """Stands for a class of OPAQUE_MODULES or an object of it: its name and arguments, neither imported nor made."""

    def __init__(self, name: str, args: tuple | None = None) -> None:
        self.name, self.args = name, args

    def make(self, *args: Any) -> OpaqueObject:
        return OpaqueObject(self.name, args)

    def __repr__(self) -> str:
        return self.name if self.args is None else f"{self.name}({', '.join(map(repr, self.args))})"


OPAQUE_MODULES = ("megatron.", "numpy", "signal")  # first words of their modules


class DcpObject:
    """Stands for an object of torch.distributed.checkpoint: the name of its class, and its state."""

    def __init__(self, kind: str, args: tuple = ()) -> None:
        self.kind, self.args, self.state = kind, args, None

    def field(self, name: str, *default: Any) -> Any:
        """An attribute of the object; ConversionError if it has none and there is no `default`."""
        if isinstance(self.state, dict) and name in self.state:
            return self.state[name]
        if default:
            return default[0]
        raise ConversionError(f"a {self.kind} has no {name}")


# ---- tables ---------------------------------------------------------------------------------------------------------


def make_set(items: Any = ()) -> set:
    if not isinstance(items, (list, tuple)):
        raise ValueError("a set is not made of a list")
    return set(checked_keys(items))


def make_path(*parts: Any) -> str:
    if not all(isinstance(part, str) for part in parts):
        raise ValueError("the parts of a path are not text")
    return "/".join(parts).replace("//", "/")


def make_bytes(text: Any, encoding: Any) -> bytes:
    """How protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes that are not encoded as latin1")
    return text.encode("latin-1")


def make_device(kind: Any, *index: Any) -> torch.device:
    if not isinstance(kind, str) or len(kind) > 64:
        raise ValueError("the name of a device is not text")
    return torch.device(kind, *nonnegative_ints(index, "a device's index"))


ATOMIC_TYPES = {str, int, bool, float, bytes, type(None)}


def checked_keys(items: Sequence[Any]) -> Sequence[Any]:
    """`items`, each of which a dict or set may hold: its hash is cheap and cannot recurse."""
    for item in items:
        plain = type(item) in ATOMIC_TYPES or isinstance(item, (torch.dtype, DcpObject))
        if not plain and not (type(item) is tuple and len(item) <= 64 and ATOMIC_TYPES.issuperset(map(type, item))):
            raise ValueError(f"a {type(item).__name__} in it is a key, or in a set, and is not a plain value")
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
