"""Builds and runs the C++ projects of the docs exactly as the pages show them.

python tests/documented_projects.py FOLDER   writes each project into FOLDER and runs its commands there

A file of a project is a code block under a line that ends with the file's name. The commands are the shell block that
begins with `cmake -S`; they find weft through the `python` in PATH.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("docs/cpp.md", "docs/add_an_op.md", "docs/add_a_fusion.md")
FILE = re.compile(r"`([\w.]+)`(?:\]\([^)]*\))?:\n\n```(?:cmake|cpp)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMANDS = re.compile(r"^```sh\n(cmake -S .*?)^```", re.DOTALL | re.MULTILINE)


def files(page: str) -> dict[str, str]:
    """Name and content of each file of a page's project."""
    return dict(FILE.findall((ROOT / page).read_text()))


def commands(page: str) -> str:
    """The shell commands that build and run a page's project."""
    (found,) = COMMANDS.findall((ROOT / page).read_text())
    return found


def build(page: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, content in files(page).items():
        (folder / name).write_text(content)
    done = subprocess.run(["bash", "-ec", commands(page)], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{page}: its project fails\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    print(f"outside: {page}: {done.stdout.splitlines()[-1]}", flush=True)


def main() -> None:
    for page in PAGES:
        build(page, Path(sys.argv[1]) / Path(page).stem)


if __name__ == "__main__":
    main()
