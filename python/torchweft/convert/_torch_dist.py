"""Checkpoints of torch.distributed.checkpoint (DCP): `.metadata`, `*.distcp`, and Megatron's `common.pt` and
`metadata.json`.

Megatron stacks the layers in the first dimension and stores objects as ``name/shard_<i>_<of>``.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from . import _torch_zip
from ._content import OPTIMIZER_SKIPPED, Content, as_json, collect_common, decode_values, is_optimizer
from ._coverage import SliceBounds
from ._lazy_tensor import (
    ConcatenatedTensor,
    ConversionError,
    FileTensor,
    LazyTensor,
    OnWrite,
    SelectedTensor,
    checked_shape,
    nonnegative_ints,
    raw_bytes,
    stack,
)
from ._pickle_globals import DCP_GLOBALS, DcpObject
from ._unpickler import UnknownClassError, load

BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
BACKEND |= {"common_backend": "torch", "common_backend_version": 1}
SHARD = re.compile(r"(.*)/shard_([0-9]{1,9})_([0-9]{1,9})")


@dataclass(frozen=True)
class ByteRange:
    """The bytes of one item in a file."""

    file: Path
    offset: int
    length: int


ByteRanges = dict[tuple[int, ...] | None, ByteRange | str]  # by offset of a chunk: its byte range, or why it has none


class DcpChunk(LazyTensor):
    """The tensor of one item of a `.distcp` file, opened at the first read."""

    def __init__(self, byte_range: ByteRange, dtype: torch.dtype, shape: Any, check: bool) -> None:
        self.byte_range, self.dtype, self.shape, self.check = byte_range, dtype, checked_shape(shape, dtype), check
        self.loaded: LazyTensor | None = None
        if self.nbytes > byte_range.length:
            raise ConversionError(
                f"a chunk {list(self.shape)} of {dtype} has {self.nbytes} bytes, but its byte range in "
                f"{byte_range.file} has {byte_range.length}. Copy the checkpoint again"
            )

    def read(self, bounds: SliceBounds) -> torch.Tensor:
        if self.loaded is None:
            found = _reader(self.byte_range, self.check).load()
            if not isinstance(found, LazyTensor) or (found.dtype, found.shape) != (self.dtype, self.shape):
                raise ConversionError(
                    f"{self.byte_range.file} at byte {self.byte_range.offset} does not match its metadata. Copy the "
                    "checkpoint again"
                )
            self.loaded = found
        return self.loaded.read(bounds)


def _reader(byte_range: ByteRange, check: bool) -> _torch_zip.Reader:
    return _torch_zip.Reader(byte_range.file, byte_range.offset, byte_range.offset + byte_range.length, check)


def read(path: Path, check: bool) -> Content:
    """Reads a checkpoint under its own names; skips optimizer state."""
    file = path / ".metadata"
    found, content = load(file.read_bytes(), str(file), DCP_GLOBALS), Content()
    try:
        byte_ranges = _byte_ranges(path, _expect_class(found, "Metadata").field("storage_data"))
        entries = found.field("state_dict_metadata")
        if not isinstance(entries, dict):
            raise ConversionError("its state_dict_metadata is not a dict")
    except ConversionError as error:
        raise ConversionError(f"{file} is damaged: {error}. Copy the checkpoint again") from error
    if (path / "common.pt").exists():
        _read_common(path / "common.pt", content)
    for name, kind in entries.items():
        try:
            if not isinstance(name, str):
                raise ConversionError("an entry of the metadata has no name")
            if is_optimizer(name):
                content.skipped[name] = OPTIMIZER_SKIPPED
            else:
                _read_entry(name, kind, byte_ranges.get(name, {}), content, check)
        except ConversionError as error:
            raise ConversionError(f"{name} in {path}: {error}") from error
    return content


def _expect_class(value: Any, kind: str) -> DcpObject:
    if not isinstance(value, DcpObject) or value.kind != kind:
        found = value.kind if isinstance(value, DcpObject) else type(value).__name__
        raise ConversionError(f"it contains a {found}, expected a {kind} of a DCP checkpoint")
    return value


def _byte_ranges(path: Path, storage: Any) -> dict[str, ByteRanges]:
    """Returns for each chunk, by name and offset, its byte range, or why it has none. Raises if two ranges overlap."""
    if not isinstance(storage, (dict, type(None))):
        raise ConversionError("its storage_data is not a dict")
    byte_ranges: dict[str, ByteRanges] = defaultdict(dict)
    for index, info in (storage or {}).items():
        index, info = _expect_class(index, "MetadataIndex"), _expect_class(info, "_StorageInfo")
        name, offset = index.field("fqn"), index.field("offset", None)
        if not isinstance(name, str):
            raise ConversionError("a MetadataIndex has no name")
        offset = None if offset is None else nonnegative_ints(offset, f"the offset of a chunk of {name}")
        byte_ranges[name][offset] = _byte_range(path, info)
    whole = [
        byte_range for of in byte_ranges.values() for byte_range in of.values() if isinstance(byte_range, ByteRange)
    ]
    whole.sort(key=lambda byte_range: (byte_range.file, byte_range.offset, byte_range.length))
    for one, other in itertools.pairwise(whole):
        if one.file == other.file and one.offset + one.length > other.offset:
            raise ConversionError(f"two chunks share byte {other.offset} of {one.file.name}")
    return byte_ranges


def _byte_range(path: Path, info: DcpObject) -> ByteRange | str:
    name = info.field("relative_path")
    numbers = nonnegative_ints((info.field("offset"), info.field("length")), "a byte range")
    if not isinstance(name, str) or Path(name).name != name or not (path / name).is_file():
        return f"its file {name if isinstance(name, str) else ''} is not in {path}. Copy the checkpoint again"
    size = (path / name).stat().st_size
    if sum(numbers) > size:
        return f"{path / name} has only {size} bytes: it is truncated. Copy it again"
    if info.field("transform_descriptors", None):
        return "it is stored with transformations, which are not supported. Save it without transform_descriptors"
    return ByteRange(path / name, *numbers)


def _read_entry(name: str, kind: Any, byte_ranges: ByteRanges, content: Content, check: bool) -> None:
    ranges = {at: byte_range for at, byte_range in byte_ranges.items() if isinstance(byte_range, ByteRange)}
    if wrong := [byte_range for byte_range in byte_ranges.values() if isinstance(byte_range, str)]:
        raise ConversionError(wrong[0])
    if isinstance(kind, DcpObject) and kind.kind == "TensorStorageMetadata":
        content.tensors[name] = _tensor(kind, ranges, check)
        return
    _expect_class(kind, "BytesStorageMetadata")
    if None not in ranges:
        raise ConversionError("it is in no file. Copy the checkpoint again")
    _read_object(name, ranges[None], content, check)


def _read_common(file: Path, content: Content) -> None:
    """Reads common.pt as values; if it contains an unsupported class, also keeps the bytes of the file."""
    try:
        values = _torch_zip.Reader(file).load()
        if not isinstance(values, dict):
            raise TypeError
        collect_common(values, content)
        as_json({key: values[key] for key in values if str(key) not in content.skipped})
    except (UnknownClassError, TypeError):
        content.raw["common.pt"] = FileTensor(file, 0, torch.uint8, [file.stat().st_size])


def _tensor(kind: DcpObject, ranges: dict[tuple[int, ...] | None, ByteRange], check: bool) -> LazyTensor:
    properties, chunks = _expect_class(kind.field("properties"), "TensorProperties"), kind.field("chunks")
    dtype: Any = properties.state[0] if isinstance(properties.state, tuple) and properties.state else None
    if not isinstance(chunks, list):
        raise ConversionError("its chunks are not a list")
    tensors = []
    for chunk in chunks:
        at = nonnegative_ints(_expect_class(chunk, "ChunkStorageMetadata").field("offsets"), "the offset of a chunk")
        if at not in ranges:
            raise ConversionError(f"the chunk at {list(at)} is in no file. Copy the checkpoint again")
        tensors.append((at, DcpChunk(ranges[at], dtype, chunk.field("sizes"), check)))
    return ConcatenatedTensor(kind.field("size"), dtype, tensors)


def _read_object(name: str, byte_range: ByteRange, content: Content, check: bool) -> None:
    """Reads an `_extra_state` of bytes as a tensor, and any other object as opaque bytes."""
    state = _extra_state_tensor(_reader(byte_range, check)) if "_extra_state" in name else None
    if state is None:
        content.raw[name] = FileTensor(byte_range.file, byte_range.offset, torch.uint8, [byte_range.length])
    else:
        content.tensors[name] = state


def _extra_state_tensor(reader: _torch_zip.Reader) -> LazyTensor | None:
    """Returns an `_extra_state` in Megatron's form, a list of one uint8 tensor; None if it is anything else."""
    try:
        value = reader.load()
    except UnknownClassError:
        return None
    plain = isinstance(value, list) and len(value) == 1 and isinstance(value[0], LazyTensor)
    return value[0] if plain and value[0].dtype == torch.uint8 and len(value[0].shape) == 1 else None


