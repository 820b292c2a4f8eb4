"""Data parallelism that does not reduce `main_grad` warns or raises."""

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from launch import run_ranks  # noqa: E402
from main_grad import SILENT, WARNED  # noqa: E402


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("main_grad.py", folder, 2, *WARNED, *SILENT, "fsdp")
    return lambda situation: torch.load(folder / f"{situation}.pt")


@pytest.mark.parametrize("situation", WARNED)
def test_ddp_warns_of_unreduced_main_grad(two_ranks, situation):
    found = two_ranks(situation)
    (text, file), names = found["messages"][0], WARNED[situation][1]
    assert found["error"] == "" and len(found["messages"]) == 1
    assert text.startswith(
        f"DistributedDataParallel reduces .grad, but the gradients of {', '.join(names)} go to main_grad"
    )
    assert pathlib.Path(file).name == "main_grad.py", "the warning names the line that wraps the module"


@pytest.mark.parametrize("situation", SILENT)
def test_ddp_does_not_warn_without_unreduced_main_grad(two_ranks, situation):
    assert two_ranks(situation) == {"messages": [], "error": ""}


def test_sharded_weight_without_main_grad_raises(two_ranks):
    found = two_ranks("fsdp")
    assert "has no main_grad" in found["error"] and not found["messages"]
