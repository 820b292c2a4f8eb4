"""Inspection, verification and comparison of checkpoints."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ._content import parse_json
from ._formats import open_checkpoint
from ._lazy_tensor import ConversionError, bitwise_equal, raw_bytes
from ._model import read_model, unstacked_layers
from ._name_table import read_names
from ._progress import Progress
from ._report import NamedTensor, count_tensors, is_counted, report_path


def inspect(source: Path | str, names: Path | str | None = None) -> dict[str, Any]:
    """Lists the contents of a checkpoint.

    Args:
        source: a file, a folder, or a folder of iterations.
        names: JSON file with name rules that take precedence over the table.

    Returns:
        A dictionary: ``format``, ``layout`` (whose names they are), ``bytes``, ``count`` (of names on all ranks,
        without empty extra states), ``tensors`` (name to (dtype, shape)), ``raw`` (name to size of opaque objects),
        ``common`` (other values) and ``skipped`` (name to reason).
    """
    stored = open_checkpoint(source)
    first, table = stored.ranks[0], read_names(names)
    layout = table.layout_of(unstacked_layers(stored, table)[0].tensors)
    rows = {name: (str(lazy.dtype).removeprefix("torch."), list(lazy.shape)) for name, lazy in first.tensors.items()}
    return {
        "format": stored.format,
        "layout": layout,
        "bytes": sum(lazy.nbytes for content in stored.ranks for lazy in content.tensors.values()),
        "count": count_tensors(stored.ranks),
        "tensors": rows,
        "raw": {name: lazy.nbytes for name, lazy in first.raw.items()},
        "common": first.common,
        "skipped": first.skipped,
    }


def verify(target: Path | str, quiet: bool = True) -> list[str]:
    """Compares a converted checkpoint with its report.

    Args:
        target: the converted checkpoint.
        quiet: print no progress.

    Returns:
        A list of differences, empty if there are none.
    """
    target = Path(target)
    file = report_path(target, target.is_file())
    try:
        report = parse_json(file.read_bytes(), str(file))
        total, rows = report["bytes"], [(row.get("rank", 0), row["name"], row["sha256"]) for row in report["entries"]]
        if any([type(one) for one in row] != [int, str, str] or row[0] < 0 for row in [(total, "", ""), *rows]):
            raise ValueError("its entries have the wrong types")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(
            f"{file} cannot be read: {error}. Only converted checkpoints have a report. To compare two checkpoints, "
            "pass both"
        ) from error
    ranks = [content.tensors | content.raw for content in open_checkpoint(target).ranks]
    progress, differences = Progress(total, "verify", quiet), []
    for rank, name, expected in rows:
        lazy = ranks[rank].get(name) if rank < len(ranks) else None
        if lazy is None:
            differences.append(f"{name} is missing")
            continue
        found = hashlib.sha256()
        for _, block in NamedTensor(name, lazy, []).blocks():
            found.update(raw_bytes(block))
            progress.add(block.nbytes)
        if found.hexdigest() != expected:
            differences.append(f"{name} has changed since it was written")
    progress.finish()
    return differences


def compare(
    one: Path | str, other: Path | str, names: Path | str | None = None, quiet: bool = True
) -> tuple[int, list[str]]:
    """Compares two checkpoints of any formats and layouts, bit by bit. A missing `_extra_state` equals an empty one.

    Args:
        one: a checkpoint.
        other: another checkpoint.
        names: JSON file with name rules that take precedence over the table.
        quiet: print no progress.

    Returns:
        A tuple (number of tensors compared, list of differences).

    Example::

        count, differences = torchweft.convert.compare("checkpoint/iter_0000100", "plain")
    """
    table = read_names(names)
    models = [read_model(open_checkpoint(path), table) for path in (one, other)]
    everything = [{name: entry.lazy for name, entry in model.entries.items()} | model.raw for model in models]
    left, right = ({name: lazy for name, lazy in found.items() if is_counted(name, lazy)} for found in everything)
    differences = [f"{name} is only in {one}" for name in left if name not in right]
    differences += [f"{name} is only in {other}" for name in right if name not in left]
    shared = [name for name in left if name in right]
    progress = Progress(sum(left[name].nbytes for name in shared), "verify", quiet)
    for name in shared:
        if not bitwise_equal(NamedTensor(name, left[name], []), NamedTensor(name, right[name], [])):
            differences.append(f"{name} differs")
        progress.add(left[name].nbytes)
    progress.finish()
    return len(shared), differences