# ---- stacked layers -------------------------------------------------------------------------------------------------


def unstack_layers(content: Content, stacks: list[str]) -> Content:
    """Splits stacked tensors into one per layer, ``decoder.layers.…`` into ``decoder.layers.3.…``, and renames the
    shards of `_extra_state`s."""
    tensors: dict[str, LazyTensor] = {}
    max_layers = 4096 + sum(lazy.nbytes for lazy in content.tensors.values()) // 64  # plausible for that many bytes
    for name, lazy in content.tensors.items():
        shard = SHARD.fullmatch(name)
        start = next((stack for stack in stacks if name.startswith(stack) and not is_numbered(name, stack)), None)
        found = {name: lazy}  # also for experts, whose shards have another form
        if shard and start:
            found = {f"{start}{shard[2]}.{shard[1][len(start) :]}": lazy}
        elif shard and shard[3] == "1":
            found = {shard[1]: lazy}
        elif start and "/shard_" not in name and lazy.shape:
            max_layers -= lazy.shape[0]
            if max_layers < 0:
                raise ConversionError(f"{name}: shape {list(lazy.shape)} with {lazy.shape[0]} layers is not plausible")
            found = {f"{start}{i}.{name[len(start) :]}": SelectedTensor(lazy, i) for i in range(lazy.shape[0])}
        if twice := tensors.keys() & found.keys():
            raise ConversionError(f"{name} and another tensor would both be called {min(twice)}")
        tensors |= found
    return replace(content, tensors=tensors)


