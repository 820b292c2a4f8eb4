"""The tests run on GPUs, or with `-p torchweft.te.pytest_plugin` and `WEFT_DEVICES=2` on simulated ones."""

import subprocess
import sys

import pytest
import torch

SIMULATED = "torchweft.te" in sys.modules

torch.set_num_threads(1)  # the tensors are tiny, and on a shared machine a second thread waits for its core


@pytest.fixture
def torchrun():
    """Returns a function that runs a script on two ranks and returns its output."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    def run(*script: str) -> str:
        done = subprocess.run([*ranks, *script], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
