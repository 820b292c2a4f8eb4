"""Which names of Transformer Engine other projects use, and whether they resolve in the installed package on weft.

    python tools/te_projects.py Megatron-LM=/mirrors/megatron.git verl=/checkouts/verl --json names.json

Each project is a folder of sources or a bare git repository, of which HEAD is read. A name is unconditional if a module
imports it at its top level, outside of `try` and `if`; the others are guarded: the project does without them.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOTS = ("transformer_engine", "transformer_engine_torch")
OTHER_PARTS = ("test", "tests", "jax", "paddle")


def sources(project: Path) -> Iterator[tuple[str, str]]:
    """Yields the path and the text of each file that mentions Transformer Engine."""
    if (project / "HEAD").exists():
        git = ["git", f"--git-dir={project}"]
        found = subprocess.run(
            [*git, "grep", "-l", "transformer_engine", "HEAD", "--", "*.py"], capture_output=True, text=True
        )
        for line in found.stdout.splitlines():
            path = line.removeprefix("HEAD:")
            yield path, subprocess.run([*git, "show", line], capture_output=True, text=True, check=True).stdout
        return
    for file in sorted(project.rglob("*.py")):
        text = file.read_text(errors="replace")
        if "transformer_engine" in text:
            yield str(file.relative_to(project)), text


class Uses(ast.NodeVisitor):
    """Collects the names that a file uses: dotted name → whether its import is guarded."""

    def __init__(self) -> None:
        self.names: dict[str, bool] = {}
        self._modules: dict[str, tuple[str, bool]] = {}  # local name → what it stands for, and whether it is guarded
        self._guarded = False

    def _inside(self, node: ast.AST) -> None:
        before, self._guarded = self._guarded, True
        self.generic_visit(node)
        self._guarded = before

    visit_Try = visit_If = visit_FunctionDef = visit_AsyncFunctionDef = visit_With = _inside

    def _use(self, name: str, guarded: bool) -> None:
        self.names[name] = self.names.get(name, True) and guarded

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] in ROOTS:
                self._use(alias.name, self._guarded)
                self._modules[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0],
                    self._guarded,
                )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module and node.module.split(".")[0] in ROOTS:
            for alias in node.names:
                name = node.module if alias.name == "*" else f"{node.module}.{alias.name}"
                self._use(name, self._guarded)
                self._modules[alias.asname or alias.name] = (name, self._guarded)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in self._modules:
            name, guarded = self._modules[inner.id]
            self._use(".".join([name, *reversed(parts)]), guarded or self._guarded)
        else:
            self.generic_visit(node)


def resolves(name: str) -> bool:
    """Whether a dotted name exists. What follows a class or a function is not looked at."""
    parts = name.split(".")
    value = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            if type(value).__name__ != "module":
                return True
            try:
                importlib.import_module(".".join(parts[:i]))
            except ImportError:
                return False
        value = getattr(value, part)
    return True


def date_of(project: Path) -> str:
    """The date of the last commit, if the folder is a repository."""
    git = ["git", "-C", str(project), "log", "-1", "--format=%cs"]
    done = subprocess.run(git, capture_output=True, text=True)
    return f", {done.stdout.strip()}" if done.returncode == 0 else ""


@dataclass
class Names:
    unconditional: set[str]
    guarded: set[str]

    def missing(self) -> tuple[list[str], list[str]]:
        """The names that do not resolve: unconditional ones, guarded ones."""
        return tuple(sorted(n for n in names if not resolves(n)) for names in (self.unconditional, self.guarded))


def examine(project: Path) -> Names:
    guarded: dict[str, bool] = {}
    for path, text in sources(project):
        if any(part.startswith(OTHER_PARTS) for part in Path(path).parts):
            continue
        try:
            uses = Uses()
            uses.visit(ast.parse(text))
        except SyntaxError:
            continue
        for name, is_guarded in uses.names.items():
            guarded[name] = guarded.get(name, True) and is_guarded
    return Names({n for n, g in guarded.items() if not g}, {n for n, g in guarded.items() if g})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("projects", nargs="+", help="name=folder or name=bare repository")
    parser.add_argument("--json", type=Path, help="write a stored result for tools/make_tables.py")
    chosen = parser.parse_args()
    import torchweft.te

    torchweft.te.install()
    rows = []
    absent = False
    for project in chosen.projects:
        name, _, folder = project.partition("=")
        names = examine(Path(folder))
        lost, without = names.missing()
        absent = absent or bool(lost)
        rows.append(
            [
                f"{name}{date_of(Path(folder))}",
                f"{len(names.unconditional) - len(lost)} of {len(names.unconditional)}",
                f"{len(names.guarded) - len(without)} of {len(names.guarded)}",
                ", ".join(f"`{n.removeprefix('transformer_engine.')}`" for n in lost + without),
            ]
        )
        print(*rows[-1], sep=" | ", flush=True)
    if chosen.json:
        columns = [
            "project, date of the commit",
            "names resolved, of those imported unconditionally",
            "of the guarded ones",
            f"not in {version('transformer_engine')}",
        ]
        command = "python tools/te_projects.py NAME=FOLDER…"
        stored = {"date": time.strftime("%F"), "command": command, "columns": columns, "rows": rows}
        chosen.json.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
    sys.exit(absent)


if __name__ == "__main__":
    main()
