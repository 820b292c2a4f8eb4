"""The format of torch.save: a zip file with a pickle and one uncompressed record per storage."""

from __future__ import annotations

import collections
import io
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from ._lazy_tensor import (
    MAX_READ_BYTES,
    ConversionError,
    FileTensor,
    LazyTensor,
    OnWrite,
    nonnegative_ints,
    pread,
    row_major_strides,
)
from ._pickle_globals import PLAIN_GLOBALS, STORAGES, AllowedCall
from ._unpickler import load

MAX_RATIO = 8  # maximum bytes of all tensors / bytes of the file; tensors may share storages
STORAGE_CLASSES = {dtype: getattr(torch, name) for name, dtype in STORAGES.items()}
NOT_A_ZIP = (zipfile.BadZipFile, LookupError, ValueError, OSError, EOFError, NotImplementedError, struct.error)


class Window(io.RawIOBase):
    """Bytes `start` to `stop` of a file as a file object."""

    def __init__(self, file: IO[bytes], start: int, stop: int) -> None:
        self.file, self.start, self.stop, self.position = file, start, stop, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset + (0, self.position, self.stop - self.start)[whence]
        return self.position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self.stop - self.start - self.position)
        self.file.seek(self.start + self.position)
        content = self.file.read(left if size < 0 else min(size, left))
        self.position += len(content)
        return content


@dataclass(frozen=True)
class Storage:
    """A storage in a file; `check` verifies its checksum."""

    offset: int
    size: int
    dtype: torch.dtype
    check: Callable[[], None]


class Reader:
    """Reads the result of one torch.save at bytes `start` to `stop` of a file. Its tensors become `FileTensor`s."""

    def __init__(self, path: Path, start: int = 0, stop: int | None = None, check: bool = True) -> None:
        self.path, self.start, self.check = path, start, check
        size = path.stat().st_size
        self.where = str(path) if stop is None else f"{path}, bytes {start} to {stop}"
        self.stop = size if stop is None else stop
        self.budget = MAX_RATIO * (self.stop - start) + (1 << 20)  # remaining bytes for tensors
        with path.open("rb") as file:
            try:
                archive = zipfile.ZipFile(Window(file, start, self.stop))
                self.records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                if min(info.header_offset for info in archive.infolist()):
                    raise zipfile.BadZipFile("it does not start at the first byte")
            except NOT_A_ZIP as error:
                raise ConversionError(self._not_a_zip(error, size < self.stop)) from error
        if "data.pkl" not in self.records:
            raise ConversionError(self._not_a_zip(ValueError("it has no data.pkl"), size < self.stop))
        order = self._content("byteorder") if "byteorder" in self.records else b"little"
        if order != b"little":
            shown = order.decode("ascii", "replace") if len(order) < 32 else "?"
            raise ConversionError(f"{self.where} was written on a {shown}-endian machine, which is not supported")

    def _not_a_zip(self, error: Exception, short: bool) -> str:
        if short:
            return f"{self.path} has only {self.path.stat().st_size} bytes: it is truncated. Copy the checkpoint again"
        return (
            f"{self.where} is truncated or not a file of torch.save ({error}). Copy it again. If it was written by "
            "torch older than 1.6, load it there and save it with a newer torch"
        )

    def _record_range(self, name: str) -> tuple[int, int]:
        """Returns (offset, size) of a record; raises if it is not entirely in the file."""
        info = self.records[name]
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise ConversionError(
                f"{self.where} contains compressed records, which are not supported. Save it with torch.save"
            )
        with self.path.open("rb", buffering=0) as file:
            header = pread(file.fileno(), self.path, self.start + info.header_offset, 30)
        name_length, extra_length = struct.unpack_from("<HH", header, 26)
        offset = self.start + info.header_offset + 30 + name_length + extra_length
        if offset + info.file_size > min(self.stop, self.path.stat().st_size):
            raise ConversionError(f"{self.where} is truncated: {name} ends after it. Copy the checkpoint again")
        return offset, info.file_size

    def _content(self, name: str) -> bytes:
        offset, size = self._record_range(name)
        self._check(name, offset)
        with self.path.open("rb", buffering=0) as file:
            return bytes(pread(file.fileno(), self.path, offset, size))

    def load(self) -> Any:
        """Returns the saved object with a LazyTensor for each tensor."""
        tensor, parameter = AllowedCall(self._tensor), AllowedCall(_parameter)
        known = PLAIN_GLOBALS | {("torch", name): dtype for name, dtype in STORAGES.items()}
        known |= {
            ("torch.storage", "UntypedStorage"): torch.uint8,
            ("torch", "UntypedStorage"): torch.uint8,
            ("torch._utils", "_rebuild_tensor_v2"): tensor,
            ("torch._utils", "_rebuild_tensor_v3"): tensor,
            ("torch._utils", "_rebuild_parameter"): parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): parameter,
            ("torch._tensor", "_rebuild_from_type_v2"): AllowedCall(self._rebuild_from_type),
            ("torch._tensor", "Tensor"): "Tensor",
            ("torch.nn.parameter", "Parameter"): "Parameter",
        }
        return load(self._content("data.pkl"), self.where, known, self._storage)

    def _storage(self, pid: Any) -> Storage:
        if not isinstance(pid, tuple) or len(pid) != 5 or not isinstance(pid[2], str):
            raise ConversionError(f"{self.where} has a tensor whose data has no name. Copy the checkpoint again")
        name, dtype = f"data/{pid[2]}", pid[1]
        if name not in self.records or not isinstance(dtype, torch.dtype):
            raise ConversionError(f"{self.where} has a tensor without data: {name}. Copy the checkpoint again")
        offset, size = self._record_range(name)
        return Storage(offset, size, dtype, lambda: self._check(name, offset))

    def _check(self, name: str, offset: int) -> None:
        """Verifies the checksum of a record."""
        if not self.check:
            return
        info, found = self.records[name], 0
        left = info.file_size
        with self.path.open("rb", buffering=0) as file:
            while left:
                content = pread(file.fileno(), self.path, offset + info.file_size - left, min(left, MAX_READ_BYTES))
                found, left = zlib.crc32(content, found), left - len(content)
        if found != info.CRC:
            raise ConversionError(
                f"{self.where} is corrupt: its checksum is {found:08x}, expected {info.CRC:08x}. Copy the "
                "checkpoint again, or pass --no-check to convert it anyway"
            )

    def _tensor(self, storage: Any, first: Any, shape: Any, strides: Any, *more: Any) -> FileTensor:
        """As torch._utils._rebuild_tensor_v2, and as _v3, which has a dtype at the end."""
        if not isinstance(storage, Storage):
            raise ConversionError(f"{self.where} has a tensor without data. Copy the checkpoint again")
        dtype = more[-1] if more and isinstance(more[-1], torch.dtype) else storage.dtype
        (first,) = nonnegative_ints((first,), "the offset of a tensor")
        found = FileTensor(self.path, storage.offset + first * dtype.itemsize, dtype, shape, strides, storage.check)
        if found.stop > storage.offset + storage.size:
            raise ConversionError(
                f"{self.where} has a tensor {list(found.shape)} of {dtype} that exceeds its storage of {storage.size} "
                "bytes. Copy the checkpoint again"
            )
        self.budget -= found.nbytes
        if self.budget < 0:
            raise ConversionError(
                f"{self.where} has {self.stop - self.start} bytes, but its tensors have more than {MAX_RATIO} times as "
                "many: they are expanded or share storages. Call .contiguous() on them before saving"
            )
        return found

    def _rebuild_from_type(self, make: Any, kind: Any, args: Any, state: Any) -> LazyTensor:
        """Rebuilds a tensor with attributes and ignores the attributes."""
        if (
            not isinstance(make, AllowedCall)
            or make.make not in (self._tensor, _parameter)
            or not isinstance(args, tuple)
        ):
            raise ConversionError(f"{self.where} has a tensor of an unsupported class")
        return _parameter(make.make(*args))


