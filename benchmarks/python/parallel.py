"""The MLP of a transformer block with tensor and sequence parallelism, forward and backward, on ranks of this machine.

    python benchmarks/python/parallel.py                   overlapped where predicted to be faster, plain collectives,
                                                           and the local work without communication; 128 to 2048 tokens
    python benchmarks/python/parallel.py --planner         few and many rows, this host and networks of 0.3 to 3 Gb/s:
                                                           overlap=None, which must stay within 1.02 of plain
    python benchmarks/python/parallel.py --gather          forward of a linear that gathers its input over 1 Gb/s,
                                                           overlapped: in bfloat16 over quantized, time and bytes sent
    python benchmarks/python/parallel.py --check-cost      plain collectives with WEFT_CHECK=always and without checks
    python benchmarks/python/parallel.py --quick           one small shape
    python benchmarks/python/parallel.py --json FILE       also as JSON

Each rank is a process with one thread; networks are namespaces on this host and require root. A round runs every side
once and then again in reverse; a side's time is that of its slowest rank. A round counts only if the GEMMs at its start
and end took equally long, within 10 %. Ratios are medians over rounds with a bootstrap interval; the control is the
time of the last GEMM over the first. tools/claims.py compares with the bounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from measure import bootstrap

import torchweft
from torchweft import ops

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "dist"))
import netns  # noqa: E402

SAME = 0.10  # maximum relative difference of the anchors of a counted round
TOKENS, FEW_AND_MANY, QUICK_TOKENS = (128, 512, 1024, 2048), (16, 64, 128, 256, 512), (256,)
RATES = (None, 0.3, 1.0, 3.0)  # Gb/s; None: this host
BOUND = 1.02  # for --planner
GATHERED = {
    "current": torchweft.recipe.Float8CurrentScaling(),
    "block": torchweft.recipe.Float8BlockScaling(),
    "MXFP8": torchweft.recipe.MXFP8BlockScaling(),
    "NVFP4": torchweft.recipe.NVFP4BlockScaling(),
}
GATHER_FEATURES = 32  # few outputs, so that the gather takes most of the time
GATHER_SPEEDUP, GATHER_BYTES = 1.7, 0.53


def block(hidden: int, group: dist.ProcessGroup | None, overlap: bool | None) -> ops.Sequential:
    """y = x + W2 gelu(W1 rms_norm(x)). Without a group: this rank's share of the GEMMs, without communication."""
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


def gathering_forward(recipe: torchweft.recipe.Recipe | None, rows: int, hidden: int) -> Callable[[], None]:
    parallel = {"tensor_parallel_mode": "column", "tensor_parallel_group": dist.group.WORLD, "sequence_parallel": True}
    linear = ops.Linear(hidden, GATHER_FEATURES, bias=False, dtype=torch.bfloat16, overlap=True, **parallel)
    x = torch.randn(rows, hidden).to(torch.bfloat16)

    def run() -> None:
        with torch.no_grad(), torchweft.autocast(recipe is not None, recipe=recipe):
            linear(x)

    return run


def bytes_sent(side: Callable[[], None]) -> int:
    """Returns the bytes that leave this host in a pass."""
    counter = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics/tx_bytes")
    dist.barrier()
    before = int(counter.read_text())
    side()
    dist.barrier()  # a rank may return before all of its bytes have left
    return int(counter.read_text()) - before


