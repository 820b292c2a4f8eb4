"""Report of a conversion: name, dtype, shape, source and sha256 of every tensor, and what was skipped."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import _atomic_write
from ._content import Content
from ._coverage import SliceBounds
from ._lazy_tensor import ConversionError, LazyTensor
from ._model import Model

REPORT = "conversion.json"


def report_path(target: Path, single: bool) -> Path:
    """Returns the path of the report: in a folder, or beside a single file."""
    return _atomic_write.sibling(target, "." + REPORT) if single else target / REPORT


class NamedTensor(LazyTensor):
    """A tensor with the name under which it is written and the sha256 of what was written."""

    def __init__(self, name: str, lazy: LazyTensor, sources: Sequence[str]) -> None:
        self.name, self.lazy, self.sources, self.sha256 = name, lazy, list(sources), hashlib.sha256()
        self.shape, self.dtype = lazy.shape, lazy.dtype

    def read(self, bounds: SliceBounds) -> torch.Tensor:
        try:
            return self.lazy.read(bounds)
        except (ConversionError, OSError) as error:
            raise ConversionError(f"{self.name}: {error}") from error

    def row(self) -> dict[str, Any]:
        kind = {"dtype": str(self.dtype).removeprefix("torch."), "shape": list(self.shape)}
        return {"name": self.name, **kind, "source": self.sources, "sha256": self.sha256.hexdigest()}


def count_tensors(ranks: list[Content]) -> int:
    """Returns the number of tensors and opaque objects, counting those that ranks share once, and not empty extra
    states."""
    entries = (entry for content in ranks for entry in (content.tensors | content.raw).items())
    return len({name for name, lazy in entries if is_counted(name, lazy)})


def is_counted(name: str, lazy: Any) -> bool:
    """Whether an entry of a checkpoint counts: not an empty extra state, which equals a missing one."""
    return bool(lazy.nbytes) or not name.endswith("_extra_state")


def make_report(model: Model, to: str, layout: str, ranks: list[Content]) -> dict[str, Any]:
    rows = []
    for rank, content in enumerate(ranks):
        number = {"rank": rank} if len(ranks) > 1 else {}
        written = (content.tensors | content.raw).values()
        rows += [number | entry.row() for entry in written if isinstance(entry, NamedTensor)]
    return {
        "from": {"format": model.format, "layout": model.layout},
        "to": {"format": to, "layout": layout, "tensor_parallel": len(ranks)},
        "tensors": count_tensors(ranks),
        "bytes": sum(entry.nbytes for content in ranks for entry in (content.tensors | content.raw).values()),
        "unknown": model.unknown,
        "skipped": model.skipped,
        "entries": rows,
    }
