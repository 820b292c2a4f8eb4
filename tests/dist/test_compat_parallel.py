"""Tensor-parallel and context-parallel modules of the Transformer Engine compatibility layer match one process."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from launch import run_ranks  # noqa: E402


def test_modules_on_two_ranks_match_one_process(tmp_path):
    run_ranks("compat_rank.py", tmp_path, 2, WEFT_TRANSPORT="plain")


@pytest.mark.parametrize("ranks, options", [(2, {"WEFT_TRANSPORT": "plain"}), (2, {}), (3, {})], ids=str)
def test_sequences_over_ranks_match_one_process(tmp_path, ranks, options):
    run_ranks("context_parallel.py", tmp_path, ranks, **options)
