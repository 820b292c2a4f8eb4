"""Links over UCX between two network namespaces, and schedules whose product takes as long as what they send.

    python benchmarks/network.py                       0.3, 1 and 3 Gb/s
    python benchmarks/network.py --rates 1 --rounds 5  one rate, fewer rounds
    python benchmarks/network.py --json FILE           also as JSON

Needs root, for the namespaces; two cores, one for each rank. The rate is that of a token bucket at both ends of a veth
pair (`tc tbf`); its burst of 256 kB lets whole segments pass, as a network card would. A ratio is the schedule's time
over the longer of its two parts, product and blocks, timed in the same round; `hidden` is the part of the blocks' time
that the schedule does not take beside its product.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "dist"))

import netns  # noqa: E402

BOUNDS = {0.3: (1.10, 1.10), 1.0: (1.10, 1.10), 3.0: (1.20, 1.15)}  # all_gather_gemm, gemm_reduce_scatter
HIDDEN = {1.0: 0.88}


def ranks(program: pathlib.Path, gigabits: float | None, *arguments: str) -> list[dict]:
    """What rank 0 of two ranks in two namespaces printed."""
    with netns.two_hosts(gigabits, burst="256kb") as hosts, tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen([*host, str(program), str(rank), f"{folder}/store", *arguments], stdout=subprocess.PIPE)
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


def judge(rate: float, found: dict) -> str:
    bound = BOUNDS.get(rate, (None, None))[found["schedule"] == "gemm_reduce_scatter"]
    missed = (bound and found["ratio"] > bound) or found["hidden"] < HIDDEN.get(rate, -1)
    return "" if bound is None else f"{bound:.2f}{'  missed' if missed else ''}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rates", type=float, nargs="*", default=[0.3, 1.0, 3.0], help="Gb/s")
    parser.add_argument("--megabytes", type=float, default=4.0, help="that a rank gets in a round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build/release/network_rank")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    if why := netns.why_not():
        print(f"skipped: {why}")
        return 0
    results = {"link": ranks(asked.program, None, "link"), "balance": []}
    for row in results["link"]:
        print(f"unlimited  {row['bytes']:9} bytes  {row['us']:9.1f} µs  {row['MB/s']:8.1f} MB/s", flush=True)
    well = True
    for rate in asked.rates:
        for found in ranks(asked.program, rate, "balance", str(asked.megabytes), str(asked.rounds)):
            verdict = judge(rate, found)
            well = well and "missed" not in verdict
            results["balance"].append({"gigabits": rate, **found})
            parts = f"product {found['product_ms']:7.2f} ms  blocks {found['blocks_ms']:7.2f} ms"
            figures = f"ratio {found['ratio']:.3f}  hidden {found['hidden']:.2f}  {verdict}"
            print(f"{rate:4} Gb/s  {found['schedule']:20} {found['shape']:24} {parts}  {figures}", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
