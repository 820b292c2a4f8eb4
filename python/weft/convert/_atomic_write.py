"""Where a target is written: beside its place, and moved there when it is whole and on the disk.

Files are created anew (O_EXCL), so a link that someone else put at one of these names is never written through.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ._lazy_tensor import ConversionError


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def sibling(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def reject_existing(target: Path, overwrite: bool) -> None:
    old = sibling(target, ".replaced")
    if old.exists() and not target.exists():  # a process ended between two renames
        os.rename(old, target)
    if target.exists() and not overwrite:
        raise ConversionError(f"{target} exists; remove it, or replace it by --overwrite")


@contextmanager
def atomic_target(target: Path, single: bool, overwrite: bool, report: Path | None = None) -> Iterator[Path]:
    """A file or folder to be written, which becomes `target` if the block ends well and is gone if it fails.

    What an ended process left beside the target is removed; an old target is replaced by renaming, at the end, and
    its `report`, which lies beside it, is gone before that.
    """
    partial = sibling(target, ".partial")
    reject_existing(target, overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        create_exclusive(partial) if single else partial.mkdir()
        yield partial
        fsync_tree(partial)
        if report is not None:
            report.unlink(missing_ok=True)
        replace_target(partial, target)
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


def create_exclusive(file: Path) -> None:
    """An empty file, where there was nothing."""
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))


def atomic_write_text(file: Path, text: str) -> None:
    """`file` with this text: whole or as it was. A link at its place is replaced, not followed."""
    partial = sibling(file, ".partial")
    try:
        partial.unlink(missing_ok=True)
        create_exclusive(partial)
        partial.write_text(text)
        fsync_tree(partial)
        os.replace(partial, file)
        fsync_folder(file.parent)
    except OSError as error:
        discard(partial)
        raise ConversionError(f"{file} could not be written: {error.strerror or error}") from error


def replace_target(partial: Path, target: Path) -> None:
    """What was written takes the place of `target`, which is there at every moment if it was there before."""
    if os.path.lexists(target) and (partial.is_dir() or target.is_dir()):
        swap(partial, target)
    else:
        os.replace(partial, target)
    fsync_folder(target.parent)
    remove(sibling(target, ".replaced"))
    remove(partial)


def swap(partial: Path, target: Path) -> None:
    """The names are exchanged; on a file system that cannot, by two renames, of which the first can be undone."""
    at_fdcwd, rename_exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if ctypes.CDLL(None).renameat2(at_fdcwd, os.fsencode(partial), at_fdcwd, os.fsencode(target), rename_exchange) == 0:
        return
    old = sibling(target, ".replaced")
    remove(old)
    os.rename(target, old)
    os.rename(partial, target)


def discard(partial: Path) -> None:
    try:
        remove(partial)
    except OSError:
        pass  # the next run removes it


def fsync_tree(path: Path) -> None:
    """All of it is on the disk."""
    for file in [path] if path.is_file() else [child for child in path.rglob("*") if child.is_file()]:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    if path.is_dir():
        for folder in (path, *(child for child in path.rglob("*") if child.is_dir())):
            fsync_folder(folder)


def fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
