"""Pickles that are read without running anything: only the classes listed here are known, all others are refused."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from .lazy import ConversionError

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


class Bytes:
    """Stands for an io.BytesIO, of which it keeps the content."""

    content = b""

    def __init__(self, content: bytes = b"") -> None:
        self.content = content

    def __setstate__(self, state: tuple) -> None:
        self.content = state[0]


class Foreign:
    """Stands for an object of FOREIGN, neither imported nor made: its class and arguments as text."""

    name = ""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.given))})"


FOREIGN = ("megatron.", "numpy", "signal")  # first words of their modules

PLAIN: dict[tuple[str, str], Any] = {
    ("argparse", "Namespace"): argparse.Namespace,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "set"): set,
    ("__builtin__", "set"): set,
    ("_io", "BytesIO"): Bytes,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): lambda name: torch.strided,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts).replace("//", "/"),
    ("_codecs", "encode"): lambda text, encoding: text.encode(encoding),
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}
ENUMS = (metadata._MEM_FORMAT_ENCODING, planner.WriteItemType)
RECORDS = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    filesystem._StorageInfo,
    planner.SavePlan,
    planner.WriteItem,
    planner.TensorWriteData,
)
KINDS: dict[tuple[str, str], Any] = {(kind.__module__, kind.__name__): kind for kind in RECORDS}
KINDS |= {(kind.__module__, kind.__name__): lambda value, kind=kind: kind(value) for kind in ENUMS}


OPEN = (argparse.Namespace, Bytes, *RECORDS)  # classes whose attributes can be set


class UnknownClass(ConversionError):
    """A pickle with an object of a class that is not read."""


class Unpickler(pickle.Unpickler):
    """Knows `known` classes by (module, name) and, if given, `storage` for persistent ids."""

    def __init__(self, content: bytes, where: str, known: dict, storage: Callable[[tuple], Any] | None = None) -> None:
        super().__init__(io.BytesIO(content))
        self.where, self.storage = where, storage
        # a pickle may set attributes of a class: of one that is gone with it
        self.known = {key: type(v.__name__, (v,), {}) if v in OPEN else v for key, v in known.items()}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.known and self.storage and module.startswith(FOREIGN):
            return type("Foreign", (Foreign,), {"name": f"{module}.{name}"})
        if (module, name) not in self.known:
            raise UnknownClass(
                f"{self.where} holds an object of {module}.{name}, which is not a class that weft.convert reads; "
                "nothing of it was run. Save the checkpoint without that object, or do not trust the file"
            )
        return self.known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        if self.storage is None:
            raise ConversionError(f"{self.where} holds a tensor where none is expected")
        return self.storage(pid)


def load(content: bytes, where: str, known: dict, storage: Callable[[tuple], Any] | None = None) -> Any:
    try:
        return Unpickler(content, where, known, storage).load()
    except ConversionError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        raise ConversionError(f"{where} is damaged: {error}. Copy the checkpoint anew") from error


def load_metadata(content: bytes, where: str) -> metadata.Metadata:
    """The `.metadata` file of a torch.distributed checkpoint."""
    found = load(content, where, PLAIN | KINDS)
    if not isinstance(found, metadata.Metadata):
        raise ConversionError(f"{where} holds a {type(found).__name__}, expected the metadata of a DCP checkpoint")
    return found
