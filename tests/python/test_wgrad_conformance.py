"""tests/conformance/wgrad_contract.py, as other libraries run it: passes for weft, and finds every planted fault."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFORMANCE = Path(__file__).parent.parent / "conformance"
sys.path.insert(0, str(CONFORMANCE))

from plain_linear import FAULTS  # noqa: E402


def run(linear: str, *options: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": f"{CONFORMANCE}:{CONFORMANCE.parent.parent / 'python'}"}
    command = [sys.executable, CONFORMANCE / "wgrad_contract.py", linear, *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("linear", ["torchweft.ops:Linear", "plain_linear:Linear"])
def test_linears_keep_the_contract(linear):
    done = run(linear)
    assert done.returncode == 0 and "73 of 73 checks passed" in done.stdout, done.stdout + done.stderr


def test_module_of_transformer_engine_keeps_the_contract(tmp_path):
    text = "from torchweft.compat import transformer_engine\ntransformer_engine.install()\n"
    (tmp_path / "te_linear.py").write_text(text + "from transformer_engine.pytorch import Linear\n")
    report = tmp_path / "report.json"
    command = [sys.executable, CONFORMANCE / "wgrad_contract.py", "te_linear:Linear"]
    options = ["--accumulate", "fuse_wgrad_accumulation", "--json", report]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{CONFORMANCE.parent.parent / 'python'}"}
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not any(json.loads(report.read_text()).values())


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(fault):
    done = run(f"plain_linear:{fault}")
    assert done.returncode == 1 and "failed  row" in done.stdout, done.stdout + done.stderr
    assert "passed  row 1 (plain): one backward" in done.stdout
