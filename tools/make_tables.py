#!/usr/bin/env python3
"""Writes the tables of figures in README.md and docs from stored results.

    tools/make_tables.py            names the pages whose tables differ from their results; exits 1 if there is one
    tools/make_tables.py --write    writes the tables

A table stands between two comments; the first one names its kind and its source:

    <!-- table: claims benchmarks/results/claims-core.json -->
    <!-- end of table -->

A stored result has a date, the commit if it is known, the command that made it, and rows. `tools/claims.py core --json
benchmarks/results/claims-core.json` stores the rows of a group of claims, `benchmarks/network.py --json` those of a
network, `benchmarks/python/gpt.py --json` those of training steps. `headline core:5,kernels:8` copies single rows of
stored claims. `tolerances` reads the table of tests/python/tolerances.py; `rows trust` lists the claims of a group.
Links in a stored result start at the root of the repository and are rewritten for the page.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from claim_rows import CLAIMS  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
TABLE = re.compile(r"(<!-- table: (\w+) (\S+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
FIELDS = ("date", "command")  # required in every stored result
UNKNOWN = "not recorded"  # the command of results that predate this tool


def markdown(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(columns), *(map(str, row) for row in rows)]
    shown = ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines]
    return "\n".join([shown[0], "|" + "---|" * len(lines[0]), *shown[1:]]) + "\n"


def origin(result: dict) -> str:
    """When, at which commit and by which command a result was measured."""
    if missing := [name for name in FIELDS if not result.get(name)]:
        raise ValueError(f"a stored result has no {', '.join(missing)}")
    commit = f", commit {result['commit'][:7]}" if result.get("commit") else ""
    command = f"`{result['command']}`" if result["command"] != UNKNOWN else f"command {UNKNOWN}"
    return f"{result['date']}{commit}, {command}"


def source(result: dict) -> str:
    """The line below a table."""
    note = f". {result['note']}" if result.get("note") else ""
    return f"\n{origin(result)}{note}.\n"


def claims(result: dict) -> str:
    rows = ((r["row"], r["claim"], r["measured"], r["verdict"]) for r in result["rows"])
    return markdown(("row", "claim", "measured", "verdict"), rows)


def network(result: dict) -> str:
    def median(values: float | list[float]) -> float:
        return statistics.median(values) if isinstance(values, list) else values

    def digits(value: float) -> str:
        return f"{value:#.3g}".rstrip(".")

    columns = ("rate", "schedule", "GEMM, ms", "blocks, ms", "time / longer of the two", "hidden")
    rows = (
        (f"{r['gigabits']:g} Gb/s", f"`{r['schedule']}`", digits(r["product_ms"]), digits(r["blocks_ms"]),
         f"{median(r['ratios']):.2f}", f"{median(r['hidden']):.2f}")
        for r in result["rows"]
    )  # fmt: skip
    return markdown(columns, rows)


def steps(result: dict) -> str:
    """Training steps of benchmarks/python/gpt.py."""

    def cells(v: dict) -> tuple[str, ...]:
        low, high = v["interval"]
        ratio = f"{v['ratio']:.2f} [{low:.2f}, {high:.2f}]"
        return f"{v['tokens_per_s']:,.0f}", ratio, f"{v['peak_bytes'] / 2**20:,.0f}", f"{v['first_step_s']:.1f}"

    first = next(iter(result["rows"][0]["variants"]))
    measured = ("tokens/s", f"time / {first}", "peak, MiB", "first step, s")
    columns = ("preset", "precision", "threads", "variant", *measured)
    rows = (
        (r["preset"], r["precision"], r["threads"], name, *cells(v))
        for r in result["rows"]
        for name, v in r["variants"].items()
    )
    return markdown(columns, rows)


def reference_tests(result: dict) -> str:
    """Counts of Transformer Engine's own tests, of tools/te_tests.py."""
    rows = [row for row in result["rows"] if not row["fusion"]]
    releases = sorted({row["release"] for row in rows}, key=lambda r: [int(n) for n in r.split(".")], reverse=True)
    counts = ("passed", "failed", "skipped")

    def cell(row: dict | None) -> str:
        if row is None or "passed" not in row:
            return row["remarks"] if row else ""
        drawn = f" of {row['draw']} drawn" if row["draw"] and sum(row[c] for c in counts) >= row["draw"] else ""
        return ", ".join(str(row[c]) for c in counts) + drawn

    lines = []
    for file in dict.fromkeys(row["file"] for row in rows):
        found = {row["release"]: row for row in rows if row["file"] == file}
        reasons = {r: found[r]["remarks"] for r in releases if found.get(r, {}).get("passed") is not None}
        why = "; ".join(f"{r}: {reason}" for r, reason in reasons.items() if reason)
        lines.append((file, *(cell(found.get(release)) for release in releases), why))
    dates = {r: min(row["date"] for row in rows if row["release"] == r) for r in releases}
    return markdown(("file", *(f"{r}, {dates[r]}" for r in releases), "failed because of"), lines)


