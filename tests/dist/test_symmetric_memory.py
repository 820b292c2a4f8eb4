"""torch.distributed._symmetric_memory on CPU tensors, between three processes."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from launch import run_ranks  # noqa: E402

RANKS = 3
NAMES = [
    line.split("def ")[1].split("(")[0]
    for line in (pathlib.Path(__file__).parent / "symmetric_memory.py").read_text().splitlines()
    if line.startswith("def ") and line.endswith("() -> None:") and "main" not in line
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of each rank for each situation. The ranks start once: starting costs more than the rest."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("symmetric_memory.py", folder, RANKS, seconds=120, fork=False)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("situation", NAMES)
def test_symmetric_memory(results, situation):
    assert [rank[situation] for rank in results] == ["ok"] * RANKS
