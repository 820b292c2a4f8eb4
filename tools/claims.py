#!/usr/bin/env python3
"""Measures weft's claims and reports which of them hold.

    tools/claims.py core                 every row of the core; exits with 0 only if all hold
    tools/claims.py core --row 5 --row 6 these rows; `--row 3` also selects 3.1, 3.2, …
    tools/claims.py core --quick         CI size: minutes
    tools/claims.py core --json FILE     also as JSON, from which tools/make_tables.py generates the tables in the docs
    tools/claims.py kernels              kernels and fusions
    tools/claims.py parallel             tensor-parallel linears and their communication
    tools/claims.py grouped              grouped GEMM
    tools/claims.py te                   the unmodified Transformer Engine on weft
    tools/claims.py readable             installation, names, layers, docstrings, errors
    tools/claims.py step                 attention, loss and whole training steps
    tools/claims.py quantization         quantized matrices, their GEMM, recipes
    tools/claims.py users                wheels, PyTorch's tools, checkpoints, what is missing, documentation site
    tools/claims.py trust                docs/reliability.md; see --defects and --old

A row is a claim and the checks that verify it (tools/claim_rows.py): tests, a benchmark with a bound, or a script. Its
verdict is `holds`, `missed` or `not measured` (tools/verdict.py). Only `holds` passes: a row whose tests were skipped
or not found, or whose timing was too noisy, is not measured, and the exit status is 1. Requires the Python environment
that has torch; builds what is missing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from checks import ROOT, Row, Settings  # noqa: E402
from claim_rows import CLAIMS  # noqa: E402
from verdict import Verdict, join_outcomes  # noqa: E402


@dataclass
class Result:
    row: str
    claim: str
    measured: str
    verdict: Verdict
    seconds: int


def measure(row: Row, settings: Settings) -> Result:
    start = time.monotonic()
    outcome = join_outcomes(check(settings) for check in row.checks)
    return Result(row.number, row.claim, outcome.measured, outcome.verdict, round(time.monotonic() - start))


def summary(results: list[Result]) -> str:
    counts = Counter(result.verdict for result in results)
    return ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)


def status(results: list[Result]) -> int:
    return 0 if results and all(result.verdict is Verdict.HOLDS for result in results) else 1


def select_rows(rows: tuple[Row, ...], numbers: list[str]) -> list[Row]:
    """Returns the rows with these numbers, and their subrows; all if none is given."""
    for number in numbers:
        if not any(row.is_part_of(number) for row in rows):
            raise ValueError(f"no row {number}; known: {', '.join(row.number for row in rows)}")
    return [row for row in rows if not numbers or any(row.is_part_of(number) for number in numbers)]


def provenance() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "command": " ".join(["tools/claims.py", *sys.argv[1:]]),
        "machine": platform.platform(),
        "python": platform.python_version(),
    }


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CLAIMS)
    parser.add_argument("--row", action="append", default=[], help="run only this row; may be repeated")
    parser.add_argument("--quick", action="store_true", help="CI size")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    old = "trust: an earlier build folder or libweft.so to compare with ($WEFT_OLD_BUILD)"
    parser.add_argument("--old", type=Path, default=os.environ.get("WEFT_OLD_BUILD"), help=old)
    defects = "trust: a folder of scripts that must exit with status 0 ($WEFT_DEFECTS)"
    parser.add_argument("--defects", type=Path, default=os.environ.get("WEFT_DEFECTS"), help=defects)
    return parser, parser.parse_args()


def main() -> None:
    parser, arguments = parse()
    try:
        rows = select_rows(CLAIMS[arguments.name], arguments.row)
    except ValueError as error:
        parser.error(f"{arguments.name}: {error}")
    settings = Settings(arguments.quick, arguments.old, arguments.defects)
    print("row | claim | measured | verdict\n--- | --- | --- | ---", flush=True)
    results = []
    for row in rows:
        result = measure(row, settings)
        results.append(result)
        print(f"{result.row} | {result.claim} | {result.measured} | {result.verdict.value}", flush=True)
        if arguments.json:
            content = {**provenance(), "quick": arguments.quick, "rows": [asdict(r) for r in results]}
            arguments.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(f"{arguments.name}: {summary(results)}", flush=True)
    sys.exit(status(results))


if __name__ == "__main__":
    main()
