"""What a packed copy of a weight saves: GEMMs whose weight is packed in every call, found in the cache and verified, or
frozen; and training steps with the cache off and on.

    python benchmarks/python/packed_weights.py                     all of it
    python benchmarks/python/packed_weights.py gemm --rows 1024    one table, one number of rows
    python benchmarks/python/packed_weights.py loop --threads 2

All sides run in one process, interleaved (measure.py). A side is the time with packing in every call over the time with
a copy: more than 1 is a gain.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from measure import Meter, Side

import weft
from weft import ops

HIDDEN, INNER = 1024, 4096
LIMIT = 1 << 30


class Warm(Meter):
    """Runs a side `lead` times before it is timed: switching the cache off drops every copy."""

    lead = 1

    def sampled(self, side: Side, passes: int, lead_in: bool) -> float:
        del lead_in
        for _ in range(self.lead):
            side()
        return self.spend(side, passes)


def within(limit: int, run: Callable[[], object]) -> Side:
    def side() -> object:
        if weft.packing_limit() != limit:
            weft.set_packing_limit(limit)
        return run()

    return side


def report(name: str, meter: Meter, sides: dict[str, Side]) -> None:
    found = meter.measure(sides, control="in every call")
    gains = "  ".join(
        f"{other} {r.ratio:.3f} [{r.interval[0]:.3f}, {r.interval[1]:.3f}]" for other, r in found.versus.items()
    )
    load = Path("/proc/loadavg").read_text().split()[0]
    print(
        f"{name}: {found.ms:.2f} ms  {gains}  control {found.control:.3f}  kept {found.kept} of {found.rounds}  "
        f"load {load}",
        flush=True,
    )


def gemms(meter: Warm, rows: int) -> None:
    meter.lead = 4
    for k, n in ((HIDDEN, INNER), (INNER, HIDDEN)):
        x = torch.randn(rows, k).bfloat16()
        linears = [ops.Linear(k, n, bias=False, dtype=torch.bfloat16) for _ in range(3)]
        weft.prepack(linears[2])
        runs = [lambda linear=linear, x=x: linear(x) for linear in linears]
        sides = dict(zip(("in every call", "verified", "frozen"), runs, strict=True))
        with torch.no_grad():
            report(
                f"gemm rows={rows} k={k} n={n} threads={meter.threads}",
                meter,
                {side: within(0 if side == "in every call" else LIMIT, run) for side, run in sides.items()},
            )


def training_step(rows: int, micro_batches: int) -> Side:
    """Forward and backward of an MLP block for each micro-batch, gradients summed in main_grad, then a step of SGD."""
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "bias": False, "accumulate_into_main_grad": True}
    block = ops.Sequential(ops.Linear(HIDDEN, INNER, **options), ops.GELU(), ops.Linear(INNER, HIDDEN, **options))
    weights = list(block.parameters())
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
    x = torch.randn(rows, HIDDEN).bfloat16().requires_grad_()
    dy = torch.randn(rows, HIDDEN).bfloat16()

    def step() -> None:
        for _ in range(micro_batches):
            x.grad = None
            block(x).backward(dy)
        with torch.no_grad():
            for weight in weights:
                weight.add_(weight.main_grad, alpha=-1e-6)
                weight.main_grad.zero_()

    return step


def loops(meter: Warm, rows: int, counts: list[int]) -> None:
    meter.lead = 1
    for count in counts:
        report(
            f"training rows={rows} micro-batches={count} threads={meter.threads}",
            meter,
            {
                "in every call": within(0, training_step(rows, count)),
                "verified": within(LIMIT, training_step(rows, count)),
            },
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("gemm", "loop"))
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256, 1024, 4096])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    for threads in args.threads:
        meter = Warm(threads=threads, rounds=args.rounds, most=2 * args.rounds)
        for rows in args.rows:
            if args.what != "loop":
                gemms(meter, rows)
            if args.what != "gemm":
                loops(meter, rows, args.micro_batches)


if __name__ == "__main__":
    main()
