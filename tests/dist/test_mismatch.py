"""Ranks that run different collectives, long after the start, all raise; no process aborts."""

from __future__ import annotations

import itertools
import json
import pathlib
import random
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from launch import run_ranks  # noqa: E402

OPERATIONS = {"plain": ("gather", "scatter", "sum"), "shm": ("gather", "scatter"), "ucx": ("gather", "scatter")}
DTYPES = ("float32", "bfloat16", "float64")
SIZES = ("12x4", "24x4", "12x8", "36x16", "480x64")  # rows divide over 2, 3 and 4 ranks


def cases(transport: str, count: int) -> list[str]:
    """Pairs that differ in operation, dtype or sizes, the same in every run."""
    each = [":".join(one) for one in itertools.product(OPERATIONS[transport], DTYPES, SIZES)]
    pairs = [f"{a}|{b}" for a, b in itertools.permutations(each, 2)]
    return random.Random(transport).sample(pairs, count)


def check(folder: pathlib.Path, transport: str, size: int, given: list[str]) -> None:
    run_ranks("mismatch_rank.py", folder, size, *given, WEFT_TRANSPORT=transport, WEFT_UCX_TRUSTED="1")
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]
    for number, case in enumerate(given):
        for rank in range(size):
            kind, text = found[rank][number]
            assert kind == "DistError" and "Mismatch" in text, f"{case}, rank {rank}: {kind}: {text}"


@pytest.mark.parametrize("transport", OPERATIONS)
def test_mismatches_raise_on_every_rank(tmp_path, transport):
    check(tmp_path, transport, 2, cases(transport, 6))


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "size"), [*itertools.product(OPERATIONS, (2, 3))])
def test_fifty_mismatches_raise_on_every_rank(tmp_path, transport, size):
    check(tmp_path, transport, size, cases(transport, 50))
