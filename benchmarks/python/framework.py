"""Forward and backward of tiny modules from Python: weft and eager torch.nn, interleaved in one process.

    python benchmarks/python/framework.py            prints a table
    python benchmarks/python/framework.py --json F   also as JSON

8x8 fp32, one thread, thread CPU time. A round runs A, B, B, A; the ratio of a round is (A + A) / (B + B). The result is
the median over rounds with a bootstrap interval, and a control of eager against itself, which must be 1.
tools/claims.py compares with the bounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch

import torchweft.ops as ops

ROUNDS, PASSES = 41, 60
AT_MOST = {"Linear-GELU-Linear": 0.70}  # relative to eager
AT_MOST_ALONE = 1.05


def linear_gelu_linear() -> tuple[torch.nn.Module, torch.nn.Module]:
    return (
        ops.Sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8)),
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(8, 8)),
    )


PROBLEMS: dict[str, Callable[[], tuple[torch.nn.Module, torch.nn.Module]]] = {
    "Linear-GELU-Linear": linear_gelu_linear,
    "Linear alone": lambda: (ops.Linear(8, 8), torch.nn.Linear(8, 8)),
    "GELU alone": lambda: (ops.GELU(), torch.nn.GELU(approximate="tanh")),
    "LayerNorm alone": lambda: (ops.LayerNorm(8), torch.nn.LayerNorm(8)),
    "RMSNorm alone": lambda: (ops.RMSNorm(8), torch.nn.RMSNorm(8)),
}


def runner(module: torch.nn.Module) -> Callable[[], float]:
    x, g = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)

    def time_passes() -> float:
        start = time.thread_time()
        for _ in range(PASSES):
            module(x).backward(g)
        return time.thread_time() - start

    return time_passes


def ratios(a: Callable[[], float], b: Callable[[], float]) -> list[float]:
    for run in (a, b, a, b):
        run()
    found = []
    for _ in range(ROUNDS):
        first, second, third, fourth = a(), b(), b(), a()
        found.append((first + fourth) / (second + third))
    return found


def interval(values: list[float]) -> tuple[float, float]:
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(500))
    return medians[12], medians[-13]


def measure(name: str) -> dict[str, object]:
    ours, eager = PROBLEMS[name]()
    found = ratios(runner(ours), runner(eager))
    control = statistics.median(ratios(runner(PROBLEMS[name]()[1]), runner(eager)))
    taken = {"value": statistics.median(found), "interval": interval(found), "control": control, "kept": len(found)}
    figure = {"name": name, **taken, "at_most": AT_MOST.get(name, AT_MOST_ALONE)}
    return {"problem": name, "eager_us": runner(eager)() / PASSES * 1e6, "figures": [figure]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("problems", nargs="*", default=list(PROBLEMS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name) for name in arguments.problems]
    for row in rows:
        (figure,) = row["figures"]
        low, high = figure["interval"]
        print(
            f"{row['problem']:20} weft / eager {figure['value']:.3f} [{low:.3f}, {high:.3f}]  "
            f"control {figure['control']:.3f}  eager {row['eager_us']:.1f} us"
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
