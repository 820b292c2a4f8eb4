"""How work is split over many threads: shares by the model of weft/kernels/cpu/gemm_grid.h for 1 to 128 threads, bytes
that the AMX GEMM packs, and the CPU time of a block's step with more threads than cores.

    python benchmarks/python/scaling.py               20 GEMMs; steps of 512 and 2048 rows, 32 threads
    python benchmarks/python/scaling.py --quick       512 rows, nine rounds
    python benchmarks/python/scaling.py --json FILE   also as JSON
    python benchmarks/python/scaling.py --table FILE  only the model's table of docs/kernels.md

Model: cycles, packed and moved bytes of the thread with the largest share, and imbalance, the largest share of the
multiplications / the mean share. Bytes packed are counted on a CPU with AMX. A step is forward and backward of the
block of block.py with GELU, d 1024, bf16; its growth is the process's CPU time with 32 threads / with 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from block import Problem, modules, training_pass
from measure import bootstrap
from results import store

from torchweft import _C

THREADS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128)
ROWS_AND_HIDDEN = [(128, 512), (128, 4096), (512, 768), (512, 2816), (1000, 1408)]
ROWS_AND_HIDDEN += [(2048, 768), (2048, 8192), (4096, 1024), (8192, 512), (8192, 8192)]
GEMMS = [(rows, hidden, wgrad) for wgrad in (False, True) for rows, hidden in ROWS_AND_HIDDEN]
MANY = 32
HIDDEN = 1024


def gemm_shape(rows: int, hidden: int, wgrad: bool) -> tuple[int, int, int]:
    """M, N and K of the first linear of an MLP, or of its weight gradient."""
    return (4 * hidden, hidden, rows) if wgrad else (rows, 4 * hidden, hidden)


def name_of(rows: int, hidden: int, wgrad: bool) -> str:
    return f"{'weight gradient' if wgrad else 'linear'}, {rows} rows, d {hidden}"


# ---- model ----------------------------------------------------------------------------------------------------------


def allows_balance(m: int, n: int, threads: int) -> bool:
    """Whether each thread has 8 blocks of 32 x 32, so that a share can be within 15 % of the mean."""
    return (m // 32) * (n // 32) >= 8 * threads


def model_rows() -> list[dict[str, object]]:
    rows = []
    for problem in GEMMS:
        m, n, k = gemm_shape(*problem)
        one = _C.gemm_grid(m, n, k, 1, problem[2])
        for threads in THREADS:
            found = _C.gemm_grid(m, n, k, threads, problem[2])
            speedup = one["cycles"] / found["cycles"]
            balanced = allows_balance(m, n, threads)
            rows.append(
                {"gemm": name_of(*problem), "threads": threads, "speedup": speedup, "balance": balanced, **found}
            )
    return rows


def print_model(rows: list[dict[str, object]]) -> None:
    print("gemm | threads | grid | imbalance | packed KiB | moved KiB | predicted speedup")
    for r in rows:
        packed, moved = r["packed_bytes"] / 1024, r["moved_bytes"] / 1024
        grid = " x ".join(map(str, r["grid"]))
        print(f"{r['gemm']} | {r['threads']} | {grid} | {r['imbalance']:.2f}", end="")
        print(f" | {packed:.0f} | {moved:.0f} | {r['speedup']:.1f}")


SHOWN = (16, 64, 128)
TABLE_COLUMNS = ["GEMM", *(f"{n} threads: {what}" for n in SHOWN for what in ("grid", "imbalance", "speedup"))]


def table_rows(rows: list[dict[str, object]]) -> list[list[str]]:
    """Returns a row for each GEMM, for tools/make_tables.py."""
    found: dict[str, list[str]] = {}
    for r in rows:
        if r["threads"] in SHOWN:
            cells = [" × ".join(map(str, r["grid"])), f"{r['imbalance']:.2f}", f"{r['speedup']:.1f}"]
            found.setdefault(r["gemm"], []).extend(cells)
    return [[name, *cells] for name, cells in found.items()]


# ---- bytes packed ---------------------------------------------------------------------------------------------------


def packed_bytes(run: Callable[[], object], threads: int) -> int:
    torch.set_num_threads(threads)
    before = _C.gemm_packed_bytes()
    run()
    return _C.gemm_packed_bytes() - before


def packed_ratio() -> float | None:
    """Returns the bytes that a block's step packs with 64 threads / with 1; None without AMX."""
    if _C.machine_tier() != "amx":
        return None
    step = make_steps(512)["weft"]
    return packed_bytes(step, 64) / packed_bytes(step, 1)


