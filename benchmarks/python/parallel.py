"""A transformer block's MLP half under tensor and sequence parallelism, forward and backward, on ranks of this machine:
overlapped, by plain collectives, and the same local work without any communication.

    python benchmarks/python/parallel.py                          two ranks, 128 to 2048 tokens
    python benchmarks/python/parallel.py --quick                  one small shape
    python benchmarks/python/parallel.py --tokens 512 --hidden 1024 --ranks 4
    python benchmarks/python/parallel.py --json FILE              also as JSON

Each rank is a process with one thread. A round runs every side once and then again in reverse; a side's time is that of
its slowest rank. A round counts only if the bare product that opens and closes it took equally long, within 10 %, on
every rank. Ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from weft import ops

SAME = 0.10  # how much the anchors of a counted round may differ
TOKENS, QUICK_TOKENS = (128, 512, 1024, 2048), (256,)


def block(hidden: int, group: dist.ProcessGroup | None, overlap: bool | None) -> ops.Sequential:
    """y = x + W2 gelu(W1 rms_norm(x)). Without a group: this rank's part of the products, and nothing sent."""
    torch.manual_seed(0)
    size = dist.get_world_size()
    inner = 4 * hidden if group else 4 * hidden // size
    shared = {"bias": False, "dtype": torch.bfloat16}
    parallel = {"tensor_parallel_group": group, "sequence_parallel": True, "overlap": overlap} if group else {}
    modes = ({"tensor_parallel_mode": "column"}, {"tensor_parallel_mode": "row"}) if group else ({}, {})
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(hidden, dtype=torch.bfloat16),
        ops.Linear(hidden, inner, **shared, **parallel, **modes[0]),
        ops.GELU(),
        ops.Linear(inner, hidden, **shared, **parallel, **modes[1]),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


def training_pass(module: torch.nn.Module, rows: int, hidden: int) -> Callable[[], None]:
    x = torch.randn(rows, hidden).to(torch.bfloat16).requires_grad_()
    dy = torch.randn(rows, hidden).to(torch.bfloat16)
    held = [x, *module.parameters()]

    def run() -> None:
        for t in held:
            t.grad = None
        module(x).backward(dy)

    return run


def spend(side: Callable[[], object], passes: int) -> float:
    """Seconds of one pass on the slowest rank; all ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(passes):
        side()
    spent = torch.tensor([(time.perf_counter() - start) / passes])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def steady(before: float, after: float) -> bool:
    return abs(before - after) <= SAME * min(before, after)


def time_shape(tokens: int, hidden: int, rounds: int) -> dict[str, object]:
    size, group = dist.get_world_size(), dist.group.WORLD
    a, b = torch.randn(512, 512).to(torch.bfloat16), torch.randn(512, 512).to(torch.bfloat16)
    sides = {
        "overlapped": training_pass(block(hidden, group, None), tokens // size, hidden),
        "plain": training_pass(block(hidden, group, False), tokens // size, hidden),
        "local": training_pass(block(hidden, None, None), tokens, hidden),  # all rows, this rank's columns
    }
    passes = {}
    for name, side in sides.items():
        spend(side, 3)
        passes[name] = max(1, round(0.02 / spend(side, 1)))
    kept: list[dict[str, float]] = []
    for _ in range(4 * rounds):
        before = spend(lambda: torch.mm(a, b), 40)
        spent = {name: spend(side, passes[name]) for name, side in sides.items()}
        for name in reversed(sides):
            spent[name] = (spent[name] + spend(sides[name], passes[name])) / 2
        if steady(before, spend(lambda: torch.mm(a, b), 40)):
            kept.append(spent)
        if len(kept) == rounds:
            break
    median = {name: statistics.median(k[name] for k in kept) * 1e3 for name in sides} if kept else {}
    ratio = {
        other: statistics.median(k["overlapped"] / k[other] for k in kept) if kept else None
        for other in ("plain", "local")
    }
    return {"tokens": tokens, "hidden": hidden, "ranks": size, "ms": median, "ratio": ratio, "kept": len(kept)}


def be_a_rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), arguments.ranks
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    store = dist.FileStore(os.environ["STORE"], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    rows = [time_shape(tokens, arguments.hidden, arguments.rounds) for tokens in arguments.tokens]
    if rank == 0:
        Path(os.environ["RESULT"]).write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


def start_ranks(arguments: argparse.Namespace) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        shared = {**os.environ, "STORE": f"{folder}/store", "RESULT": f"{folder}/rows.json", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--ranks", str(arguments.ranks), "--hidden", str(arguments.hidden)]
        command += ["--rounds", str(arguments.rounds), "--tokens", *map(str, arguments.tokens)]
        ranks = [subprocess.Popen(command, env={**shared, "RANK": str(r)}) for r in range(arguments.ranks)]
        if any(rank.wait() for rank in ranks):
            sys.exit("a rank failed")
        return json.loads(Path(shared["RESULT"]).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", help="of all ranks together")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tokens, arguments.hidden, arguments.rounds = arguments.tokens or QUICK_TOKENS, 512, 5
    arguments.tokens = arguments.tokens or TOKENS
    if "RANK" in os.environ and "RESULT" in os.environ:
        return be_a_rank(arguments)
    rows = start_ranks(arguments)
    for row in rows:
        if not row["kept"]:
            print(f"{row['tokens']} tokens: no round was steady")
            continue
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in row["ms"].items())
        print(
            f"{row['tokens']} tokens x {row['hidden']}, {row['ranks']} ranks: {times}; "
            f"overlapped / plain {row['ratio']['plain']:.2f}, / local {row['ratio']['local']:.2f} (kept {row['kept']})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
