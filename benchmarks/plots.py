"""Plots benchmark results as bars: time relative to a peer, with intervals, a line at 1 and the bound.

    python benchmarks/plots.py benchmarks/results/suite.json ... [--out docs/images]

Reads the JSON of `weft_bench suite --time` and of `benchmarks/python/block.py`; FILE.json becomes FILE.svg. Requires
matplotlib (`pip install 'torchweft[plot]'`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.fonttype"] = "none"
matplotlib.rcParams["svg.hashsalt"] = "weft"  # equal figures give equal files
import matplotlib.pyplot as plt  # noqa: E402

COLOURS = {"eager": "#d98c3f", "compile": "#8c6bb1"}
FIRST_COLOUR = "#3f7fbf"  # GEMMs alone
BLOCK_BOUND = 0.70


class Bar(NamedTuple):
    label: str
    peer: str
    ratio: float
    low: float
    high: float
    bound: float | None


def bars_of(row: dict) -> list[Bar]:
    if isinstance(row["versus"], dict):  # block.py
        peers = [(name, r["ratio"], *r["interval"]) for name, r in row["versus"].items()]
        bounds = {"six mm_out": BLOCK_BOUND}
        label = row["problem"]
    else:
        peers = [(r["against"], r["ratio"], *r["interval"]) for r in row["versus"]]
        bounds = {row["target"]["against"]: row["target"]["at_most"]}
        label = " ".join(word for word in row["problem"].split() if not word.startswith(("at_", "against=")))
    if row["threads"] > 1:
        label += f", {row['threads']} threads"
    return [Bar(label, name, ratio, low, high, bounds.get(name)) for name, ratio, low, high in peers]


def draw(bars: list[Bar], title: str, out: Path) -> None:
    figure, axes = plt.subplots(figsize=(11, 0.8 + 0.26 * len(bars)))
    ticks, named, last = [], set(), None
    y = 0.0
    for bar in bars:
        y -= 1.0 if bar.label == last else 1.6
        if bar.label != last:
            ticks.append((y, bar.label))
        colour = COLOURS.get(bar.peer, FIRST_COLOUR)
        name = f"weft / {bar.peer}" if bar.peer not in named else None
        named.add(bar.peer)
        error = [[max(0.0, bar.ratio - bar.low)], [max(0.0, bar.high - bar.ratio)]]
        axes.barh(y, bar.ratio, height=0.9, color=colour, label=name, xerr=error, ecolor="#333333")
        if bar.bound is not None:
            axes.plot([bar.bound] * 2, [y - 0.5, y + 0.5], color="#c02020", linewidth=2)
        last = bar.label
    axes.axvline(1, color="#333333", linewidth=1)
    if any(bar.bound is not None for bar in bars):
        axes.plot([], [], color="#c02020", linewidth=2, label="bound")
    axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks], fontsize=8)
    axes.set_xlabel("time / the peer's time in the same rounds (lower is faster)")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)
    print(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "docs/images")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for file in arguments.files:
        content = json.loads(file.read_text())
        rows = content if isinstance(content, list) else content["rows"]
        where = "" if isinstance(content, list) else f", {content['cpu']}, {content['date']}"
        bars = [bar for row in rows for bar in bars_of(row)]
        draw(bars, file.stem + where, arguments.out / f"{file.stem}.svg")


if __name__ == "__main__":
    main()
