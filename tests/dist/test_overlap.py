"""Overlapped linears match plain collectives for every mode, transport and number of rows."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from launch import run_ranks  # noqa: E402


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("shm", 3), ("shm", 4), ("ucx", 2), ("ucx", 3)])
def test_overlapped_equals_plain(tmp_path, transport, size):
    run_ranks("overlap_rank.py", tmp_path, size, WEFT_TRANSPORT=transport, WEFT_TIMEOUT="60", WEFT_UCX_TRUSTED="1")
    compared = 0
    for rank in range(size):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert not found["wrong"], "\n".join(found["wrong"])
        compared += found["compared"]
    print(f"{compared} tensors compared on {size} ranks over {transport}")
    assert compared > 100 * size