def _parameter(data: Any, *_: Any) -> LazyTensor:
    if not isinstance(data, LazyTensor):
        raise ValueError("a Parameter is not a tensor")
    return data


# ---- writing --------------------------------------------------------------------------------------------------------


class _StorageRef:
    """Reference to a storage that is written after the pickle."""

    def __init__(self, key: str, lazy: LazyTensor) -> None:
        self.key, self.lazy = key, lazy


class _Pickler(pickle.Pickler):
    """Pickles each LazyTensor as torch.save pickles a tensor, and collects the storages."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[_StorageRef] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _StorageRef):
            return None
        kind = STORAGE_CLASSES.get(value.lazy.dtype, torch.storage.UntypedStorage)
        count = math.prod(value.lazy.shape) if value.lazy.dtype in STORAGE_CLASSES else value.lazy.nbytes
        return ("storage", kind, value.key, "cpu", count)

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return NotImplemented
        self.storages.append(_StorageRef(str(len(self.storages)), value))
        args: tuple[Any, ...]
        args = (self.storages[-1], 0, value.shape, row_major_strides(value.shape), False, collections.OrderedDict())
        if value.dtype in STORAGE_CLASSES:
            return torch._utils._rebuild_tensor_v2, args
        return torch._utils._rebuild_tensor_v3, (*args, value.dtype)


def _aligned(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    """Makes a record whose data starts at a multiple of 64 bytes, as torch's mmap loading requires."""
    info = zipfile.ZipInfo(name)
    assert archive.fp is not None
    begin = archive.fp.tell() + 30 + len(name) + 20 + 4  # header, name, 64-bit sizes, header of the padding
    info.extra = struct.pack("<HH", 0x4246, -begin % 64) + b"Z" * (-begin % 64)
    return info


def write(path: Path, content: Any, on_write: OnWrite) -> None:
    """As torch.save, for `content` with LazyTensors. Calls `on_write` for every block."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(content)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
        archive.writestr("archive/byteorder", "little")
        for storage_ref in pickler.storages:
            with archive.open(_aligned(archive, f"archive/data/{storage_ref.key}"), "w", force_zip64=True) as record:
                storage_ref.lazy.write(record, on_write)
        archive.writestr("archive/version", "3\n")
