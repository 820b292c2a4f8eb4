"""FSDP2 on two Gloo ranks trains modules of the Transformer Engine compatibility layer as one process does."""

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from compat_fsdp import make_model, make_optimizer  # noqa: E402
from data_parallel import on_ranks, train  # noqa: E402
from launch import run_ranks  # noqa: E402

EXACT = [
    "linear",
    "layernorm_linear",
    "mlp",
    "mlp-checkpointed",
    "layer",
    "layer-parts",
    "layer-kept",
    "layer-checkpointed",
    "layer-meta",
]
RANKS = 2


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Folder with the results of all situations. The ranks start once: starting costs more than training."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("compat_fsdp.py", folder, RANKS, *EXACT, "layer-bf16")
    return folder


def trained(result: dict) -> dict:
    """Parameters by name, without the key bias: it adds a constant to all scores of a query, so its gradient is only
    rounding, which AdamW scales up."""
    return {name: p for name, p in result["params"].items() if not name.endswith("key_bias")}


def on_one_process(situation: str) -> dict:
    model = make_model(situation)
    return train(model, make_optimizer(model))


@pytest.mark.parametrize("situation", EXACT)
def test_two_ranks_match_one_process(two_ranks, situation):
    two, one = on_ranks(two_ranks, situation), on_one_process(situation)
    assert two["dtypes"] == {"torch.float32"}
    assert two["params"].keys() == one["params"].keys()
    torch.testing.assert_close(two["grads"], one["grads"])
    torch.testing.assert_close(trained(two), trained(one))


def test_mixed_precision_keeps_float32_parameters(two_ranks):
    two, one = on_ranks(two_ranks, "layer-bf16"), on_one_process("layer-bf16")
    assert two["dtypes"] == {"torch.bfloat16"}
    assert {p.dtype for p in two["params"].values()} == {torch.float32}
    torch.testing.assert_close(trained(two), trained(one), rtol=5e-2, atol=2e-2)
