"""What a pickle may name, and the plain values that stand for it; no class or function of another module is here."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .lazy import ConversionError, whole_numbers

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
class Call:
    """A global that a pickle may call; `make` checks its arguments and returns plain data."""

    make: Callable[..., Any]


class Bytes:
    """Stands for an io.BytesIO, of which it keeps the content."""

    def __init__(self, content: Any = b"") -> None:
        self.set_state((content,))

    def set_state(self, state: Any) -> None:
        if not isinstance(state, tuple) or not state or type(state[0]) is not bytes:
            raise ValueError("the state of a BytesIO is not bytes")
        self.content = state[0]


class Foreign:
    """Stands for a class of FOREIGN or an object of it: its name and arguments, neither imported nor made."""

    def __init__(self, name: str, given: tuple | None = None) -> None:
        self.name, self.given = name, given

    def make(self, *given: Any) -> Foreign:
        return Foreign(self.name, given)

    def __repr__(self) -> str:
        return self.name if self.given is None else f"{self.name}({', '.join(map(repr, self.given))})"


FOREIGN = ("megatron.", "numpy", "signal")  # first words of their modules


class Record:
    """Stands for an object of torch.distributed.checkpoint: the name of its class, and its state."""

    def __init__(self, kind: str, given: tuple = ()) -> None:
        self.kind, self.given, self.state = kind, given, None

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
    return set(keys(items))


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
    return torch.device(kind, *whole_numbers(index, "a device's index"))


ATOMS = {str, int, bool, float, bytes, type(None)}


def keys(items: Sequence[Any]) -> Sequence[Any]:
    """`items`, each of which a dict or set may hold: its hash is cheap and cannot recurse."""
    for item in items:
        plain = type(item) in ATOMS or isinstance(item, (torch.dtype, Record))
        if not plain and not (type(item) is tuple and len(item) <= 64 and ATOMS.issuperset(map(type, item))):
            raise ValueError(f"a {type(item).__name__} in it is a key, or in a set, and is not a plain value")
    return items


PLAIN: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): Call(lambda: argparse.Namespace()),
    ("collections", "OrderedDict"): Call(lambda: {}),
    ("builtins", "set"): Call(make_set),
    ("__builtin__", "set"): Call(make_set),
    ("_io", "BytesIO"): Call(Bytes),
    ("torch", "Size"): Call(lambda sizes=(): whole_numbers(sizes, "a size")),
    ("torch", "device"): Call(make_device),
    ("torch.serialization", "_get_layout"): Call(lambda name: "strided"),
    ("pathlib", "PosixPath"): Call(make_path),
    ("_codecs", "encode"): Call(make_bytes),
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}
DCP = "torch.distributed.checkpoint."
RECORDS = {
    "metadata": "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "filesystem": "_StorageInfo",
    "planner": "SavePlan WriteItem TensorWriteData WriteItemType",
}
METADATA = PLAIN | {
    (DCP + module, kind): Call(lambda *given, kind=kind: Record(kind, given))
    for module, kinds in RECORDS.items()
    for kind in kinds.split()
}
