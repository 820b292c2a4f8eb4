"""If Transformer Engine is installed, the tests run on it; otherwise weft replaces it."""

import importlib.util
import subprocess
import sys

import pytest
import torch

REAL = importlib.util.find_spec("transformer_engine") is not None
if not REAL:
    from torchweft.compat import transformer_engine

    transformer_engine.install()

torch.set_num_threads(1)  # the tensors are tiny, and on a shared machine a second thread waits for its core


@pytest.fixture
def torchrun():
    """Returns a function that runs a script on two ranks and returns its output. `install()` does not affect child
    processes, so they are started with `-m torchweft.compat`."""
    if REAL and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    def run(*script: str) -> str:
        command = [*ranks, *([] if REAL else ["-m", "torchweft.compat"]), *script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
