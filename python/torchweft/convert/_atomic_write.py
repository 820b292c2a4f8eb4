"""Atomic writes: a target is written as TARGET.partial, flushed to disk and renamed.

Files are created with O_EXCL, so a symbolic link that already exists under one of these names is never followed.
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
    if old.exists() and not target.exists():  # a process was killed between the two renames
        os.rename(old, target)
    if target.exists() and not overwrite:
        raise ConversionError(f"{target} exists. Remove it, or pass --overwrite to replace it")


@contextmanager
def atomic_target(target: Path, single: bool, overwrite: bool, report: Path | None = None) -> Iterator[Path]:
    """Context manager: yields a file or folder to write; renames it to `target` on success, removes it on failure.

    Leftovers of killed processes are removed. An existing target is replaced by a rename at the end; its `report` is
    removed just before that.
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
            f"{target} could not be written: {error.strerror or error}. {free:.1f} GB are free there. Free disk space, "
            "or choose a folder with write permission"
        ) from error
    except BaseException:
        discard(partial)
        raise


def create_exclusive(file: Path) -> None:
    """Creates an empty file; raises if the name exists."""
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))


def atomic_write_text(file: Path, text: str) -> None:
    """Replaces the content of `file` atomically. A symbolic link is replaced, not followed."""
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
    """Renames `partial` to `target`. A target that existed before exists at every moment."""
    if os.path.lexists(target) and (partial.is_dir() or target.is_dir()):
        swap(partial, target)
    else:
        os.replace(partial, target)
    fsync_folder(target.parent)
    remove(sibling(target, ".replaced"))
    remove(partial)


def swap(partial: Path, target: Path) -> None:
    """Exchanges the two names. If the file system cannot, uses two renames; the next run can undo the first."""
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
        pass  # the next conversion removes it


def fsync_tree(path: Path) -> None:
    """Flushes a file, or a folder with all files in it, to disk."""
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
