"""The names of `transformer_engine_torch` that an installed `transformer_engine` uses are there.

WEFT_TE_RELEASES: folders, divided by colons, that contain other releases of the package.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections import defaultdict
from pathlib import Path

import pytest
import transformer_engine_torch

MODULE = "transformer_engine_torch"
NOT_THERE = {"LayerNorm"}  # nor in the module for CUDA: an operation for ONNX calls it
INSTALLED = Path(importlib.util.find_spec("transformer_engine").origin).parent
RELEASES = [
    INSTALLED,
    *(Path(p) / "transformer_engine" for p in os.environ.get("WEFT_TE_RELEASES", "").split(":") if p),
]


def names_used(package: Path) -> dict[str, list[str]]:
    """Returns the places that use each name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        if "jax" in path.relative_to(package).parts:
            continue
        tree = ast.parse(path.read_text())
        aliases = {MODULE}
        for node in ast.walk(tree):
            place = f"{path.relative_to(package)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                aliases |= {a.asname for a in node.names if a.name == MODULE and a.asname}
            elif isinstance(node, ast.ImportFrom) and node.module == MODULE:
                for alias in node.names:
                    if alias.name != "*":
                        found[alias.name].append(place)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                found[node.attr].append(f"{path.relative_to(package)}:{node.lineno}")
    return found


def missing_names(package: Path, module: object) -> list[str]:
    used = names_used(package)
    assert len(used) > 100, f"{package}: only {len(used)} names found"
    missing = [name for name in sorted(used.keys() - NOT_THERE) if not hasattr(module, name)]
    return [f"{name}, used in {', '.join(used[name][:3])}" for name in missing]


@pytest.mark.parametrize("package", RELEASES, ids=lambda p: p.parent.name)
def test_every_name_is_there(package):
    assert missing_names(package, transformer_engine_torch) == []


def test_missing_name_is_found():
    class Without:
        def __getattr__(self, name: str) -> object:
            if name == "rmsnorm_fwd":
                raise AttributeError(name)
            return getattr(transformer_engine_torch, name)

    assert [line.split(",")[0] for line in missing_names(INSTALLED, Without())] == ["rmsnorm_fwd"]
