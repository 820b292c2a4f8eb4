"""Format detection, and reading of a checkpoint under its own names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import _atomic_write, _safetensors, _torch_dist, _torch_zip
from ._content import OPTIMIZER_SKIPPED, Content, bytes_tensor, collect_common, is_optimizer
from ._lazy_tensor import ConversionError, InMemoryTensor, LazyTensor
from ._pickle_globals import BytesIOContent

RANK = re.compile(r"[mt]p_rank_(\d+)(_\d+)?")
LATEST = "latest_checkpointed_iteration.txt"
RAW = "weft.raw"  # key of opaque objects in a .pt file


@dataclass
class StoredCheckpoint:
    """A checkpoint on disk: its format, and the content of each tensor-parallel rank."""

    path: Path
    format: str
    ranks: list[Content]


def open_checkpoint(path: Path | str, check: bool = True) -> StoredCheckpoint:
    path = Path(path)
    try:
        if (path / LATEST).exists():
            path = path / latest_iteration(path / LATEST)
        return _open(path, check)
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error}") from error


def latest_iteration(file: Path) -> str:
    """Returns the folder of Megatron's last saved iteration."""
    with file.open("rb") as opened:
        name = opened.read(256).decode("utf-8", "replace").strip()
    if re.fullmatch("[0-9]{1,20}", name):
        return f"iter_{int(name):07}"
    if not re.fullmatch(r"\w[\w.-]{0,100}", name):
        raise ConversionError(f"{file} names no iteration. Pass the folder of an iteration")
    return name


def _open(path: Path, check: bool) -> StoredCheckpoint:
    if not path.exists():
        old = _atomic_write.sibling(path, ".replaced")
        raise ConversionError(
            f"{path} does not exist" + (f"; a conversion that was interrupted left {old}" if old.exists() else "")
        )
    folders = sorted(child for child in path.iterdir() if RANK.fullmatch(child.name)) if path.is_dir() else []
    if not folders:
        format = format_of(path)
        return StoredCheckpoint(path, format, [read(path, format, check)])
    ranks = [found for folder in folders if (found := RANK.fullmatch(folder.name))]
    if staged := [found[0] for found in ranks if found[2]]:
        raise ConversionError(
            f"{path / staged[0]} is a pipeline stage; merging stages of .pt files is not supported. Save the model as "
            "torch_dist"
        )
    numbers = [int(found[1]) for found in ranks]
    if numbers != list(range(len(folders))):
        raise ConversionError(f"{path} has ranks {numbers}, expected 0, 1, 2, … Copy the missing ranks")
    format = format_of(folders[0])
    if other := [folder for folder in folders if format_of(folder) != format]:
        raise ConversionError(f"{other[0]} is {format_of(other[0])}, but {folders[0]} is {format}; expected one format")
    return StoredCheckpoint(
        path, f"{format}, {len(folders)} ranks", [read(folder, format, check) for folder in folders]
    )


def format_of(path: Path) -> str:
    if path.is_dir():
        if (path / ".metadata").exists():
            return "torch_dist"
        if list(path.glob("*.safetensors")) or (path / _safetensors.INDEX).exists():
            return "safetensors"
        if len(list(path.glob("*.pt"))) == 1:
            return "pt"
        inside = ", ".join(sorted(child.name for child in path.iterdir())[:5]) or "nothing"
        raise ConversionError(
            f"{path} contains {inside}, expected .metadata (torch_dist), *.safetensors, one *.pt file or mp_rank_XX "
            "folders. Pass the folder of an iteration"
        )
    if not path.is_file():
        raise ConversionError(f"{path} is neither a file nor a folder")
    if path.suffix == ".distcp" or path.name == ".metadata":
        raise ConversionError(f"{path} is one file of a torch_dist checkpoint. Pass its folder")
    with path.open("rb") as file:
        start = file.read(9)
    if start[:2] == b"PK":
        return "pt"
    if path.suffix == ".safetensors" or start[8:] == b"{":
        return "safetensors"
    raise ConversionError(
        f"{path} is neither a safetensors file nor a zip file of torch.save. If it is truncated, copy it again. If it "
        "was written by torch older than 1.6, load it there and save it with a newer torch"
    )


def read(path: Path, format: str, check: bool) -> Content:
    if format == "torch_dist":
        return _torch_dist.read(path, check)
    if format == "safetensors":
        return _safetensors.read(path)
    return read_pt(path if path.is_file() else next(path.glob("*.pt")), check)


def read_pt(file: Path, check: bool) -> Content:
    """Reads a state dict, or one under "model" or "state_dict" with other values beside it."""
    value = _torch_zip.Reader(file, check=check).load()
    if not isinstance(value, dict):
        raise ConversionError(f"{file} contains a {type(value).__name__}, expected a dict of tensors")
    if "model0" in value:
        raise ConversionError(
            f"{file} contains model0, model1, …: interleaved pipeline stages are not supported. Save the model as "
            "torch_dist"
        )
    content, model = Content(), next((key for key in ("model", "state_dict") if isinstance(value.get(key), dict)), None)
    extra_values = {} if model is None else {key: item for key, item in value.items() if key not in (model, RAW)}
    collect_common(extra_values, content)
    content.raw = _raw(value.get(RAW, {}), file)
    try:
        _flatten(value if model is None else value[model], "", content)
    except ConversionError as error:
        raise ConversionError(f"{file}: {error}") from error
    return content


def _raw(value: Any, file: Path) -> dict[str, LazyTensor]:
    """Checks the opaque objects that `torchweft.convert` wrote as bytes."""
    if not isinstance(value, dict) or not all(
        isinstance(name, str) and isinstance(lazy, LazyTensor) and lazy.dtype == torch.uint8 and len(lazy.shape) == 1
        for name, lazy in value.items()
    ):
        raise ConversionError(f"{file}: {RAW} is not a dict of names and bytes. Copy the checkpoint again")
    return dict(value)


def _flatten(value: Any, name: str, content: Content) -> None:
    if name in content.tensors:
        raise ConversionError(f"two tensors are called {name}")
    if is_optimizer(name):
        content.skipped[name] = OPTIMIZER_SKIPPED
    elif isinstance(value, LazyTensor):
        content.tensors[name] = value
    elif isinstance(value, (bytes, BytesIOContent)):
        content.tensors[name] = InMemoryTensor(bytes_tensor(value if isinstance(value, bytes) else value.content))
    elif isinstance(value, dict):
        for key, item in value.items():
            _flatten(item, f"{name}.{key}" if name else str(key), content)
    else:
        content.skipped[name] = f"not a tensor: {type(value).__name__}"
