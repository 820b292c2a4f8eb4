"""The command line, checks and output that benchmarks over a list of problems share."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from measure import Measured, Meter


def exit_unless_close(
    problem: object, side: str, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> None:
    for mine, other in zip(found, expected, strict=True):
        error = (torch.linalg.vector_norm((mine - other).float()) / torch.linalg.vector_norm(other.float())).item()
        if not error < 0.02:
            sys.exit(f"{problem}: {side} and torch differ by {error:.3f}; nothing was timed")


def print_speedups(problem: object, found: Measured) -> None:
    for name, r in found.versus.items():
        print(f"{problem}: weft {found.ms:.1f} ms, {name} / weft {1 / r.ratio:.2f}", end="")
        print(f" [{1 / r.interval[1]:.2f}, {1 / r.interval[0]:.2f}]  kept {found.kept} of {found.rounds}", flush=True)


def main(
    description: str | None,
    problems: Callable[[torch.dtype], Sequence[Any]],
    measure: Callable[[Any, Meter], dict[str, object]],
) -> None:
    """Measures each problem of a dtype as the command line says."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one problem")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write the rows to this file")
    a = parser.parse_args()
    meter = Meter(a.threads, a.rounds, 3 * a.rounds)
    chosen = problems(getattr(torch, a.dtype))
    rows = [measure(p, meter) for p in (chosen[:1] if a.quick else chosen)]
    if a.json:
        with open(a.json, "w") as file:
            json.dump(rows, file, indent=1)
