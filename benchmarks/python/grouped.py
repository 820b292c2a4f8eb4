"""SwiGLU MLP of a mixture of experts, forward and backward into float32 main_grad: weft, a loop over experts in eager
torch, and torch._grouped_mm.

    python benchmarks/python/grouped.py                times of 32 experts, several splits, bf16
    python benchmarks/python/grouped.py --quick        one of them
    python benchmarks/python/grouped.py --memory       peak memory and allocations of a step instead
    python benchmarks/python/grouped.py --host         64 tiny experts: overhead of a step
    python benchmarks/python/grouped.py --json FILE    also as JSON

All sides run interleaved in one process (measure.py); tools/claims.py compares with the bounds. Exits with 1 if results
are wrong.
y_r = W2 (p_r·silu(a)·b), (a, b) = W1 x_r, with the weights of row r's expert.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from measure import Meter, bootstrap
from memory import peak_bytes

from torchweft import ops

MIN_SPEEDUP = 3.0  # time of the eager loop / weft
MAX_PEAK_RATIO = 0.6  # peak memory of weft / the eager loop
MAX_HOST_MICROSECONDS = 100  # time of a step of tiny experts
MAX_BARE_NODE_RATIO = 1.15  # time of such a step with many Parameters / an empty autograd node with as many


class Problem(NamedTuple):
    name: str
    splits: list[int]
    hidden: int
    inner: int

    @property
    def experts(self) -> int:
        return len(self.splits)

    @property
    def rows(self) -> int:
        return sum(self.splits)

    def __str__(self) -> str:
        return f"{self.name} {self.experts} experts, {self.rows} rows, {self.hidden}x{self.inner}"


def zipf(experts: int, rows: int) -> list[int]:
    shares = [1 / (i + 1) for i in range(experts)]
    sizes = [int(rows * share / sum(shares)) for share in shares]
    sizes[0] += rows - sum(sizes)
    return sizes


PROBLEMS = [
    Problem("even", [32] * 32, 512, 512),
    Problem("even", [128] * 32, 512, 512),
    Problem("zipf", zipf(32, 1024), 512, 512),
]


class Weights:
    """W1 and W2 of all experts with main_grad, each as one stacked Parameter and as one Parameter per expert."""

    def __init__(self, p: Problem, dtype: torch.dtype = torch.bfloat16) -> None:
        torch.manual_seed(0)
        shapes = ((2 * p.inner, p.hidden), (p.hidden, p.inner))
        self.packed = [
            torch.nn.Parameter((torch.randn(p.experts, *shape) / shape[1] ** 0.5).to(dtype)) for shape in shapes
        ]
        for weight in self.packed:
            weight.main_grad = torch.zeros(weight.shape)
        self.members = [[torch.nn.Parameter(w) for w in weight.detach()] for weight in self.packed]
        for weight, members in zip(self.packed, self.members, strict=True):
            for member, main_grad in zip(members, weight.main_grad, strict=True):
                member.main_grad = main_grad


def by_weft(p: Problem, weights: Weights) -> Callable[..., torch.Tensor]:
    dtype = weights.packed[0].dtype
    options = {"bias": False, "dtype": dtype, "accumulate_into_main_grad": True, "single_grouped_weight": True}
    mlp = ops.Sequential(
        ops.GroupedLinear(p.experts, p.hidden, 2 * p.inner, **options),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(p.experts, p.inner, p.hidden, **options),
    )
    mlp[0].weight, mlp[2].weight = weights.packed
    splits = torch.tensor(p.splits)

    def step(x: torch.Tensor, probs: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        y = mlp(x, splits, probs, splits)
        y.backward(dy)
        return y

    return step


def by_loop(p: Problem, weights: Weights) -> Callable[..., torch.Tensor]:
    first, last = weights.members

    def step(x: torch.Tensor, probs: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        parts = []
        for rows, scales, up, down in zip(x.split(p.splits), probs.split(p.splits), first, last, strict=True):
            a, b = (rows @ up.t()).chunk(2, -1)
            parts.append((torch.nn.functional.silu(a) * b * scales[:, None]).to(x.dtype) @ down.t())
        y = torch.cat(parts)
        y.backward(dy)
        add_to_main_grad([*first, *last])
        return y

    return step


def by_grouped_mm(p: Problem, weights: Weights) -> Callable[..., torch.Tensor]:
    up, down = weights.packed
    offsets = torch.tensor(p.splits).cumsum(0).to(torch.int32)

    def step(x: torch.Tensor, probs: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        a, b = torch._grouped_mm(x, up.transpose(1, 2), offs=offsets).chunk(2, -1)
        z = (torch.nn.functional.silu(a) * b * probs[:, None]).to(x.dtype)
        y = torch._grouped_mm(z, down.transpose(1, 2), offs=offsets)
        y.backward(dy)
        add_to_main_grad([up, down])
        return y

    return step


def add_to_main_grad(weights: list[torch.nn.Parameter]) -> None:
    for w in weights:
        w.main_grad.add_(w.grad)
        w.grad = None


def sides(p: Problem, weights: Weights) -> dict[str, Callable[[], torch.Tensor]]:
    """Returns a training step of each side. Gradients of x and of the probabilities are reset each time."""
    x = torch.randn(p.rows, p.hidden).to(weights.packed[0].dtype).requires_grad_()
    probs, dy = torch.rand(p.rows).requires_grad_(), torch.randn(p.rows, p.hidden).to(x.dtype)

    def pass_of(step: Callable[..., torch.Tensor]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            x.grad = probs.grad = None
            return step(x, probs, dy)

        return run

    makers = {"weft": by_weft, "loop": by_loop, "_grouped_mm": by_grouped_mm}
    return {name: pass_of(make(p, weights)) for name, make in makers.items()}


def check(p: Problem, weights: Weights, runs: dict[str, Callable[[], torch.Tensor]]) -> None:
    found = {}
    for name, run in runs.items():
        for weight in weights.packed:
            weight.main_grad.zero_()
        y = run()
        found[name] = [y.detach().float(), *(weight.main_grad.clone() for weight in weights.packed)]
    for mine, other in zip(found["weft"], found["loop"], strict=True):
        error = (torch.linalg.vector_norm(mine - other) / torch.linalg.vector_norm(other)).item()
        if not error < 0.02:
            sys.exit(f"{p}: weft and the loop differ by {error:.3f}; nothing was timed")


def time_problem(p: Problem, meter: Meter) -> dict[str, object]:
    weights = Weights(p)
    runs = sides(p, weights)
    check(p, weights, runs)
    found = meter.measure(runs, control="loop")
    for name, r in found.versus.items():
        print(f"{p}: weft {found.ms:.2f} ms, {name} / weft {1 / r.ratio:.2f}", end="")
        print(f" [{1 / r.interval[1]:.2f}, {1 / r.interval[0]:.2f}]  kept {found.kept} of {found.rounds}", flush=True)
    figures = [found.inverse(f"{p}: {name} / weft", name, MIN_SPEEDUP) for name in found.versus]
    return {"problem": str(p), "threads": meter.threads, **asdict(found), "figures": figures}


def allocations(run: Callable[[], object]) -> int:
    """Returns the number of allocations in a step, after a few warm-up steps."""
    for _ in range(3):
        run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    memory = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return sum(e.nbytes() > 0 for e in memory)


def measure_memory(p: Problem) -> dict[str, object]:
    runs = sides(p, Weights(p))
    peaks = {name: peak_bytes(run) for name, run in runs.items()}
    few = Problem(p.name, [p.rows // 4] * 4, p.hidden, p.inner)
    counts = [allocations(sides(q, Weights(q))["weft"]) for q in (few, p)]
    ratio = peaks["weft"] / peaks["loop"]
    print(f"{p}: peak {peaks['weft'] / 2**20:.1f} MiB, loop {peaks['loop'] / 2**20:.1f} MiB, ratio {ratio:.2f}")
    print(f"{p}: allocations in a step {counts[1]}, with 4 experts {counts[0]}", flush=True)
    figures = [
        {"name": f"{p}: peak / loop", "value": ratio, "at_most": MAX_PEAK_RATIO, "exact": True},
        {"name": f"{p}: allocations", "value": counts[1], "at_most": counts[0], "exact": True},
    ]
    return {"problem": str(p), "peak": ratio, "allocations": counts, "figures": figures}


def overhead_over_bare_node() -> dict[str, object]:
    """Returns the time of a step with 128 separate Parameters over that of an empty autograd node with as many leaves,
    in C++. A round is bare, weft, weft, bare; the control is the second time of the empty node over the first."""
    driver = Path(__file__).parents[2] / "build/release/weft_bench"

    def time_per_pass(variant: str) -> float:
        done = subprocess.run([driver, "framework", "experts", variant], capture_output=True, text=True, check=True)
        return float(done.stdout.split()[-1])

    rounds = [[time_per_pass(variant) for variant in ("bare", "weft", "weft", "bare")] for _ in range(11)]
    ratios = [(a + b) / (first + last) for first, a, b, last in rounds]
    found = {"value": statistics.median(ratios), "interval": bootstrap(ratios)}
    control = statistics.median(last / first for first, _, _, last in rounds)
    figure = {
        "name": "128 Parameters / bare node",
        **found,
        "control": control,
        "kept": len(rounds),
        "at_most": MAX_BARE_NODE_RATIO,
    }
    print(f"{figure['name']} {figure['value']:.2f}, control {control:.3f}", flush=True)
    return figure


def microseconds(p: Problem, dtype: torch.dtype, meter: Meter) -> dict[str, object]:
    """Returns the time of a step of weft. The control is the second half of the samples over the first."""
    run = sides(p, Weights(p, dtype))["weft"]
    meter.time_per_pass(run, 200)
    samples = [meter.time_per_pass(run, 200) * 1e6 for _ in range(22)]
    control = statistics.median(samples[11:]) / statistics.median(samples[:11])
    found = {"value": statistics.median(samples), "interval": bootstrap(samples), "control": control}
    figure = {"name": f"{p} {str(dtype)[6:]} µs", **found, "kept": len(samples), "at_most": MAX_HOST_MICROSECONDS}
    print(f"{figure['name']} {figure['value']:.0f} forward and backward, control {control:.3f}", flush=True)
    return figure


def host_cost(meter: Meter) -> dict[str, object]:
    p = Problem("tiny", [2] * 64, 16, 16)
    steps = [microseconds(p, dtype, meter) for dtype in (torch.float32, torch.bfloat16)]
    return {"problem": str(p), "figures": [*steps, overhead_over_bare_node()]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one problem")
    parser.add_argument("--memory", action="store_true", help="bytes instead of times")
    parser.add_argument("--host", action="store_true", help="64 tiny experts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write the rows to this file")
    a = parser.parse_args()
    meter = Meter(a.threads, a.rounds, 3 * a.rounds)
    if a.host:
        rows = [host_cost(meter)]
    else:
        problems = PROBLEMS[:1] if a.quick else PROBLEMS
        rows = [measure_memory(p) if a.memory else time_problem(p, meter) for p in problems]
    if a.json:
        with open(a.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
