"""tests/conformance/wgrad_contract.py, as other libraries run it: passes for weft, and finds every planted fault."""

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


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found(fault):
    done = run(f"plain_linear:{fault}")
    assert done.returncode == 1 and "failed  row" in done.stdout, done.stdout + done.stderr
    assert "passed  row 1 (plain): one backward" in done.stdout