def time_per_pass(side: Callable[[], object], passes: int) -> float:
    """Returns the seconds of one pass on the slowest rank; all ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(passes):
        side()
    spent = torch.tensor([(time.perf_counter() - start) / passes])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def steady(before: float, after: float) -> bool:
    return abs(before - after) <= SAME * min(before, after)


def sides_of(mode: str, tokens: int, hidden: int) -> dict[str, Callable[[], None]]:
    """Returns the sides; the first is compared with the others."""
    rows, world = tokens // dist.get_world_size(), dist.group.WORLD
    if mode == "gather":
        recipes = {"bfloat16": None, **GATHERED}
        return {name: gathering_forward(recipe, rows, hidden) for name, recipe in recipes.items()}
    if mode == "check":
        sides = {}
        for check in ("always", "first"):
            os.environ["WEFT_CHECK"] = check
            sides[check] = training_pass(block(hidden, dist.new_group(), False), rows, hidden)
            for _ in range(30):  # `first` stops checking after 100 collectives
                sides[check]()
        return sides
    sides = {
        "overlapped": training_pass(block(hidden, world, None), rows, hidden),
        "plain": training_pass(block(hidden, world, False), rows, hidden),
    }
    if mode == "block":
        sides["local"] = training_pass(block(hidden, None, None), tokens, hidden)  # all rows, this rank's columns
    return sides


def time_shape(mode: str, tokens: int, hidden: int, rounds: int) -> dict[str, object]:
    a, b = torch.randn(512, 512).to(torch.bfloat16), torch.randn(512, 512).to(torch.bfloat16)
    sides = sides_of(mode, tokens, hidden)
    passes = {}
    for name, side in sides.items():
        time_per_pass(side, 3)
        passes[name] = max(1, round(0.02 / time_per_pass(side, 1)))
    kept: list[dict[str, float]] = []
    controls: list[float] = []
    for _ in range(4 * rounds):
        before = time_per_pass(lambda: torch.mm(a, b), 40)
        spent = {name: time_per_pass(side, passes[name]) for name, side in sides.items()}
        for name in reversed(sides):
            spent[name] = (spent[name] + time_per_pass(sides[name], passes[name])) / 2
        after = time_per_pass(lambda: torch.mm(a, b), 40)
        if steady(before, after):
            kept.append(spent)
            controls.append(after / before)
        if len(kept) == rounds:
            break
    row: dict[str, object] = {"tokens": tokens, "hidden": hidden, "ranks": dist.get_world_size(), "kept": len(kept)}
    if not kept:
        return row
    first, *others = sides
    row["control"] = statistics.median(controls)
    row["ms"] = {name: statistics.median(k[name] for k in kept) * 1e3 for name in sides}
    ratios = {other: [k[first] / k[other] for k in kept] for other in others}
    row["ratio"] = {other: statistics.median(values) for other, values in ratios.items()}
    row["interval"] = {other: bootstrap(values) for other, values in ratios.items()}
    if mode == "gather":
        row["bytes"] = {name: min(bytes_sent(side) for _ in range(5)) for name, side in sides.items()}
    return row


def run_rank(size: int, measure: Callable[[], list[dict]]) -> None:
    """Joins the ranks, with one thread on one core, and stores the rows that they measure together."""
    torch.set_num_threads(1)
    rank, cores = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    store = dist.FileStore(os.environ["STORE"], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    rows = measure()
    if rank == 0:
        Path(os.environ["RESULT"]).write_text(json.dumps(rows))
    dist.destroy_process_group()


@contextlib.contextmanager
def hosts(rate: float | None, ranks: int) -> Iterator[list[list[str]]]:
    """Yields the start of each rank's command."""
    if rate is None:
        yield [[] for _ in range(ranks)]
        return
    with netns.two_hosts(rate) as found:
        settings = [
            "WEFT_TRANSPORT=ucx",
            "WEFT_UCX_TRUSTED=1",
        ]  # only the ranks can reach the network of the namespaces
        yield [[*host, f"GLOO_SOCKET_IFNAME={host[-1].partition('=')[2]}", *settings] for host in found]


def start_ranks(command: list[str], ranks: int, rate: float | None, **environment: str) -> list[dict]:
    """Runs a command on each rank and returns the rows that run_rank() stores."""
    with tempfile.TemporaryDirectory() as folder, hosts(rate, ranks) as starts:
        shared = {**os.environ, "STORE": f"{folder}/store", "RESULT": f"{folder}/rows.json", "OMP_NUM_THREADS": "1"}
        shared |= environment
        started = [subprocess.Popen([*s, *command], env={**shared, "RANK": str(r)}) for r, s in enumerate(starts)]
        if any(rank.wait() for rank in started):
            sys.exit("a rank failed")
        return [{"ranks": ranks, "rate": rate, **row} for row in json.loads(Path(shared["RESULT"]).read_text())]


