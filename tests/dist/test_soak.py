"""Two ranks train for long: memory and file descriptors stay constant, and a second run gives bit-equal losses."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import launch  # noqa: E402

GROWTH = 1 << 20  # bytes, over the second half of the steps


def train(folder: pathlib.Path, steps: int, transport: str) -> list[dict]:
    folder.mkdir()
    # Not forked: the resident memory of a forked process grows as it touches pages of its parent.
    launch.run_ranks("soak_rank.py", folder, 2, str(steps), seconds=1200, fork=False, WEFT_TRANSPORT=transport)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(2600)
@pytest.mark.parametrize("transport", ["shm", "plain"])
@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_soak_keeps_memory_descriptors_and_loss_bits(tmp_path, steps, transport):
    first, second = (train(tmp_path / name, steps, transport) for name in ("first", "second"))
    losses = first[0]["losses"]
    assert len(losses) == steps
    values = [float.fromhex(loss) for loss in losses]
    assert sum(values[-steps // 4 :]) < sum(values[: steps // 4]), "it did not learn"
    for found in (*first, *second):
        assert found["losses"] == losses
        assert len(set(found["descriptors"])) == 1, found["descriptors"]
    # A leak shows in both runs; the allocator may keep more memory in one of them.
    grown = min(max(max(rank["resident"]) - rank["resident"][0] for rank in run) for run in (first, second))
    assert grown <= GROWTH, f"{grown} bytes over {steps // 2} steps"
    print(f"{steps} steps over {transport}, twice: resident memory grew by {grown >> 10} KiB")
