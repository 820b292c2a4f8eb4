"""Where a target is written: beside its place, and moved there when it is whole and on the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .lazy import ConversionError


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def refuse_existing(target: Path, overwrite: bool) -> None:
    old = beside(target, ".replaced")
    if old.exists() and not target.exists():  # a process ended between two renames
        os.rename(old, target)
    if target.exists() and not overwrite:
        raise ConversionError(f"{target} exists; remove it, or replace it by --overwrite")


@contextmanager
def new(target: Path, single: bool, overwrite: bool) -> Iterator[Path]:
    """A file or folder to be written, which becomes `target` if the block ends well and is gone if it fails.

    What an ended process left beside the target is removed; an old target is replaced by renaming, at the end.
    """
    old, partial = beside(target, ".replaced"), beside(target, ".partial")
    refuse_existing(target, overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        if not single:
            partial.mkdir()
        yield partial
        flush(partial)
        remove(old)
        if target.exists():
            os.rename(target, old)
        os.rename(partial, target)
        flush_folder(target.parent)
        remove(old)
    except OSError as error:
        discard(partial)
        free = shutil.disk_usage(target.parent).free / 1e9 if target.parent.exists() else 0
        raise ConversionError(
            f"{target} could not be written: {error.strerror or error}. {free:.1f} GB are free there; make room or "
            "choose a folder in which you may write"
        ) from error
    except BaseException:
        discard(partial)
        raise


def discard(partial: Path) -> None:
    try:
        remove(partial)
    except OSError:
        pass  # the next run removes it


def flush(path: Path) -> None:
    """All of it is on the disk."""
    for file in [path] if path.is_file() else [child for child in path.rglob("*") if child.is_file()]:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    if path.is_dir():
        for folder in (path, *(child for child in path.rglob("*") if child.is_dir())):
            flush_folder(folder)


def flush_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
