"""Framework cost in C++: callgrind instructions of a pipeline relative to the same ATen calls written by hand.

    python benchmarks/framework_cost.py                  prints a table
    python benchmarks/framework_cost.py --json F         also as JSON
    python benchmarks/framework_cost.py --gate           fails if a ratio is more than 1 % above the stored one
    python benchmarks/framework_cost.py --store          stores the ratios of this run

Forward and backward of the problems in benchmarks/driver/framework.cpp, 8x8 fp32, one thread. Instruction counts are
reproducible to a few parts in a million; the stored figure is a ratio within one run, so it does not depend on the
torch build.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "benchmarks/results/framework_cost.json"
PROBLEMS = ("five", "sixteen")
PASSES = 200  # kPasses of benchmarks/driver/main.cpp
ALLOWED_GROWTH = 1.01


def instructions(driver: Path, problem: str, side: str, library: Path | None) -> float:
    """Returns the instructions of one forward and backward pass; `library` replaces the libweft.so of the driver."""
    environment = {**os.environ, **({"LD_PRELOAD": str(library)} if library else {})}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind"
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
        command += [str(driver), "framework", problem, side]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if run.returncode:
            sys.exit(f"{' '.join(run.args)} failed:\n{run.stdout}{run.stderr}")
        totals = re.search(r"^totals: (\d+)", Path(f"{out}.1").read_text(), re.MULTILINE)
        return int(totals[1]) / PASSES


def measure(driver: Path, problem: str, library: Path | None) -> dict[str, object]:
    weft, bare = (instructions(driver, problem, side, library) for side in ("weft", "bare"))
    return {"problem": problem, "weft": round(weft), "bare": round(bare), "ratio": round(weft / bare, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--driver", type=Path, default=ROOT / "build/release/weft_bench")
    parser.add_argument("--library", type=Path, help="libweft.so to run the driver with instead of its own")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--gate", action="store_true", help="compare with the stored ratios")
    parser.add_argument("--store", action="store_true", help="store the ratios")
    parser.add_argument("problems", nargs="*", help=f"any of {', '.join(PROBLEMS)}; default: all")
    arguments = parser.parse_args()

    rows = [measure(arguments.driver, problem, arguments.library) for problem in arguments.problems or PROBLEMS]
    for row in rows:
        print(f"{row['problem']:8} weft {row['weft']:7}  bare {row['bare']:7}  ratio {row['ratio']:.4f}")
    text = json.dumps(rows, indent=1) + "\n"
    if arguments.json:
        arguments.json.write_text(text)
    if arguments.store:
        STORED.write_text(text)
    if arguments.gate:
        stored = {row["problem"]: row["ratio"] for row in json.loads(STORED.read_text())}
        grown = [row for row in rows if row["ratio"] > stored[row["problem"]] * ALLOWED_GROWTH]
        for row in grown:
            print(f"{row['problem']}: ratio {row['ratio']:.4f} exceeds the stored {stored[row['problem']]:.4f} + 1 %")
        sys.exit(1 if grown else 0)


if __name__ == "__main__":
    main()
