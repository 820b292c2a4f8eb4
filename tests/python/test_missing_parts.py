"""What a user sees on a machine that lacks something: one sentence with the way out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchweft
from torchweft import _C

ROOT = Path(torchweft.__file__).parent.parent.parent


def test_no_graphviz(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    plan = torchweft.ops.GELU().explain(torch.ones(2, 8))
    with pytest.raises(RuntimeError, match=r"Graphviz's 'dot' was not found\. Install it .*, or save to a \.dot file"):
        plan.save(tmp_path / "plan.svg")
    plan.save(tmp_path / "plan.dot")


def test_no_avx2():
    """WEFT_TIER=ref is what a CPU without AVX2 uses: everything runs, and torchweft info says that it is slow."""
    code = "import torch, torchweft; torchweft.ops.Linear(8, 8)(torch.ones(2, 8)).sum().backward(); print('trained')"
    environment = {**os.environ, "WEFT_TIER": "ref", "PYTHONPATH": str(ROOT / "python")}
    for command, said in (
        (["-c", code], "trained"),
        (["-m", "torchweft", "info"], "ref for bfloat16 linears; WEFT_TIER=ref"),
    ):
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=True)
        assert said in done.stdout, done.stdout


def test_ucx_is_not_used(monkeypatch):
    monkeypatch.delenv("WEFT_UCX_TRUSTED", raising=False)
    reason = _C.ucx_unavailable_reason()
    assert re.search(r"WEFT_UCX_TRUSTED is not 1: .*\. Set it to 1 if|without UCX", reason), reason


def test_no_compiler(tmp_path):
    environment = {"PATH": os.environ["PATH"], "CXX": "no-such-compiler"}
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-G", "Ninja"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode and "Could not find compiler set in environment variable CXX" in done.stderr, done.stderr
