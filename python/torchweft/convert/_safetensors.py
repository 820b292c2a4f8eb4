"""The safetensors format: header length in 8 bytes, JSON header, bytes of the tensors."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import torch

from ._content import Content, decode_values, parse_json
from ._lazy_tensor import ConversionError, FileTensor, LazyTensor, OnWrite, nonnegative_ints, pread

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
METADATA_KEY = "weft.checkpoint"  # in a file's metadata: JSON of everything in a checkpoint that is not a tensor


def files_of(path: Path) -> list[Path]:
    """Returns the files of a checkpoint: a single file, those of the index, or all in a folder."""
    if path.is_file():
        return [path]
    if not (path / INDEX).exists():
        return sorted(path.glob("*.safetensors"))
    files_by_name = parse_json((path / INDEX).read_bytes(), str(path / INDEX)).get("weight_map")
    if not isinstance(files_by_name, dict) or not all(isinstance(name, str) for name in files_by_name.values()):
        raise ConversionError(f"{path / INDEX} has no weight_map of names to files. Copy the checkpoint again")
    names = sorted(set(files_by_name.values()))
    if missing := [name for name in names if Path(name).name != name or not (path / name).is_file()]:
        raise ConversionError(f"{path} has no file {missing[0]}, which its index lists. Copy the checkpoint again")
    return [path / name for name in names]


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Returns (header, offset of the tensors' bytes)."""
    with file.open("rb", buffering=0) as opened:
        (length,) = struct.unpack("<Q", pread(opened.fileno(), file, 0, 8))
        if length > min(100 << 20, file.stat().st_size - 8):
            raise ConversionError(
                f"{file} is truncated or not a safetensors file: its header would have {length} bytes"
            )
        return parse_json(bytes(pread(opened.fileno(), file, 8, length)), f"the header of {file}"), 8 + length


def read(path: Path) -> Content:
    """Reads the headers of a checkpoint. The bytes of its tensors are read when they are used."""
    content = Content()
    found: dict[str, FileTensor] = {}
    for file in files_of(path):
        header, data_start = read_header(file)
        weft_metadata = _weft_metadata(header.pop("__metadata__", {}), file)
        content.common |= weft_metadata["common"]
        content.stacked = bool(weft_metadata["stacked"])
        tensors = _tensors(file, data_start, header)
        if twice := found.keys() & tensors.keys():
            name = min(twice)
            raise ConversionError(
                f"{name} is in both {found[name].path.name} and {file.name} of {path}. Pass a single file"
            )
        found |= tensors
        for name, lazy in tensors.items():
            (content.raw if name in weft_metadata["raw"] else content.tensors)[name] = lazy
    return content


def _weft_metadata(metadata: Any, file: Path) -> dict[str, Any]:
    """Returns what `_write_file` stored under METADATA_KEY: `common` (values that are not tensors), `raw` (names of the
    entries that hold bytes of opaque objects) and `stacked` (whether layers are stacked); defaults for other files."""
    text = metadata.get(METADATA_KEY, "{}") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise ConversionError(
            f"the header of {file} is damaged: its metadata is not a dict of names to strings. Copy it again"
        )
    weft_metadata = {"common": {}, "raw": [], "stacked": True} | parse_json(
        text, f"{METADATA_KEY} in the header of {file}"
    )
    if not isinstance(weft_metadata["common"], dict) or not isinstance(weft_metadata["raw"], list):
        raise ConversionError(f"{METADATA_KEY} in the header of {file} is damaged. Copy the checkpoint again")
    try:
        decode_values(weft_metadata["common"])
    except ConversionError as error:
        raise ConversionError(f"{file}: {error}") from error
    weft_metadata["raw"] = {name for name in weft_metadata["raw"] if isinstance(name, str)}
    return weft_metadata


