"""Training steps of a GPT: eager torch.nn, torch.compile, weft, and weft under torch.compile.

    python benchmarks/python/gpt.py                              nano, small and llama; both precisions; 1 and 2 threads
    python benchmarks/python/gpt.py nano --precision bf16 --threads 2
    python benchmarks/python/gpt.py tiny --rounds 9 --variants eager weft      seconds, for CI
    python benchmarks/python/gpt.py --json FILE                  also as JSON

A step is forward, backward, gradient clipping and AdamW(fused=True), on new random tokens (gpt_models.py,
gpt_training.py). All variants start from the same parameters and run interleaved in one process (measure.py). Peak
memory and the time to the first step, with an empty compile cache, are taken in a new process for each variant.
tools/claims.py compares with the bounds. Exits with 1 if the variants differ in loss or gradient norm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpt_models import PRESETS
from gpt_training import PRECISIONS, VARIANTS, Step, Training
from measure import Meter, Rounds
from memory import peak_bytes
from results import store

# Bounds of weft's time and peak memory / eager's and / torch.compile's, with bf16 parameters.
LARGE = {"eager": 0.5, "compile": 0.6}
TIME_BOUNDS = {"nano": {"eager": 0.7, "compile": 0.7}, "small": LARGE, "llama": LARGE}
MEMORY_BOUNDS = {"eager": 0.5, "compile": 0.7}
TOLERANCE = {"bf16": 0.01, "main_grad": 0.01, "fp32": 1e-4}  # of loss and gradient norm, relative


class Problem(NamedTuple):
    preset: str
    precision: str
    threads: int

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return PRESETS[self.preset].batch * PRESETS[self.preset].tokens

    def __str__(self) -> str:
        return f"{self.preset} {self.precision} on {self.threads}"

    def training(self, variant: str) -> Training:
        return Training(PRESETS[self.preset], variant, self.precision)


def check_first_steps(p: Problem, steps: dict[str, Step]) -> None:
    """Exits unless all variants have the loss and the gradient norm of the first one."""
    first, *others = steps.items()
    for name, step in others:
        for what in ("loss", "norm"):
            mine, theirs = getattr(step, what), getattr(first[1], what)
            if not abs(mine - theirs) <= TOLERANCE[p.precision] * abs(theirs):
                sys.exit(f"{p}: {what} of the first step is {mine} for {name}, {theirs} for {first[0]}; not timed")


def time_variants(p: Problem, variants: list[str], rounds: int) -> tuple[Rounds, dict[str, Step]]:
    torch._dynamo.reset()  # compiled code is specialized on the number of threads
    meter = Meter(p.threads, rounds, 3 * rounds)
    trainings = {name: p.training(name) for name in variants}
    steps = {name: training.step() for name, training in trainings.items()}
    check_first_steps(p, steps)
    return meter.run_rounds({name: training.step for name, training in trainings.items()}, control=variants[0]), steps


def measure_alone(p: Problem, variant: str) -> dict[str, float]:
    """Returns the time to the first step and the peak memory of a later one; requires a new process."""
    torch.set_num_threads(p.threads)
    training = p.training(variant)
    start = time.perf_counter()
    training.step()
    first = time.perf_counter() - start
    peak = peak_bytes(training.step) - training.gradient_bytes()
    return {"first_step_s": first, "peak_bytes": peak}


def measure_in_new_process(p: Problem, variant: str) -> dict[str, float]:
    command = [sys.executable, __file__, p.preset, "--precision", p.precision, "--threads", str(p.threads)]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        alone = [*command, "--alone", variant]
        done = subprocess.run(alone, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{p}: {variant} failed\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def figures_of(p: Problem, timed: Rounds, variants: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns weft's ratios to the plain variants in the form that tools/verdict.py judges."""
    times, peaks = [], []
    for name in (v for v in variants if v.startswith("weft")):
        bounded = name == "weft" and p.precision == "bf16" and p.preset in TIME_BOUNDS
        for peer in (v for v in variants if not v.startswith("weft")):
            what, ratio = f"{p}: {name} / {peer}", timed.ratio(name, peer)
            taken = {"control": timed.control_ratio(), "kept": timed.kept}
            bound = TIME_BOUNDS[p.preset][peer] if bounded else None
            times.append({"name": what, "value": ratio.ratio, "interval": ratio.interval, **taken, "at_most": bound})
            peak = variants[name]["peak_bytes"] / variants[peer]["peak_bytes"]
            bound = MEMORY_BOUNDS[peer] if bounded else None
            peaks.append({"name": f"{what}, peak memory", "value": peak, "exact": True, "at_most": bound})
    return times + peaks


def measure(p: Problem, variants: list[str], rounds: int) -> dict[str, Any]:
    alone = {name: measure_in_new_process(p, name) for name in variants}
    timed, steps = time_variants(p, variants, rounds)
    found: dict[str, dict[str, Any]] = {}
    for name in variants:
        ms, ratio = timed.ms(name), timed.ratio(name, variants[0])
        rate = {"ms": ms, "tokens_per_s": p.tokens / ms * 1e3, "ratio": ratio.ratio, "interval": ratio.interval}
        found[name] = {**rate, **alone[name], "loss": steps[name].loss, "norm": steps[name].norm}
    quality = {"control": timed.control_ratio(), "kept": timed.kept, "rounds": timed.rounds}
    row = {"problem": str(p), **p._asdict(), "tokens_per_step": p.tokens, "variants": found, **quality}
    return {**row, "figures": figures_of(p, timed, found)}


def show(row: dict[str, Any]) -> None:
    print(f"{row['problem']}: {row['tokens_per_step']} tokens a step, control {row['control']:.3f}, "
          f"kept {row['kept']} of {row['rounds']} rounds")  # fmt: skip
    first = next(iter(row["variants"]))
    print(
        f"  {'':14}{'tokens/s':>10}{'ms/step':>10}{f'time / {first}':>22}{'peak MiB':>10}{'first step':>13}{'loss':>9}"
    )
    for name, v in row["variants"].items():
        ratio = f"{v['ratio']:.2f} [{v['interval'][0]:.2f}, {v['interval'][1]:.2f}]"
        print(f"  {name:14}{v['tokens_per_s']:10.0f}{v['ms']:10.1f}{ratio:>22}{v['peak_bytes'] / 2**20:10.1f}"
              f"{v['first_step_s']:11.1f} s{v['loss']:9.4f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", metavar="preset", help=", ".join(PRESETS))
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["bf16", "main_grad"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="ratios are to the first"
    )
    parser.add_argument("--rounds", type=int, default=21, help="rounds to keep")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--alone", choices=VARIANTS, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if unknown := set(a.presets) - set(PRESETS):
        parser.error(f"unknown preset {', '.join(sorted(unknown))}; known: {', '.join(PRESETS)}")
    presets = a.presets or ["nano", "small", "llama"]
    problems = [Problem(name, how, n) for name in presets for how in a.precision for n in a.threads]
    if a.alone:
        print(json.dumps(measure_alone(problems[0], a.alone)))
        return
    rows: list[dict[str, Any]] = []
    for p in problems:
        rows.append(measure(p, a.variants, a.rounds))
        show(rows[-1])
        if a.json:
            store(a.json, rows=rows)


if __name__ == "__main__":
    main()