def is_stacked(content: Content, stacks: list[str]) -> bool:
    """Whether a distributed checkpoint has no numbered layers."""
    return not any(is_numbered(name, stack) for name in content.tensors for stack in stacks)


def is_numbered(name: str, stack: str) -> bool:
    """Whether the path in a name contains the number of a layer."""
    return re.match(re.escape(stack) + "[0-9]", name) is not None


def stack_layers(tensors: dict[str, LazyTensor], stacks: list[str]) -> dict[str, tuple[LazyTensor, list[str]]]:
    """Inverse of `unstack_layers`, for layers with equal tensors. Returns {name: (tensor, names it was made of)}."""
    layers: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    count: dict[str, int] = defaultdict(int)
    for name in tensors:
        for start in stacks:
            if found := re.fullmatch(re.escape(start) + r"([0-9]{1,9})\.(.*)", name, re.DOTALL):
                layers[start, found[2]][int(found[1])] = name
                count[start] = max(count[start], int(found[1]) + 1)
    nonuniform = {start for (start, rest), of in layers.items() if not _is_uniform(tensors, of, count[start], rest)}
    result: dict[str, tuple[LazyTensor, list[str]]] = {}
    for name, lazy in tensors.items():
        state = name.endswith("_extra_state")
        prefix = next(
            (s for s in stacks if re.match(re.escape(s) + r"[0-9]{1,9}\.", name) and s not in nonuniform), None
        )
        if prefix is None:
            result[f"{name}/shard_0_1" if state else name] = lazy, [name]
            continue
        number, rest = name[len(prefix) :].split(".", 1)
        of = [layers[prefix, rest][i] for i in sorted(layers[prefix, rest])]
        if state:
            result[f"{prefix}{rest}/shard_{number}_{count[prefix]}"] = lazy, [name]
        elif name == of[0]:
            result[prefix + rest] = stack([tensors[other] for other in of]), of
    return result


