"""The cost model of docs/overlap.md against measurement: forward of tensor-parallel linears with sequence parallelism.

    python benchmarks/python/cost_model.py              20 shapes: 2 and 4 ranks of this host, 2 ranks over 1 Gb/s
    python benchmarks/python/cost_model.py --quick      2 ranks of this host
    python benchmarks/python/cost_model.py --json FILE  also as JSON

The measured time is the median of the calls of the slowest rank, as `explain()` reports it; the prediction was made
before the first call. Each rank is a process with one thread, on a core of its own as far as there are cores; networks
are namespaces on this host and require root. A model is good enough if 18 of 20 predictions are within 15 %.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from parallel import run_rank, start_ranks

import torchweft
from torchweft import ops

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "dist"))
import netns  # noqa: E402

CLOSE, SHARE = 0.15, 0.9
CALLS = 15
COLUMNS = ["ranks", "linear", "chosen", "predicted", "measured", "off by"]
# mode of the linear, tokens of all ranks, input features, output features
SHAPES = {
    (2, None): [
        ("column", 512, 512, 2048),
        ("column", 1024, 1024, 4096),
        ("column", 2048, 1024, 1024),
        ("column", 2048, 512, 512),
        ("row", 512, 2048, 512),
        ("row", 1024, 4096, 1024),
        ("row", 2048, 1024, 1024),
    ],
    (4, None): [
        ("column", 512, 1024, 4096),
        ("column", 1024, 1024, 2048),
        ("column", 2048, 512, 2048),
        ("row", 512, 4096, 1024),
        ("row", 1024, 2048, 1024),
        ("row", 2048, 2048, 512),
    ],
    (2, 1.0): [
        ("column", 512, 512, 2048),
        ("column", 1024, 1024, 4096),
        ("column", 2048, 1024, 1024),
        ("column", 1024, 2048, 2048),
        ("row", 512, 2048, 512),
        ("row", 1024, 4096, 1024),
        ("row", 2048, 1024, 1024),
    ],
}


def predicted_and_measured(mode: str, tokens: int, features: int, outputs: int) -> dict[str, object]:
    """Returns the milliseconds of a shape, and the decision."""
    size = dist.get_world_size()
    parallel = {"tensor_parallel_mode": mode, "tensor_parallel_group": dist.group.WORLD, "sequence_parallel": True}
    linear = ops.Linear(features, outputs, bias=False, dtype=torch.bfloat16, **parallel)
    shape = (tokens // size, features) if mode == "column" else (tokens, features // size)
    x = torch.randn(shape).to(torch.bfloat16)
    predicted, times, text = 0.0, [], ""
    for _ in range(CALLS):
        dist.barrier()
        with torch.no_grad():
            linear(x)
            text = str(torchweft.explain(linear, x))
        found = re.search(r"rows: (\w+).*predicted ([\d.]+) ms.*took ([\d.]+) ms", text)
        assert found, text
        predicted, text = float(found[2]), found[1]
        times.append(float(found[3]))
    slowest = torch.tensor([statistics.median(times[3:])])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {"decision": text, "predicted_ms": predicted, "measured_ms": round(slowest.item(), 3)}


def measure(ranks: int, rate: float | None) -> list[dict]:
    rows = []
    for mode, tokens, features, outputs in SHAPES[ranks, rate]:
        found = predicted_and_measured(mode, tokens, features, outputs)
        rows.append({"mode": mode, "tokens": tokens, "features": features, "outputs": outputs, **found})
    return rows


def core_gflops() -> float:
    """Returns the speed of one core in a linear of 1,024 tokens, 1,024 x 4,096."""
    torch.set_num_threads(1)
    linear = ops.Linear(1024, 4096, bias=False, dtype=torch.bfloat16)
    x = torch.randn(1024, 1024).to(torch.bfloat16)
    times = []
    with torch.no_grad():
        for _ in range(10):
            start = time.perf_counter()
            linear(x)
            times.append(time.perf_counter() - start)
    return 2 * 1024 * 1024 * 4096 / statistics.median(times) / 1e9


def cells(row: dict) -> list[str]:
    where = "this host" if row["rate"] is None else f"{row['rate']:g} Gb/s"
    shape = f"{row['mode']}, {row['tokens']} x {row['features']} to {row['outputs']}"
    times = (f"{row[name]:.2f} ms" for name in ("predicted_ms", "measured_ms"))
    return [f"{row['ranks']}, {where}", shape, row["decision"], *times, f"{row['error']:+.0%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ranks:
        return run_rank(arguments.ranks, lambda: measure(arguments.ranks, arguments.rate))
    rows: list[dict] = []
    for ranks, rate in [(2, None)] if arguments.quick else SHAPES:
        if rate and (why := netns.unavailable_reason()):
            print(f"{rate} Gb/s skipped: {why}")
            continue
        command = [sys.executable, __file__, "--ranks", str(ranks), *(["--rate", str(rate)] if rate else [])]
        for row in start_ranks(command, ranks, rate):
            row["error"] = round(row["predicted_ms"] / row["measured_ms"] - 1, 3)
            print(" | ".join(cells(row)), flush=True)
            rows.append(row)
    close = sum(abs(row["error"]) <= CLOSE for row in rows)
    print(f"cost model: {close} of {len(rows)} predictions within {CLOSE:.0%}")
    if arguments.json:
        made = {"date": datetime.date.today().isoformat(), "command": "benchmarks/python/cost_model.py"}
        content = {**made, "core_gflops": round(core_gflops(), 1), "columns": COLUMNS, "rows": [cells(r) for r in rows]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    sys.exit(0 if close >= SHARE * len(rows) else 1)


if __name__ == "__main__":
    main()
