"""Two tensor- and sequence-parallel transformer blocks train as one process does."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import torchweft

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks/python/train_parallel.py"


@pytest.mark.parametrize(
    ("steps", "dtype"), [(20, "float32"), (20, "float64"), pytest.param(300, "float32", marks=pytest.mark.slow)]
)
def test_two_ranks_match_losses_of_one_process(tmp_path, steps, dtype):
    command = [sys.executable, str(SCRIPT), "--steps", str(steps), "--dtype", dtype, "--json", str(tmp_path / "found")]
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(torchweft.__file__).parent.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    losses = json.loads((tmp_path / "found").read_text())["losses"]["parallel"]
    assert losses[-1] < 0.7 * losses[0], "it did not learn"
