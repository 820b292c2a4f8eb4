"""Experts on several ranks: examples/python/moe.py, and grouped operations in DDP and FSDP2."""

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from launch import run_ranks  # noqa: E402

STEPS = 60


def trained(folder: pathlib.Path, ranks: int) -> list[dict]:
    """The results of each rank."""
    folder = folder / f"of{ranks}"
    folder.mkdir()
    run_ranks("moe_rank.py", folder, ranks, str(STEPS))
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("moe"), 1)[0]


def test_loss_falls(alone):
    assert alone["losses"][-1] < 0.2 * alone["losses"][0]
    assert (alone["loads"].sum(1) == alone["loads"][0].sum()).all(), "every token must go to the same number of experts"


@pytest.mark.parametrize("ranks", (2, 4))
def test_ranks_match_one_process(alone, ranks, tmp_path):
    found = trained(tmp_path, ranks)
    for one in found:
        assert max(abs(a - b) for a, b in zip(one["losses"], alone["losses"], strict=True)) < 1e-5
        assert torch.equal(one["loads"], alone["loads"])
    for name in (name for name in alone if name.endswith("weight")):
        parts = [one[name] for one in found]
        whole = torch.cat(parts) if name.startswith("experts.") else parts[0]
        torch.testing.assert_close(whole, alone[name], rtol=1e-4, atol=1e-4)


def test_experts_in_ddp_and_fsdp_match_one_process(tmp_path):
    run_ranks("experts_rank.py", tmp_path, 2)
