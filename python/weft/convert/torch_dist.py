"""Checkpoints of torch.distributed: `.metadata`, `*.distcp`, and what Megatron adds (`common.pt`, `metadata.json`).

Megatron stacks what all layers have in a first dimension and keeps objects as ``name/shard_<i>_<of>``.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

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
from .lazy import Box, ConversionError, InFile, Layer, Lazy, Tiled, raw_bytes, stack
from .unpickle import UnknownClass, load_metadata

BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
BACKEND |= {"common_backend": "torch", "common_backend_version": 1}
SHARD = re.compile(r"(.*)/shard_(\d+)_(\d+)")


class Chunk(Lazy):
    """A tensor of one item of a `.distcp` file, which is opened when it is read."""

    def __init__(self, path: Path, place: _StorageInfo, dtype: torch.dtype, shape: tuple, check: bool) -> None:
        self.path, self.place, self.dtype, self.shape, self.check = path, place, dtype, tuple(shape), check
        self.opened: Lazy | None = None

    def read(self, box: Box) -> torch.Tensor:
        if self.opened is None:
            reader = torch_zip.Reader(
                self.path, self.place.offset, self.place.offset + self.place.length, check=self.check
            )
            self.opened = reader.load()
            if not isinstance(self.opened, Lazy) or (self.opened.dtype, self.opened.shape) != (self.dtype, self.shape):
                raise ConversionError(f"{self.path} does not hold at {self.place.offset} what its metadata says")
        return self.opened.read(box)


def read(path: Path, check: bool) -> Content:
    """Under the names that stand there; optimizer state is left out."""
    found, content = _metadata(path / ".metadata"), Content()
    places: dict[str, dict[tuple | None, _StorageInfo]] = defaultdict(dict)
    for index, place in (found.storage_data or {}).items():
        places[index.fqn][None if index.offset is None else tuple(index.offset)] = place
    if (path / "common.pt").exists():
        _read_common(path / "common.pt", content)
    for name, kind in found.state_dict_metadata.items():
        if is_optimizer(name):
            content.skipped[name] = OPTIMIZER
            continue
        try:
            _check_places(path, places[name])
            if isinstance(kind, TensorStorageMetadata):
                content.tensors[name] = _tensor(path, kind, places[name], check)
            else:
                _read_object(path, name, places[name][None], content, check)
        except ConversionError as error:
            raise ConversionError(f"{name}: {error}") from error
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise ConversionError(f"{name}: {path / '.metadata'} is damaged: {error}. Copy it anew") from error
    return content


def _metadata(file: Path) -> Metadata:
    found = load_metadata(file.read_bytes(), str(file))
    try:
        repr(found)  # reads every field
    except AttributeError as error:
        raise ConversionError(f"{file} is damaged: {error}. Copy the checkpoint anew") from error
    return found


def _read_common(file: Path, content: Content) -> None:
    """As values; the bytes of the file are carried, too, where one of them is of a class that is not read."""
    try:
        values = torch_zip.Reader(file).load()
        common_of(values, content)
        as_json({key: values[key] for key in values if key not in content.skipped})
    except (UnknownClass, TypeError):
        content.raw["common.pt"] = InFile(file, 0, torch.uint8, [file.stat().st_size])


def _check_places(path: Path, places: dict[tuple | None, _StorageInfo]) -> None:
    for place in places.values():
        file = path / place.relative_path
        if Path(place.relative_path).name != place.relative_path or not file.is_file():
            raise ConversionError(f"its file {place.relative_path} is not in {path}. Copy the checkpoint anew")
        if place.offset + place.length > file.stat().st_size:
            raise ConversionError(f"{file} has only {file.stat().st_size} bytes: it is truncated. Copy it anew")
        if getattr(place, "transform_descriptors", None):
            raise ConversionError(f"it is stored with {place.transform_descriptors}; save it without transformations")


def _tensor(path: Path, kind: TensorStorageMetadata, places: dict, check: bool) -> Lazy:
    dtype, tiles = kind.properties.dtype, []
    for chunk in kind.chunks:
        at = tuple(chunk.offsets)
        if at not in places:
            raise ConversionError(f"the piece at {list(at)} is in no file. Copy the checkpoint anew")
        tiles.append((at, Chunk(path / places[at].relative_path, places[at], dtype, chunk.sizes, check)))
    return Tiled(kind.size, dtype, tiles)


def _read_object(path: Path, name: str, place: _StorageInfo, content: Content, check: bool) -> None:
    """An `_extra_state` of bytes becomes a tensor; any other object is carried as it lies there."""
    file, state = path / place.relative_path, None
    if "_extra_state" in name:
        state = _state(torch_zip.Reader(file, place.offset, place.offset + place.length, check))
    if state is None:
        content.raw[name] = InFile(file, place.offset, torch.uint8, [place.length])
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
    for name, lazy in content.tensors.items():
        shard = SHARD.fullmatch(name)
        start = next((stack for stack in stacks if name.startswith(stack) and not name[len(stack)].isdigit()), None)
        if "/shard_" in name and not shard:  # of experts: kept as it is
            tensors[name] = lazy
        elif shard and start:
            tensors[f"{start}{shard[2]}.{shard[1][len(start) :]}"] = lazy
        elif shard and shard[3] == "1":
            tensors[shard[1]] = lazy
        elif start and not shard and lazy.shape:
            tensors |= {f"{start}{i}.{name[len(start) :]}": Layer(lazy, i) for i in range(lazy.shape[0])}
        else:
            tensors[name] = lazy
    return replace(content, tensors=tensors)


def is_stacked(content: Content, stacks: list[str]) -> bool:
    """Whether a distributed checkpoint has no layers by number."""
    return not any(name.startswith(s) and name[len(s)].isdigit() for name in content.tensors for s in stacks)


def stacked(tensors: dict[str, Lazy], stacks: list[str]) -> dict[str, tuple[Lazy, list[str]]]:
    """The inverse, where all layers have the same: name -> (tensor, names it was made of)."""
    layers: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    count: dict[str, int] = defaultdict(int)
    for name in tensors:
        for start in stacks:
            if found := re.fullmatch(re.escape(start) + r"(\d+)\.(.*)", name):
                layers[start, found[2]][int(found[1])] = name
                count[start] = max(count[start], int(found[1]) + 1)
    uneven = {start for (start, rest), of in layers.items() if not _even(tensors, of, count[start], rest)}
    result: dict[str, tuple[Lazy, list[str]]] = {}
    for name, lazy in tensors.items():
        state = name.endswith("_extra_state")
        start = next((s for s in stacks if re.match(re.escape(s) + r"\d+\.", name) and s not in uneven), None)
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
        view = raw_bytes(lazy.tensor())
        written(lazy, view)
        if name == "common.pt":
            (folder / name).write_bytes(view)
        else:
            entries[name] = BytesStorageMetadata()
            items.add(MetadataIndex(name), lambda file, view=view: file.write(view))
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
