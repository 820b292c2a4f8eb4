"""Checkpoints of torch.distributed: `.metadata`, `*.distcp`, and what Megatron adds (`common.pt`, `metadata.json`).

Megatron stacks what all layers have in a first dimension and keeps objects as ``name/shard_<i>_<of>``.
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

from . import torch_zip
from .content import OPTIMIZER, Content, as_json, common_of, is_optimizer, values_of
from .lazy import (
    Box,
    ConversionError,
    InFile,
    Layer,
    Lazy,
    Tiled,
    checked_shape,
    raw_bytes,
    stack,
    whole_numbers,
)
from .pickled import METADATA, Record
from .unpickle import UnknownClass, load

BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
BACKEND |= {"common_backend": "torch", "common_backend_version": 1}
SHARD = re.compile(r"(.*)/shard_([0-9]{1,9})_([0-9]{1,9})")


@dataclass(frozen=True)
class Place:
    """Bytes of a file that hold one item."""

    file: Path
    offset: int
    length: int


class Chunk(Lazy):
    """A tensor of one item of a `.distcp` file, which is opened when it is read."""

    def __init__(self, place: Place, dtype: torch.dtype, shape: Any, check: bool) -> None:
        self.place, self.dtype, self.shape, self.check = place, dtype, checked_shape(shape, dtype), check
        self.opened: Lazy | None = None
        if self.nbytes > place.length:
            raise ConversionError(
                f"a piece {list(self.shape)} of {dtype} has {self.nbytes} bytes, its place in {place.file} has "
                f"{place.length}. Copy the checkpoint anew"
            )

    def read(self, box: Box) -> torch.Tensor:
        if self.opened is None:
            found = _reader(self.place, self.check).load()
            if not isinstance(found, Lazy) or (found.dtype, found.shape) != (self.dtype, self.shape):
                raise ConversionError(f"{self.place.file} does not hold at {self.place.offset} what its metadata says")
            self.opened = found
        return self.opened.read(box)


def _reader(place: Place, check: bool) -> torch_zip.Reader:
    return torch_zip.Reader(place.file, place.offset, place.offset + place.length, check)


def read(path: Path, check: bool) -> Content:
    """Under the names that stand there; optimizer state is left out."""
    file = path / ".metadata"
    found, content = load(file.read_bytes(), str(file), METADATA), Content()
    try:
        places = _places(path, _record(found, "Metadata").field("storage_data"))
        entries = found.field("state_dict_metadata")
        if not isinstance(entries, dict):
            raise ConversionError("its state_dict_metadata is not a dict")
    except ConversionError as error:
        raise ConversionError(f"{file} is damaged: {error}. Copy the checkpoint anew") from error
    if (path / "common.pt").exists():
        _read_common(path / "common.pt", content)
    for name, kind in entries.items():
        try:
            if not isinstance(name, str):
                raise ConversionError("an entry of the metadata has no name")
            if is_optimizer(name):
                content.skipped[name] = OPTIMIZER
            else:
                _read_entry(name, kind, places.get(name, {}), content, check)
        except ConversionError as error:
            raise ConversionError(f"{name} in {path}: {error}") from error
    return content


def _record(value: Any, kind: str) -> Record:
    if not isinstance(value, Record) or value.kind != kind:
        found = value.kind if isinstance(value, Record) else type(value).__name__
        raise ConversionError(f"it holds a {found}, expected a {kind} of a DCP checkpoint")
    return value


def _places(path: Path, storage: Any) -> dict[str, dict[tuple | None, Place | str]]:
    """Where each piece lies, by name and offset: a place in a file that no other piece has, or why there is none."""
    if not isinstance(storage, (dict, type(None))):
        raise ConversionError("its storage_data is not a dict")
    places: dict[str, dict[tuple | None, Place | str]] = defaultdict(dict)
    for index, info in (storage or {}).items():
        index, info = _record(index, "MetadataIndex"), _record(info, "_StorageInfo")
        name, offset = index.field("fqn"), index.field("offset", None)
        if not isinstance(name, str):
            raise ConversionError("a MetadataIndex has no name")
        offset = None if offset is None else whole_numbers(offset, f"the offset of a piece of {name}")
        places[name][offset] = _place(path, info)
    whole = [place for of in places.values() for place in of.values() if isinstance(place, Place)]
    whole.sort(key=lambda place: (place.file, place.offset, place.length))
    for one, other in itertools.pairwise(whole):
        if one.file == other.file and one.offset + one.length > other.offset:
            raise ConversionError(f"two pieces share byte {other.offset} of {one.file.name}")
    return places


def _place(path: Path, info: Record) -> Place | str:
    name = info.field("relative_path")
    numbers = whole_numbers((info.field("offset"), info.field("length")), "a place in a file")
    if not isinstance(name, str) or Path(name).name != name or not (path / name).is_file():
        return f"its file {name if isinstance(name, str) else ''} is not in {path}. Copy the checkpoint anew"
    size = (path / name).stat().st_size
    if sum(numbers) > size:
        return f"{path / name} has only {size} bytes: it is truncated. Copy it anew"
    if info.field("transform_descriptors", None):
        return "it is stored with transformations of its bytes; save it without them"
    return Place(path / name, *numbers)


def _read_entry(name: str, kind: Any, places: dict, content: Content, check: bool) -> None:
    if wrong := [place for place in places.values() if isinstance(place, str)]:
        raise ConversionError(wrong[0])
    if isinstance(kind, Record) and kind.kind == "TensorStorageMetadata":
        content.tensors[name] = _tensor(kind, places, check)
        return
    _record(kind, "BytesStorageMetadata")
    if None not in places:
        raise ConversionError("it is in no file. Copy the checkpoint anew")
    _read_object(name, places[None], content, check)


def _read_common(file: Path, content: Content) -> None:
    """As values; the bytes of the file are carried, too, where one of them is of a class that is not read."""
    try:
        values = torch_zip.Reader(file).load()
        if not isinstance(values, dict):
            raise TypeError
        common_of(values, content)
        as_json({key: values[key] for key in values if str(key) not in content.skipped})
    except (UnknownClass, TypeError):
        content.raw["common.pt"] = InFile(file, 0, torch.uint8, [file.stat().st_size])


def _tensor(kind: Record, places: dict, check: bool) -> Lazy:
    properties, chunks = _record(kind.field("properties"), "TensorProperties"), kind.field("chunks")
    dtype = properties.state[0] if isinstance(properties.state, tuple) and properties.state else None
    if not isinstance(chunks, list):
        raise ConversionError("its chunks are not a list")
    tiles = []
    for chunk in chunks:
        at = whole_numbers(_record(chunk, "ChunkStorageMetadata").field("offsets"), "the offset of a piece")
        if at not in places:
            raise ConversionError(f"the piece at {list(at)} is in no file. Copy the checkpoint anew")
        tiles.append((at, Chunk(places[at], dtype, chunk.field("sizes"), check)))
    return Tiled(kind.field("size"), dtype, tiles)


def _read_object(name: str, place: Place, content: Content, check: bool) -> None:
    """An `_extra_state` of bytes becomes a tensor; any other object is carried as it lies there."""
    state = _state(_reader(place, check)) if "_extra_state" in name else None
    if state is None:
        content.raw[name] = InFile(place.file, place.offset, torch.uint8, [place.length])
    else:
        content.tensors[name] = state


def _state(reader: torch_zip.Reader) -> Lazy | None:
    """An `_extra_state` that is bytes as Megatron keeps it, a list of one tensor; None if it is anything else."""
    try:
        value = reader.load()
    except UnknownClass:
        return None
    plain = isinstance(value, list) and len(value) == 1 and isinstance(value[0], Lazy)
    return value[0] if plain and value[0].dtype == torch.uint8 and len(value[0].shape) == 1 else None


# ---- layers that are stacked ----------------------------------------------------------------------------------------


def unstack(content: Content, stacks: list[str]) -> Content:
    """The same with an entry for each layer, ``decoder.layers.3.…`` for ``decoder.layers.…``, and whole states."""
    tensors: dict[str, Lazy] = {}
    room = 4096 + sum(lazy.nbytes for lazy in content.tensors.values()) // 64  # layers that its bytes can be
    for name, lazy in content.tensors.items():
        shard = SHARD.fullmatch(name)
        start = next((stack for stack in stacks if name.startswith(stack) and not is_numbered(name, stack)), None)
        found = {name: lazy}  # also of experts, which have shards of another form
        if shard and start:
            found = {f"{start}{shard[2]}.{shard[1][len(start) :]}": lazy}
        elif shard and shard[3] == "1":
            found = {shard[1]: lazy}
        elif start and "/shard_" not in name and lazy.shape:
            room -= lazy.shape[0]
            if room < 0:
                raise ConversionError(f"{name}: a shape {list(lazy.shape)} for {lazy.shape[0]} layers is not plausible")
            found = {f"{start}{i}.{name[len(start) :]}": Layer(lazy, i) for i in range(lazy.shape[0])}
        if twice := tensors.keys() & found.keys():
            raise ConversionError(f"{name} and another tensor are both {min(twice)}")
        tensors |= found
    return replace(content, tensors=tensors)


def is_stacked(content: Content, stacks: list[str]) -> bool:
    """Whether a distributed checkpoint has no layers by number."""
    return not any(is_numbered(name, stack) for name in content.tensors for stack in stacks)


def is_numbered(name: str, stack: str) -> bool:
    """Whether the path of a name has the number of a layer."""
    return re.match(re.escape(stack) + "[0-9]", name) is not None


def stacked(tensors: dict[str, Lazy], stacks: list[str]) -> dict[str, tuple[Lazy, list[str]]]:
    """The inverse, where all layers have the same: name -> (tensor, names it was made of)."""
    layers: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    count: dict[str, int] = defaultdict(int)
    for name in tensors:
        for start in stacks:
            if found := re.fullmatch(re.escape(start) + r"([0-9]{1,9})\.(.*)", name, re.DOTALL):
                layers[start, found[2]][int(found[1])] = name
                count[start] = max(count[start], int(found[1]) + 1)
    uneven = {start for (start, rest), of in layers.items() if not _even(tensors, of, count[start], rest)}
    result: dict[str, tuple[Lazy, list[str]]] = {}
    for name, lazy in tensors.items():
        state = name.endswith("_extra_state")
        start = next((s for s in stacks if re.match(re.escape(s) + r"[0-9]{1,9}\.", name) and s not in uneven), None)
        if start is None:
            result[f"{name}/shard_0_1" if state else name] = lazy, [name]
            continue
        number, rest = name[len(start) :].split(".", 1)
        of = [layers[start, rest][i] for i in sorted(layers[start, rest])]
        if state:
            result[f"{start}{rest}/shard_{number}_{count[start]}"] = lazy, [name]
        elif name == of[0]:
            result[start + rest] = stack([tensors[other] for other in of]), of
    return result


def _even(tensors: dict[str, Lazy], of: dict[int, str], count: int, rest: str) -> bool:
    if rest.endswith("_extra_state"):
        return True
    return len(of) == count and len({(tensors[name].dtype, tensors[name].shape) for name in of.values()}) == 1


# ---- writing --------------------------------------------------------------------------------------------------------


class _Items:
    """Files that are filled with items up to `size` bytes, and where each item lies."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size, self.number, self.places = folder, size, 0, {}
        self.file = (folder / "__0_0.distcp").open("wb")

    def add(self, index: MetadataIndex, save: Callable[[io.BufferedWriter], object]) -> None:
        if self.file.tell() >= self.size:
            self.file.close()
            self.number += 1
            self.file = (self.folder / f"__0_{self.number}.distcp").open("wb")
        start = self.file.tell()
        save(self.file)
        place = f"__0_{self.number}.distcp", start, self.file.tell() - start
        self.places[index] = _StorageInfo(*place)