def _is_uniform(tensors: dict[str, LazyTensor], of: dict[int, str], count: int, rest: str) -> bool:
    if rest.endswith("_extra_state"):
        return True
    return len(of) == count and len({(tensors[name].dtype, tensors[name].shape) for name in of.values()}) == 1


# ---- writing --------------------------------------------------------------------------------------------------------


class _DistcpWriter:
    """Writes items to files of about `size` bytes and records the byte range of each item."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size, self.number = folder, size, 0
        self.byte_ranges: dict[MetadataIndex, _StorageInfo] = {}
        self.file = (folder / "__0_0.distcp").open("wb")

    def add(self, index: MetadataIndex, save: Callable[[io.BufferedWriter], object]) -> None:
        if self.file.tell() >= self.size:
            self.file.close()
            self.number += 1
            self.file = (self.folder / f"__0_{self.number}.distcp").open("wb")
        start = self.file.tell()
        save(self.file)
        location = f"__0_{self.number}.distcp", start, self.file.tell() - start
        self.byte_ranges[index] = _StorageInfo(*location)


def write(folder: Path, content: Content, size: int, megatron: bool, on_write: OnWrite) -> None:
    """Writes a checkpoint. `megatron`: also `common.pt` and `metadata.json`, and `_extra_state`s as objects."""
    items = _DistcpWriter(folder, size)
    entries: dict[str, BytesStorageMetadata | TensorStorageMetadata] = {}
    for name, lazy in content.raw.items():
        if name == "common.pt":
            with (folder / name).open("wb") as file:
                lazy.write(file, on_write)
        else:
            entries[name] = BytesStorageMetadata()
            items.add(MetadataIndex(name), partial(lazy.write, on_write=on_write))
    for name, lazy in content.tensors.items():
        if megatron and "_extra_state/shard_" in name:
            state = lazy.tensor().clone()
            on_write(lazy, raw_bytes(state))
            entries[name] = BytesStorageMetadata()
            items.add(MetadataIndex(name), partial(torch.save, [state]))
        else:
            entries[name] = _write_tensor(name, lazy, items, on_write)
    items.file.close()
    _write_metadata(folder, entries, items.byte_ranges, megatron)
    if megatron:
        (folder / "metadata.json").write_text(json.dumps(BACKEND))
    if megatron and "common.pt" not in content.raw:
        torch.save(decode_values(content.common), folder / "common.pt")


def _write_tensor(name: str, lazy: LazyTensor, items: _DistcpWriter, on_write: OnWrite) -> TensorStorageMetadata:
    chunks = []
    for bounds, block in lazy.blocks():
        offset = torch.Size(start for start, _ in bounds)
        chunks.append(ChunkStorageMetadata(offset, torch.Size(block.shape)))
        # torch.save writes the whole storage, which may be larger than the block.
        own_storage = block if block.untyped_storage().nbytes() == block.nbytes else block.clone()
        items.add(MetadataIndex(name, offset), partial(torch.save, own_storage.view(lazy.dtype)))
        on_write(lazy, raw_bytes(block))
    properties = TensorProperties(dtype=lazy.dtype)
    return TensorStorageMetadata(properties, torch.Size(lazy.shape), chunks)


def _write_metadata(
    folder: Path,
    entries: dict[str, BytesStorageMetadata | TensorStorageMetadata],
    byte_ranges: dict[MetadataIndex, _StorageInfo],
    megatron: bool,
) -> None:
    planned = None if megatron else {name: (name,) for name in entries}
    found = Metadata(entries, planned, byte_ranges, StorageMeta(), "1.0.0")
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(found, file)
