"""Speedup of `torchweft.prepack`: GEMMs that pack the weight in each call, against GEMMs with a frozen, packed weight.

    python benchmarks/python/packed_weights.py                           one thread and two
    python benchmarks/python/packed_weights.py --rows 1024 --threads 1   one number of rows

Both sides run interleaved in one process (measure.py). A ratio above 1 is a speedup.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measure import Meter

import torchweft
from torchweft import ops

HIDDEN, INNER = 1024, 4096


@torch.no_grad()
def time_gemm(meter: Meter, rows: int, k: int, n: int) -> str:
    x = torch.randn(rows, k).bfloat16()
    packed, frozen = (ops.Linear(k, n, bias=False, dtype=torch.bfloat16) for _ in range(2))
    torchweft.prepack(frozen)
    found = meter.measure({"packed": lambda: packed(x), "frozen": lambda: frozen(x)}, control="packed")
    gain = found.versus["frozen"]
    load = Path("/proc/loadavg").read_text().split()[0]
    return (
        f"| {meter.threads} | {rows} | {k} × {n} | {found.ms:.2f} | {gain.ms:.2f} | "
        f"{gain.ratio:.2f} [{gain.interval[0]:.2f}, {gain.interval[1]:.2f}] | "
        f"{found.control:.2f} | {found.kept} of {found.rounds} | {load} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 128, 256, 1024, 4096])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    print("| threads | rows | K × N | packed, ms | frozen, ms | packed / frozen | control | rounds kept | load |")
    print("|---|---|---|---|---|---|---|---|---|")
    for threads in args.threads:
        meter = Meter(threads=threads)
        for rows in args.rows:
            for k, n in ((HIDDEN, INNER), (INNER, HIDDEN)):
                print(time_gemm(meter, rows, k, n), flush=True)


if __name__ == "__main__":
    main()
