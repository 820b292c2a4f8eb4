"""Tensor-parallel Parameters as DTensors: training, FSDP2 and distributed checkpoints equal one process."""

import functools
import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from launch import run_ranks  # noqa: E402

SITUATIONS = {
    2: ["trains", "copies", "checkpoints", "parallelized", "mistakes"],
    4: ["trains", "checkpoints", "fsdp_on_a_mesh"],
}


@pytest.fixture(scope="module")
def errors_of(tmp_path_factory):
    """Errors of each rank by situation. Ranks start once for all situations."""

    @functools.cache
    def launch(ranks: int) -> list[dict[str, str]]:
        folder = tmp_path_factory.mktemp("ranks")
        run_ranks("dtensors.py", folder, ranks, *SITUATIONS[ranks])
        return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    return launch


@pytest.mark.parametrize(("ranks", "situation"), [(n, name) for n, names in SITUATIONS.items() for name in names])
def test_on_gloo_ranks(errors_of, ranks, situation):
    for rank, errors in enumerate(errors_of(ranks)):
        assert not errors[situation], f"rank {rank}:\n{errors[situation]}"
