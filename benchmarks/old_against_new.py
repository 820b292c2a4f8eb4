"""Kernel times of this build over those of an earlier one, the two programs in turns.

    python benchmarks/old_against_new.py --old FOLDER         an earlier build folder, with weft_bench and libweft.so
    python benchmarks/old_against_new.py --old libweft.so     an earlier library, under the weft_bench of this build
    python benchmarks/old_against_new.py --old … --quick      few problems
    python benchmarks/old_against_new.py --old … --only TEXT  problems that contain the text
    python benchmarks/old_against_new.py --old … --json FILE  also as JSON

A round runs old, new, new, old, each in a process of its own, over all problems. A process times weft against ATen's
product, in turns (benchmarks/driver/measure.h), so that the machine's speed at that moment cancels out; a round's
figure is new's ratio over old's. Reported is the median over rounds with its bootstrap interval. The control is the
second time of old over its first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES, QUICK = ("gemm", "linear_gelu", "wgrad", "block", "grouped"), "m=512"
SAMPLES = 5  # rounds of weft_bench in one process
AT_MOST = 1.02


class Build:
    """weft_bench with the libweft.so of a folder, or with a given one."""

    def __init__(self, path: Path) -> None:
        self.program = path / "weft_bench" if path.is_dir() else ROOT / "build/release/weft_bench"
        self.library = (path / "libweft.so" if path.is_dir() else path).resolve()
        for file in (self.program, self.library):
            if not file.exists():
                raise SystemExit(f"no {file}")

    def ratios(self, problems: list[str]) -> dict[str, float]:
        """weft's time over the first peer's, for each problem of which a round counted."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            done = subprocess.run(
                [self.program, "suite", "--time", "--rounds", str(SAMPLES), "--json", out],
                input="\n".join(problems),
                env={**os.environ, "LD_PRELOAD": str(self.library)},
                cwd=ROOT,
                capture_output=True,
                text=True,
            )
            if done.returncode:
                said = done.stdout[-2000:] + done.stderr[-2000:]
                raise SystemExit(f"{self.program} with {self.library} failed:\n{said}")
            rows = json.loads(out.read_text())["rows"]
        return {row["problem"]: row["versus"][0]["ratio"] for row in rows if row["kept"]}


def problems_of(only: str) -> list[str]:
    """Problems without their bounds: a program measures twice what it finds over a bound."""
    lines = []
    for name in FILES:
        for line in (ROOT / f"benchmarks/problems/{name}.txt").read_text().splitlines():
            words = [w for w in line.partition("#")[0].split() if not w.startswith(("at_", "against="))]
            lines.append(" ".join(words))
    return [line for line in dict.fromkeys(lines) if line and only in line]


def interval(values: list[float]) -> tuple[float, float]:
    """Bootstrap interval (95 %) of the median."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(1000))
    return medians[25], medians[-26]


def figure(problem: str, rounds: list[list[dict[str, float]]]) -> dict[str, object]:
    counted = [[run[problem] for run in runs] for runs in rounds if all(problem in run for run in runs)]
    bound = {"at_most": AT_MOST, "end": "favourable"}
    if not counted:
        return {"name": problem, "kept": 0, "skipped": "no round was steady", **bound}
    ratios = [math.sqrt(new * again / (first * last)) for first, new, again, last in counted]
    control = statistics.median(last / first for first, _, _, last in counted)
    taken = {"value": statistics.median(ratios), "interval": interval(ratios), "control": control}
    return {"name": problem, **taken, "kept": len(counted), **bound}


def show(found: dict) -> None:
    if "value" not in found:
        print(f"{found['name']}: {found['skipped']}", flush=True)
        return
    low, high = found["interval"]
    words = f"new / old {found['value']:.3f} [{low:.3f}, {high:.3f}]  control {found['control']:.3f}"
    print(f"{found['name']}: {words}  kept {found['kept']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True)
    parser.add_argument("--new", type=Path, default=ROOT / "build/release")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    parser.add_argument("--quick", action="store_true", help=f"problems with {QUICK}, 9 rounds")
    parser.add_argument("--json", type=Path, help="write the rows there")
    asked = parser.parse_args()
    old, new = Build(asked.old), Build(asked.new)
    problems = problems_of(asked.only or (QUICK if asked.quick else ""))
    rounds = []
    for number in range(wanted := 9 if asked.quick else asked.rounds):
        print(f"round {number + 1} of {wanted}, {len(problems)} problems", file=sys.stderr, flush=True)
        rounds.append([build.ratios(problems) for build in (old, new, new, old)])
    figures = [figure(problem, rounds) for problem in problems]
    for found in figures:
        show(found)
    if asked.json:
        asked.json.write_text(json.dumps([{"figures": figures}], indent=1) + "\n")


if __name__ == "__main__":
    main()