# ---- CPU time -------------------------------------------------------------------------------------------------------


def make_steps(rows: int) -> dict[str, Callable[[], object]]:
    p = Problem(rows, HIDDEN, "gelu", torch.bfloat16, main_grad=False)
    x, dy = torch.randn(rows, HIDDEN).bfloat16().requires_grad_(), torch.randn(rows, HIDDEN).bfloat16()
    ours, eager = modules(p)
    return {"weft": training_pass(p, ours, x, dy), "eager": training_pass(p, eager, x, dy)}


def cpu_and_wall(run: Callable[[], object], threads: int) -> tuple[float, float]:
    torch.set_num_threads(threads)
    run()
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return time.process_time() - cpu, time.perf_counter() - wall


def timed_figure(name: str, ratios: list[float], control: float, at_most: float | None = None) -> dict[str, object]:
    value = statistics.median(ratios)
    print(f"{name}: {value:.2f}", flush=True)
    taken = {"value": value, "interval": bootstrap(ratios), "control": control, "kept": len(ratios)}
    return {"name": name, **taken, "at_most": at_most}


def measure_steps(rows: int, rounds: int) -> dict[str, object]:
    """Times each side with 1 and MANY threads, interleaved, and eager again as a control."""
    steps = make_steps(rows)
    growth: dict[str, list[float]] = {name: [] for name in steps}
    against, cpu_control, wall_control = [], [], []
    for _ in range(rounds):
        times = {(name, n): cpu_and_wall(run, n) for n in (1, MANY) for name, run in steps.items()}
        cpu_control.append(cpu_and_wall(steps["eager"], 1)[0] / times["eager", 1][0])
        wall_control.append(cpu_and_wall(steps["eager"], MANY)[1] / times["eager", MANY][1])
        for name in steps:
            growth[name].append(times[name, MANY][0] / times[name, 1][0])
        against.append(times["weft", MANY][1] / times["eager", MANY][1])
    cpu, wall = statistics.median(cpu_control), statistics.median(wall_control)
    relative = [ours / theirs for ours, theirs in zip(growth["weft"], growth["eager"], strict=True)]
    figures = [
        timed_figure(f"{rows} rows, CPU time with {MANY} threads / with 1: weft", growth["weft"], cpu),
        timed_figure(f"{rows} rows, CPU time with {MANY} threads / with 1: eager", growth["eager"], cpu),
        timed_figure(f"{rows} rows: weft's growth / eager's", relative, cpu, at_most=1),
        timed_figure(f"{rows} rows, {MANY} threads: weft / eager", against, wall, at_most=0.65),
    ]
    return {"rows": rows, "figures": figures}


def model_figures(model: list[dict[str, object]]) -> list[dict[str, object]]:
    worst = max(r["imbalance"] for r in model if r["balance"] and r["threads"] >= 16)
    return [{"name": "imbalance, 16 to 128 threads", "value": worst, "at_most": 1.15, "exact": True}]


def packed_figure(packed: float | None) -> dict[str, object]:
    found = {"name": "bytes packed, 64 threads / 1", "value": packed, "at_most": 1.05, "exact": True}
    return {**found, "skipped": "this CPU has no amx"} if packed is None else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 rows, nine rounds")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--table", type=Path, help="write the model's table for 16, 64 and 128 threads, and stop")
    a = parser.parse_args()
    model = model_rows()
    if a.table:
        store(a.table, columns=TABLE_COLUMNS, rows=table_rows(model))
        return
    print_model(model)
    packed = packed_figure(packed_ratio())
    print(f"{packed['name']}: {packed.get('skipped') or packed['value']}")
    rows = [{"model": model, "figures": model_figures(model)}, {"figures": [packed]}]
    rows += [measure_steps(tokens, 9 if a.quick else a.rounds) for tokens in ((512,) if a.quick else (512, 2048))]
    if a.json:
        with open(a.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
