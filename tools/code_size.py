#!/usr/bin/env python3
"""Counts the lines of code of the library, the share of them in clones, and the lines of the longest file.

    tools/code_size.py                      this tree
    tools/code_size.py --before COMMIT      also at COMMIT; exits with 1 unless both languages have fewer lines now

Lines of code are lines without blank lines, comments and docstrings; a clone is six consecutive ones that occur more
than once. Limits: 3 % in clones, 500 lines in a file.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = {"C++ in weft/": r"weft/.*\.(h|cpp)", "Python in python/torchweft": r"python/torchweft/.*\.py"}
WINDOW, MAX_CLONES, MAX_LINES = 6, 0.03, 500


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def sources(pattern: str, commit: str) -> dict[str, list[str]]:
    """The lines of each file of `commit`, or of the working tree if that is empty."""
    listed = git("ls-tree", "-r", "--name-only", commit) if commit else git("ls-files")
    names = [name for name in listed.splitlines() if re.fullmatch(pattern, name)]
    read = (lambda name: git("show", f"{commit}:{name}")) if commit else (lambda name: (ROOT / name).read_text())
    return {name: read(name).splitlines() for name in names}


def docstring_lines(text: str) -> set[int]:
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    texts = (node for node in nodes if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str))
    return {line for node in texts for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def code_of(name: str, lines: list[str]) -> list[str]:
    """The lines of code, without white space."""
    comment = "#" if name.endswith(".py") else "//"
    skipped = docstring_lines("\n".join(lines)) if name.endswith(".py") else set()
    code = [re.sub(r"\s+", "", line) for i, line in enumerate(lines, 1) if i not in skipped]
    return [line for line in code if line and not line.startswith(comment)]


def clone_share(code: dict[str, list[str]]) -> float:
    """Share of the lines that belong to a clone."""
    places = defaultdict(list)
    for name, lines in code.items():
        for i in range(len(lines) - WINDOW + 1):
            places["\n".join(lines[i : i + WINDOW])].append((name, i))
    cloned = {(name, i + j) for found in places.values() if len(found) > 1 for name, i in found for j in range(WINDOW)}
    return len(cloned) / sum(map(len, code.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="", metavar="COMMIT")
    before = parser.parse_args().before
    failed = False
    for language, pattern in CODE.items():
        files = sources(pattern, "")
        longest = max(files, key=lambda name: len(files[name]))
        code = {name: code_of(name, lines) for name, lines in files.items()}
        clones, lines = clone_share(code), sum(map(len, code.values()))
        text = f"{language}: {lines:,} lines"
        if before:
            earlier = sum(len(code_of(*item)) for item in sources(pattern, before).items())
            text += f", {earlier:,} at {before[:7]}"
            failed |= lines >= earlier
        print(f"{text}; {clones:.1%} in clones; longest file {len(files[longest])} lines, {longest}")
        failed |= clones > MAX_CLONES or len(files[longest]) > MAX_LINES
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
