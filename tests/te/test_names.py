"""The names of `transformer_engine_torch` that an installed `transformer_engine` uses are there, and those of
`transformer_engine` that installed projects use.

WEFT_TE_RELEASES: folders, divided by colons, that contain other releases of the package.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import transformer_engine_torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import te_projects  # noqa: E402

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


@pytest.mark.parametrize("name", ("megatron.core", "accelerate", "lightning"))
def test_imports_of_projects_resolve(name):
    """tools/te_projects.py makes the table of docs/transformer_engine.md of their repositories."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed")
    (folder,) = importlib.util.find_spec(name).submodule_search_locations
    names = te_projects.examine(Path(folder))
    assert len(names.unconditional | names.guarded) > 3
    assert names.missing()[0] == []


def test_missing_import_of_a_project_is_found(tmp_path):
    (tmp_path / "model.py").write_text(
        "import transformer_engine.pytorch as te\nfrom transformer_engine.pytorch import Linear, NoSuchLayer\n"
        "try:\n    from transformer_engine.pytorch.attention import no_such_function\nexcept ImportError:\n    pass\n"
        "class Layer(te.NoOtherLayer):\n    pass\n"
    )
    lost, without = te_projects.examine(tmp_path).missing()
    assert lost == [f"transformer_engine.pytorch.{name}" for name in ("NoOtherLayer", "NoSuchLayer")]
    assert without == ["transformer_engine.pytorch.attention.no_such_function"]
