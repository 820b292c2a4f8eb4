#!/usr/bin/env python3
"""Checks that a wheel can be installed beside the distribution `weft` of the package index, an agent framework.

    tests/wheel_names.py WHEEL [OTHER_WHEEL]

The two must share no file and no command, and WHEEL must have no top-level `weft`. Without OTHER_WHEEL, pip downloads
the newest one; without an index, only WHEEL itself is checked.
"""

from __future__ import annotations

import configparser
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def files_and_commands(wheel: Path) -> tuple[set[str], set[str]]:
    """Returns what a wheel installs: paths below site-packages, and console scripts."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = configparser.ConfigParser(delimiters=("=",))
        for name in names:
            if name.endswith(".dist-info/entry_points.txt"):
                entry_points.read_string(archive.read(name).decode())
    return set(names), set(entry_points["console_scripts"]) if "console_scripts" in entry_points else set()


def conflicts(ours: Path, other: Path | None) -> list[str]:
    files, commands = files_and_commands(ours)
    found = [f"top-level name weft: {name}" for name in sorted(files) if name.split("/")[0].split(".")[0] == "weft"]
    if other is not None:
        other_files, other_commands = files_and_commands(other)
        found += [f"file in both: {name}" for name in sorted(files & other_files)]
        found += [f"command in both: {name}" for name in sorted(commands & other_commands)]
    return found


def download(folder: str) -> Path | None:
    """Downloads the other distribution, which needs Python 3.12."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", folder]
    done = subprocess.run([*command, "--only-binary=:all:", "--python-version", "3.12", "weft"], check=False)
    return next(Path(folder).glob("weft-*.whl"), None) if done.returncode == 0 else None


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ours = Path(sys.argv[1])
        other = Path(sys.argv[2]) if len(sys.argv) > 2 else download(folder)
        found = conflicts(ours, other)
        if found:
            sys.exit("\n".join(found))
        peer = f"shares no file and no command with {other.name}" if other else "compared with nothing: no index"
        print(f"{ours.name}: no top-level weft; {peer}")


if __name__ == "__main__":
    main()
