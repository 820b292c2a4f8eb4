"""The public names of the package: listed in `__all__`, documented, with examples that run, and typed."""

import doctest
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchweft
from torchweft import ops

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python/torchweft"
EXTENSION = "torchweft.te.transformer_engine_torch"  # Transformer Engine imports it
NAMES = [info.name for info in pkgutil.walk_packages(torchweft.__path__, "torchweft.") if info.name != EXTENSION]
MODULES = [torchweft, *(importlib.import_module(name) for name in NAMES if "._" not in name)]


def test_public_modules_declare_their_names():
    for module in MODULES:
        assert module.__all__, module.__name__
        for name in module.__all__:
            assert hasattr(module, name), f"{module.__name__}.{name}"


def public_objects():
    """Yields the name and value of each public function, class and method; operations registered in C++ excepted."""
    found = {f"{module.__name__}.{name}": getattr(module, name) for module in MODULES for name in module.__all__}
    native = ops.native_classes.values()  # their docstrings come from C++
    for name, value in found.items():
        if not inspect.isclass(value):
            yield name, value
        elif value not in native:
            yield name, value
            bases = [base for base in value.__mro__ if base.__module__.startswith("torchweft.") and base not in native]
            members = {member for base in bases for member in vars(base) if not member.startswith("_")}
            yield from ((f"{name}.{member}", getattr(value, member)) for member in sorted(members))


def test_public_names_have_docstrings():
    found = {name: value for name, value in public_objects() if callable(value) or isinstance(value, property)}
    assert len(found) > 150
    assert not [name for name, value in found.items() if not inspect.getdoc(value)]


class RunsIfNoOutputIsShown(doctest.OutputChecker):
    """An example without expected output must only run."""

    def check_output(self, want, got, optionflags):
        return not want or super().check_output(want, got, optionflags)


@pytest.mark.parametrize("name", [name for name in NAMES if "__main__" not in name and name != "torchweft._C"])
def test_examples_in_docstrings_run(name):
    block = ops.Sequential(ops.Linear(8, 8), ops.GELU())
    names = {"torchweft": torchweft, "torch": torch, "ops": ops, "block": block, "model": block, "x": torch.randn(4, 8)}
    names |= {"seed": 1, "rank": 0}
    runner = doctest.DocTestRunner(RunsIfNoOutputIsShown())
    for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name), extraglobs=names):
        runner.run(test)
    assert not runner.failures


SCRIPT = """
from typing import Any

import torch

import torchweft
from torchweft import ops


class Negate(ops.BasicOperation):
    def op_forward(self, ctx: ops.OperationContext, input_: torch.Tensor, **unused: Any) -> torch.Tensor:
        return -input_

    def op_backward(self, ctx: ops.OperationContext, grad_output: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
        return -grad_output, ()


def fuse(pipeline: list[ops.FusibleOperation], *, recipe: Any) -> list[ops.FusibleOperation]:
    return pipeline


linear = ops.Linear(8, 8, bias=False, dtype=torch.float32)
fork = ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False)
block = ops.Sequential(fork, ops.RMSNorm(8, eps=1e-6), linear, ops.GELU(), ops.Dropout(0.1), Negate())
reveal_type(linear.weight)
reveal_type(linear.explain(torch.ones(2, 8)).text)
reveal_type(torchweft.explain(block, torch.ones(2, 8)).data)
reveal_type(fork)
reveal_type(block[1:])
reveal_type(ops.RMSNorm(8).eps)
reveal_type(ops.AllReduce().process_group)
with ops.register_forward_fusion(fuse) as handle, torchweft.fusion.without_rules("linear_bias"):
    reveal_type(handle)
"""
REVEALED = [
    "torch.nn.parameter.Parameter",
    "str",
    "list[dict[str, Any]]",
    "torchweft.ops.MakeExtraOutput",
    "torchweft._sequential.Sequential",
    "float",
    "torch._C._distributed_c10d.ProcessGroup | None",
    "torchweft.fusion.FusionHandle",
]


def test_stubs_type_check_a_user_script(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", ROOT / ".mypy_cache"]
    done = subprocess.run(
        [*command, "--python-version", "3.10", tmp_path / "script.py", *sorted(PACKAGE.glob("*.pyi"))],
        env=os.environ | {"MYPYPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split('"')[1] for line in done.stdout.splitlines() if "Revealed" in line] == REVEALED
