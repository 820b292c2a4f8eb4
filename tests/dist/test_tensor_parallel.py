"""Tensor-parallel modules on Gloo ranks match one process; mismatches raise on every rank."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from launch import run_ranks  # noqa: E402

LOSS = ["sharded_loss", "sharded_loss_rejects_bad_targets"]
ALWAYS = ["every_mode", "collectives", "fused_block", "checkpoints", "initial_weights", "invalid_arguments"]
# ranks, transport, situations; those that leave the ranks out of step come last
LAUNCHES = {
    "2 ranks": (
        2,
        "plain",
        [
            *ALWAYS,
            *LOSS,
            "sharded_head_and_loss",
            "sharded_blocks_of_logits",
            "distributed_checkpoints",
            "single_rank_group",
            "checkpointed_block",
            "compiled_block",
            "quantized_linears",
            "delayed_scaling",
            "delayed_linears",
            "mismatches",
        ],
    ),
    "3 ranks": (3, "plain", [*ALWAYS, *LOSS, "non_adjacent_ranks", "mismatches", "missing_rank"]),
    "4 ranks": (4, "plain", [*ALWAYS, "non_adjacent_ranks", "mesh_groups", "distributed_checkpoints", "ddp", "fsdp"]),
    "4 ranks, shared memory": (
        4,
        "shm",
        ["every_mode", "sharded_loss", "fused_block", "quantized_linears", "ddp", "fsdp"],
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Errors of each rank by situation. The ranks of a launch start once: starting costs more than the rest."""
    launched = {}

    def launch(name: str) -> list[dict[str, str]]:
        if name not in launched:
            ranks, transport, situations = LAUNCHES[name]
            folder = tmp_path_factory.mktemp("ranks")
            environment = {"WEFT_TRANSPORT": transport, "WEFT_UCX_TRUSTED": "1"}
            run_ranks("tensor_parallel.py", folder, ranks, *situations, fork=name != "2 ranks", **environment)
            launched[name] = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
        return launched[name]

    return launch


@pytest.mark.parametrize(
    ("launch", "situation"), [(name, situation) for name, (_, _, list_) in LAUNCHES.items() for situation in list_]
)
def test_on_gloo_ranks(found, launch, situation):
    for rank, errors in enumerate(found(launch)):
        assert not errors[situation], f"rank {rank}:\n{errors[situation]}"
