"""Unmodified megatron-core and Transformer Engine on weft give the same results on two ranks as on one, and checkpoints
load on both.

They are searched on sys.path, in build/te and in the folder $WEFT_MEGATRON.
"""

import pathlib
import re
import sys
from importlib.machinery import PathFinder

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from launch import PACKAGES, run_ranks  # noqa: E402


def found(name: str) -> bool:
    path = [*PACKAGES, *sys.path]
    for part in name.split("."):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or ())
    return True


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not found(name), reason=f"{name} is not installed, nor in $WEFT_MEGATRON")


pytestmark = [needs("megatron.core"), needs("transformer_engine")]


def largest(folder: pathlib.Path) -> str:
    """The largest error in the log of rank 0."""
    return max(re.findall(r"by (\d\.\de[-+]\d+)", (folder / "rank0.log").read_text()), key=float)


def test_same_loss_and_gradients_as_one_rank(tmp_path):
    """A tensor-parallel layer and GPTModel, with sequence parallelism, op fuser and fused accumulation on and off."""
    run_ranks("megatron_rank.py", tmp_path, 1, "same")
    run_ranks("megatron_rank.py", tmp_path, 2, "same")
    print(f"off one rank by at most {largest(tmp_path)} relative")


@needs("psutil")
def test_checkpoint_of_two_ranks_resumes_on_one(tmp_path):
    """Trains with TP 2 and sequence parallelism; one rank resumes with the losses of the uninterrupted run."""
    run_ranks("megatron_rank.py", tmp_path, 2, "train")
    run_ranks("megatron_rank.py", tmp_path, 1, "resume")
    print(f"loss off the uninterrupted run by at most {largest(tmp_path)} relative")


@needs("psutil")
@pytest.mark.parametrize("ranks", [1, 2])
def test_fp8_recipes(tmp_path, ranks):
    """30 steps with each recipe, with a checkpoint that continues bit-equal."""
    run_ranks("megatron_rank.py", tmp_path, ranks, "recipes")
    print((tmp_path / "rank0.log").read_text())


def test_parallel_dimensions(tmp_path):
    """Three steps over 2 ranks: context parallelism, experts with all-to-all, FSDP2."""
    cases = ("context", "experts", "fully_sharded")
    run_ranks("megatron_rank.py", tmp_path, 1, *cases)
    run_ranks("megatron_rank.py", tmp_path, 2, *cases)
    print(f"off one rank by at most {largest(tmp_path)} relative")


@needs("psutil")
def test_dimensions_of_distributed_optimizer(tmp_path):
    """Its steps over 2 data-parallel ranks, and checkpoints in every format of Megatron."""
    run_ranks("megatron_rank.py", tmp_path, 1, "optimizer_formats")
    run_ranks("megatron_rank.py", tmp_path, 2, "optimizer_formats")
    run_ranks("megatron_rank.py", tmp_path, 1, "optimizer_resharded")


def test_limits(tmp_path):
    run_ranks("megatron_rank.py", tmp_path, 1, "limits")