def plain(result: dict) -> str:
    """A table with the stored columns and rows."""
    return markdown(result["columns"], result["rows"])


def from_results(table: Callable[[dict], str]) -> Callable[[str], str]:
    def made(text: str) -> str:
        result = json.loads(text)
        return table(result) + source(result)

    return made


def tolerances(text: str) -> str:
    rows = re.findall(r"torch\.(\w+): Tolerance\(([^,]+), ([^,]+), [^)]+\)", text)
    return markdown(("dtype", "rtol", "atol"), rows)


def headline(rows: str, read: Callable[[str], str]) -> str:
    """Single rows of stored claims; `rows` is a list such as `core:5,kernels:8`."""
    shown, origins = [], []
    for group, number in (item.split(":") for item in rows.split(",")):
        result = json.loads(read(f"benchmarks/results/claims-{group}.json"))
        (row,) = (r for r in result["rows"] if r["row"] == number)
        shown.append((row["claim"], row["measured"], row["verdict"]))
        if origin(result) not in origins:
            origins.append(origin(result))
    return markdown(("claim", "measured", "verdict"), shown) + f"\n{'; '.join(origins)}.\n"


def rows_of(group: str) -> str:
    """Lists the claims of a group, without results."""
    return markdown(("row", "claim"), ((row.number, row.claim) for row in CLAIMS[group]))


KINDS: dict[str, Callable[[str], str]] = {
    "claims": from_results(claims),
    "network": from_results(network),
    "plain": from_results(plain),
    "reference_tests": from_results(reference_tests),
    "steps": from_results(steps),
    "tolerances": tolerances,
}


def relative_links(table: str, folder: str | Path) -> str:
    """Rewrites links that start at the root of the repository for a page in `folder`."""
    return re.sub(r"\]\((?!\w+:)([^)]+)\)", lambda link: f"]({os.path.relpath(link[1], folder)})", table)


def render_tables(text: str, read: Callable[[str], str], folder: str | Path = ".") -> str:
    """The text of a page in `folder` with every table generated again."""

    def table(found: re.Match[str]) -> str:
        opening, kind, file, _, closing = found.groups()
        if kind == "rows":
            made = rows_of(file)
        elif kind == "headline":
            made = headline(file, read)
        else:
            made = KINDS[kind](read(file))
        return opening + relative_links(made, folder) + closing

    return TABLE.sub(table, text)


def stored(file: str) -> str:
    return (ROOT / file).read_text()


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])


def outside_tables(text: str) -> list[str]:
    """Returns the lines of tables that are not generated."""
    text = re.sub(r"^```.*?^```", "", TABLE.sub("", text), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^\|.*$", text, re.MULTILINE)


def contains_figure(line: str) -> bool:
    """Whether a line has a time, or a cell that is only a number with a decimal point or an exponent."""
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    number = r"[-−–\d.,e\[\] ]*\d(\.\d|e[-−]?\d)[-−–\d.,e\[\] ]*"
    return any(re.search(r"\d ?(µs|ms|ns|s)\b", c) or re.fullmatch(number, c) for c in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    differ = []
    for page in pages():
        text = page.read_text()
        made = render_tables(text, stored, page.parent.relative_to(ROOT))
        if made != text:
            differ.append(page)
            if write:
                page.write_text(made)
    for page in differ:
        print(f"{page.relative_to(ROOT)}: {'written' if write else 'differs from its results; run with --write'}")
    return 1 if differ and not write else 0


if __name__ == "__main__":
    sys.exit(main())