def write(
    folder: Path, content: Content, size: int, megatron: bool, written: Callable[[Lazy, memoryview], None]
) -> None:
    """`megatron`: with `common.pt` and `metadata.json`, and `_extra_state` as objects."""
    items, entries = _Items(folder, size), {}
    for name, lazy in content.raw.items():
        if name == "common.pt":
            with (folder / name).open("wb") as file:
                _copy(lazy, file, written)
        else:
            entries[name] = BytesStorageMetadata()
            items.add(MetadataIndex(name), lambda file, lazy=lazy: _copy(lazy, file, written))
    for name, lazy in content.tensors.items():
        if megatron and "_extra_state/shard_" in name:
            state = lazy.tensor().clone()
            written(lazy, raw_bytes(state))
            entries[name] = BytesStorageMetadata()
            items.add(MetadataIndex(name), lambda file, state=state: torch.save([state], file))
        else:
            entries[name] = _write_tensor(name, lazy, items, written)
    items.file.close()
    _write_metadata(folder, entries, items.places, megatron)
    if megatron:
        (folder / "metadata.json").write_text(json.dumps(BACKEND))
    if megatron and "common.pt" not in content.raw:
        torch.save(values_of(content.common), folder / "common.pt")


def _copy(lazy: Lazy, file: io.BufferedWriter, written: Callable) -> None:
    for _, piece in lazy.pieces():
        view = raw_bytes(piece)
        file.write(view)
        written(lazy, view)


def _write_tensor(name: str, lazy: Lazy, items: _Items, written: Callable) -> TensorStorageMetadata:
    chunks = []
    for box, piece in lazy.pieces():
        offset = torch.Size(start for start, _ in box)
        chunks.append(ChunkStorageMetadata(offset, torch.Size(piece.shape)))
        alone = piece if piece.untyped_storage().nbytes() == piece.nbytes else piece.clone()  # not its neighbours
        items.add(MetadataIndex(name, offset), lambda file, alone=alone: torch.save(alone.view(lazy.dtype), file))
        written(lazy, raw_bytes(piece))
    properties = TensorProperties(dtype=lazy.dtype)
    return TensorStorageMetadata(properties, torch.Size(lazy.shape), chunks)


def _write_metadata(folder: Path, entries: dict, places: dict, megatron: bool) -> None:
    planned = None if megatron else {name: (name,) for name in entries}
    found = Metadata(entries, planned, places, StorageMeta(), "1.0.0")
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(found, file)