def _tensors(file: Path, data_start: int, header: dict[str, Any]) -> dict[str, FileTensor]:
    """Returns the tensors of a file; raises if two share a byte."""
    found = {}
    for name, entry in header.items():
        try:
            found[name] = _tensor(file, data_start, entry)
        except ConversionError as error:
            raise ConversionError(f"{name} in {file}: {error}") from error
    end, previous = data_start, ""  # of the last tensor that is not empty
    for name, lazy in sorted(found.items(), key=lambda item: (item[1].offset, item[1].stop)):
        if lazy.offset < end and lazy.nbytes:
            raise ConversionError(f"{previous} and {name} in {file} share bytes. Copy the checkpoint again")
        if lazy.nbytes:
            end, previous = lazy.stop, name
    return found


def _tensor(file: Path, data_start: int, entry: Any) -> FileTensor:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str) or entry["dtype"] not in DTYPES:
        raise ConversionError(f"its dtype is not one of {', '.join(DTYPES)}")
    offsets = nonnegative_ints(entry.get("data_offsets"), "data_offsets")
    if len(offsets) != 2:
        raise ConversionError(f"data_offsets has {len(offsets)} numbers, expected 2")
    shape = nonnegative_ints(entry.get("shape"), "its shape")
    lazy = FileTensor(file, data_start + offsets[0], DTYPES[entry["dtype"]], shape)
    if offsets[1] - offsets[0] != lazy.nbytes:
        raise ConversionError(f"it has {offsets[1] - offsets[0]} bytes for {entry['dtype']} {list(lazy.shape)}")
    if data_start + offsets[1] > file.stat().st_size:
        raise ConversionError("it ends after the end of the file, which is truncated. Copy the checkpoint again")
    return lazy


# ---- writing --------------------------------------------------------------------------------------------------------


def shards(tensors: dict[str, LazyTensor], size: int) -> list[dict[str, LazyTensor]]:
    """Distributes the tensors in order over files of at most `size` bytes; a larger tensor gets its own file."""
    found: list[dict[str, LazyTensor]] = [{}]
    shard_bytes = 0
    for name, lazy in tensors.items():
        if lazy.dtype not in CODES:
            raise ConversionError(
                f"{name} is {lazy.dtype}, which safetensors does not support. Use --to pt or --to torch_dist"
            )
        if found[-1] and shard_bytes + lazy.nbytes > size:
            found.append({})
            shard_bytes = 0
        found[-1][name] = lazy
        shard_bytes += lazy.nbytes
    return found


def write(folder: Path, content: Content, size: int, on_write: OnWrite) -> None:
    """Writes files in a folder; for several files also the index that Hugging Face reads."""
    tensors = content.tensors | content.raw
    parts = shards(tensors, size)
    names = [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
    names = ["model.safetensors"] if len(parts) == 1 else names
    for name, part in zip(names, parts, strict=True):
        _write_file(folder / name, part, content, on_write)
    if len(parts) > 1:
        files_by_name = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        index = {"metadata": {"total_size": sum(lazy.nbytes for lazy in tensors.values())}, "weight_map": files_by_name}
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def write_file(file: Path, content: Content, on_write: OnWrite) -> None:
    """Writes a single file."""
    (tensors,) = shards(content.tensors | content.raw, sys.maxsize)
    _write_file(file, tensors, content, on_write)


def _write_file(file: Path, tensors: dict[str, LazyTensor], content: Content, on_write: OnWrite) -> None:
    weft_metadata = json.dumps({"common": content.common, "raw": list(content.raw), "stacked": content.stacked})
    header: dict[str, Any] = {"__metadata__": {"format": "pt", METADATA_KEY: weft_metadata}}
    offset = 0
    for name, lazy in tensors.items():
        offsets = [offset, offset + lazy.nbytes]
        header[name] = {"dtype": CODES[lazy.dtype], "shape": list(lazy.shape), "data_offsets": offsets}
        offset += lazy.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the bytes of the tensors start at a multiple of 8
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for lazy in tensors.values():
            lazy.write(out, on_write)