def measure_on_ranks(args: argparse.Namespace, rate: float | None) -> list[dict]:
    command = [sys.executable, __file__, "--ranks", str(args.ranks), "--hidden", str(args.hidden)]
    command += ["--mode", args.mode, "--rounds", str(args.rounds), "--tokens", *map(str, args.tokens)]
    check = {"WEFT_CHECK": "always"} if args.mode == "planner" else {}  # as the transports do
    return start_ranks(command, args.ranks, rate, **check)


def figures_of(row: dict, mode: str) -> list[dict[str, object]]:
    """Returns the ratios of a row, or why there are none; only those of --planner and --gather have bounds."""
    where = "this host" if row["rate"] is None else f"{row['rate']} Gb/s"
    what = f"{row['tokens']} tokens x {row['hidden']}, {row['ranks']} ranks, {where}"
    if not row["kept"]:
        return [{"name": what, "kept": 0, "skipped": "no round was steady"}]
    name = {"planner": "planned", "check": "WEFT_CHECK=always"}.get(mode, next(iter(row["ms"])))
    shared = {"control": row["control"], "kept": row["kept"], "at_most": BOUND if mode == "planner" else None}
    if mode == "gather":
        shared["at_least"] = GATHER_SPEEDUP
    found = [
        {"name": f"{what}: {name} / {other}", "value": ratio, "interval": row["interval"][other], **shared}
        for other, ratio in row["ratio"].items()
    ]
    sent = row.get("bytes", {})
    return found + [
        {"name": f"{what}: bytes of {other} / bfloat16", "value": round(sent[other] / sent["bfloat16"], 3)}
        | {"at_most": GATHER_BYTES, "exact": True}
        for other in sent
        if other != "bfloat16"
    ]


def show(row: dict) -> None:
    if not row["kept"]:
        print(f"{row['figures'][0]['name']}: no round was steady", flush=True)
        return
    times = ", ".join(f"{side} {ms:.2f} ms" for side, ms in row["ms"].items())
    ratios = ", ".join(f"{f['name']} {f['value']:.2f}" + (f" [{f['interval'][0]:.2f}, {f['interval'][1]:.2f}]"
                       if "interval" in f else "") for f in row["figures"])  # fmt: skip
    print(f"{ratios}; {times} (kept {row['kept']}, control {row['control']:.3f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens of all ranks together")
    parser.add_argument("--hidden", type=int, help="default: 1024, with --gather 4096")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rates", type=float, nargs="+", help="network rates of --planner in Gb/s")
    parser.add_argument("--planner", dest="mode", action="store_const", const="planner", default="block")
    parser.add_argument("--gather", dest="mode", action="store_const", const="gather")
    parser.add_argument("--check-cost", dest="mode", action="store_const", const="check")
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.hidden = args.hidden or (4096 if args.mode == "gather" else 1024)
    if args.quick:
        args.tokens, args.rounds = args.tokens or QUICK_TOKENS, 9
        args.hidden = args.hidden if args.mode == "gather" else 512
    args.tokens = args.tokens or {"planner": FEW_AND_MANY, "check": (256,), "gather": (1024,)}.get(args.mode, TOKENS)
    if "RANK" in os.environ and "RESULT" in os.environ:
        return run_rank(
            args.ranks, lambda: [time_shape(args.mode, tokens, args.hidden, args.rounds) for tokens in args.tokens]
        )
    rates: list[float | None] = [1.0 if args.mode == "gather" else None]
    if args.mode == "planner":
        rates = list(args.rates or ((None, 1.0) if args.quick else RATES))
    rows: list[dict] = []
    why = netns.unavailable_reason() if any(rates) else ""
    for rate in rates:
        if rate and why:
            print(f"{rate} Gb/s skipped: {why}")
            rows.append({"rate": rate, "figures": [{"name": f"{rate} Gb/s", "skipped": why}]})
            continue
        for row in measure_on_ranks(args, rate):
            row["figures"] = figures_of(row, args.mode)
            show(row)
            rows.append(row)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
