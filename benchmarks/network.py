"""The UCX transport between two network namespaces, and overlap schedules whose GEMM takes as long as their transfer.

    python benchmarks/network.py                       0.3, 1 and 3 Gb/s
    python benchmarks/network.py --rates 1 --rounds 5  one rate, fewer rounds
    python benchmarks/network.py --json FILE           also as JSON

Requires root for the namespaces, and two cores, one per rank. The rate is that of a token bucket at both ends of a veth
pair (`tc tbf`); its burst of 256 kB lets whole segments pass, as a network card does. A ratio is the schedule's time
over the longer of its two parts, GEMM and blocks, timed in the same round; `hidden` is the fraction of the blocks' time
that is overlapped with the GEMM. The control is the second GEMM of a round over the first. tools/claims.py compares
with the bounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "dist"))

import netns  # noqa: E402

BOUNDS = {0.3: (1.10, 1.10), 1.0: (1.10, 1.10), 3.0: (1.20, 1.15)}  # all_gather_gemm, gemm_reduce_scatter
HIDDEN = {1.0: 0.88}


def ranks(program: pathlib.Path, gigabits: float | None, *arguments: str) -> list[dict]:
    """Runs two ranks in two namespaces and returns what rank 0 printed."""
    with netns.two_hosts(gigabits, burst="256kb") as hosts, tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [*host, "WEFT_UCX_TRUSTED=1", str(program), str(rank), f"{folder}/store", *arguments],
                stdout=subprocess.PIPE,
            )
            for rank, host in enumerate(hosts)
        ]
        try:
            printed = [process.communicate(timeout=300)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        if any(process.returncode for process in started):
            raise SystemExit("a rank failed")
    return [json.loads(line) for line in printed[0].splitlines()]


def interval(values: list[float]) -> tuple[float, float]:
    """Returns the bootstrap interval (95 %) of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(1000))
    return medians[25], medians[-26]


def figures_of(rate: float, found: dict) -> list[dict]:
    """Returns the ratio and the hidden fraction of one schedule with their bounds, or that no round was steady."""
    what = f"{rate} Gb/s {found['schedule']}"
    if not found["ratios"]:
        return [{"name": what, "kept": 0, "skipped": "no round was steady"}]
    at_most = BOUNDS.get(rate, (None, None))[found["schedule"] == "gemm_reduce_scatter"]
    shared = {"control": statistics.median(found["controls"]), "kept": len(found["ratios"])}
    taken = {name: {"value": statistics.median(found[name]), "interval": interval(found[name])}
             for name in ("ratios", "hidden")}  # fmt: skip
    return [
        {"name": f"{what}: time / longer part", **taken["ratios"], **shared, "at_most": at_most},
        {"name": f"{what}: hidden", **taken["hidden"], **shared, "at_least": HIDDEN.get(rate)},
    ]


def store(file: pathlib.Path | None, results: dict) -> None:
    """Writes the results with the date and the command, as tools/make_tables.py requires."""
    made = {"date": datetime.date.today().isoformat(), "command": " ".join(["benchmarks/network.py", *sys.argv[1:]])}
    if file:
        file.write_text(json.dumps({**made, **results}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rates", type=float, nargs="*", default=[0.3, 1.0, 3.0], help="Gb/s")
    parser.add_argument("--megabytes", type=float, default=4.0, help="that a rank receives in a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build/release/network_rank")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    if why := netns.unavailable_reason():
        print(f"skipped: {why}")
        results = {"link": [], "rows": [{"figures": [{"name": "two namespaces", "skipped": why}]}]}
        store(args.json, results)
        return
    results = {"link": ranks(args.program, None, "link"), "rows": []}
    for row in results["link"]:
        print(f"unlimited  {row['bytes']:9} bytes  {row['us']:9.1f} µs  {row['MB/s']:8.1f} MB/s", flush=True)
    for rate in args.rates:
        for found in ranks(args.program, rate, "balance", str(args.megabytes), str(args.rounds)):
            figures = figures_of(rate, found)
            results["rows"].append({"gigabits": rate, **found, "figures": figures})
            parts = f"GEMM {found['product_ms']:7.2f} ms  blocks {found['blocks_ms']:7.2f} ms"
            words = "  ".join(f"{f['value']:.3f}" if "value" in f else f["skipped"] for f in figures)
            print(f"{rate:4} Gb/s  {found['schedule']:20} {found['shape']:20} {parts}  {words}", flush=True)
    store(args.json, results)


if __name__ == "__main__":
    main()
