"""DDP and FSDP2 on two Gloo ranks train weft's modules exactly as one process does."""

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from data_parallel import make_model, make_optimizer, on_ranks, train  # noqa: E402
from launch import run_ranks  # noqa: E402

EXACT = [
    "ddp-block",
    "ddp-op",
    "ddp-checkpointed",
    "fsdp-block",
    "fsdp-block-adamw",
    "fsdp-op-adamw",
    "fsdp-only-op",
    "fsdp-checkpointed",
]
RANKS = 2


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Folder with the results of all situations. The ranks start once: starting costs more than training."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("data_parallel.py", folder, RANKS, *EXACT, "fsdp-bf16")
    return folder


def on_one_process(situation: str) -> dict:
    model = make_model()
    return train(model, make_optimizer(situation, model))


@pytest.mark.parametrize("situation", EXACT)
def test_two_ranks_match_one_process(two_ranks, situation):
    two, one = on_ranks(two_ranks, situation), on_one_process(situation)
    assert two["dtypes"] == {"torch.float32"}
    assert two["state"].keys() == two["params"].keys()
    for what in ("grads", "params", "state"):
        assert two[what].keys() == one[what].keys()
        torch.testing.assert_close(two[what], one[what])


def test_fsdp_mixed_precision_keeps_float32_parameters(two_ranks):
    two, one = on_ranks(two_ranks, "fsdp-bf16"), on_one_process("fsdp-bf16")
    assert two["dtypes"] == {"torch.bfloat16"}
    assert {p.dtype for p in two["params"].values()} == {torch.float32}
    torch.testing.assert_close(two["params"], one["params"], rtol=5e-2, atol=2e-2)
    assert any(not torch.equal(two["params"][name], one["params"][name]) for name in one["params"])
