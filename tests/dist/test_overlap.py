"""Overlapped linears give what the plain path gives, whatever the mode, the transport and the number of rows."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

import weft

HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("shm", 3), ("shm", 4), ("ucx", 2), ("ucx", 3)])
def test_overlapped_equals_plain(tmp_path, transport, size):
    shared = {
        **os.environ,
        "PYTHONPATH": str(pathlib.Path(weft.__file__).parent.parent),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(size),
        "WEFT_TRANSPORT": transport,
        "WEFT_TIMEOUT": "60",
    }
    command = [sys.executable, str(HERE / "overlapping.py"), str(tmp_path)]
    ranks = []
    try:
        for rank in range(size):
            with (tmp_path / f"rank{rank}.log").open("w") as log:
                environment = {**shared, "RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        codes = [rank.wait(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    logs = "\n".join((tmp_path / f"rank{rank}.log").read_text() for rank in range(size))
    assert codes == [0] * size, logs
    compared = 0
    for rank in range(size):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert not found["wrong"], "\n".join(found["wrong"])
        compared += found["compared"]
    print(f"{compared} tensors compared on {size} ranks over {transport}")
    assert compared > 100 * size
