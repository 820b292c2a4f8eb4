"""``torchweft bench``: weft, eager PyTorch and torch.compile on this machine."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import torchweft

from .. import _C
from ._bench_problems import PROBLEMS, Run, Sides
from ._error import CommandError

_MIN_ROUNDS = 5


def add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="compare weft with eager PyTorch and torch.compile on this machine",
        description="Times forward and backward of an MLP block and of causal attention, and a training step of a "
        "small GPT. The implementations are interleaved, so that a machine of varying speed slows all of them.",
    )
    parser.add_argument("problems", nargs="*", metavar="PROBLEM", help=f"any of {', '.join(PROBLEMS)}; default: all")
    parser.add_argument(
        "--seconds", type=_positive, default=120.0, help="time for all problems, without compiling (120)"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 with AMX, else float32")
    parser.add_argument("--threads", type=_threads, help="default: torch's")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw the results; needs matplotlib")
    parser.set_defaults(run=run)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _threads(text: str) -> int:
    most = os.cpu_count() or 1
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads; expected 1 to {most}, the CPUs here")
    return value


def run(arguments: argparse.Namespace) -> None:
    unknown = [name for name in arguments.problems if name not in PROBLEMS]
    if unknown:
        raise CommandError(f"{unknown[0]!r} is not a problem; expected {', '.join(PROBLEMS)}.")
    if arguments.plot:
        _check_plot(arguments.plot)
    for file in filter(None, (arguments.json, arguments.plot)):
        _check_writable(Path(file))
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if _C.machine_tier() == "amx" else "float32"))
    names = arguments.problems or list(PROBLEMS)
    print(
        f"{dtype}, {torch.get_num_threads()} threads, {_C.machine_tier()} kernels, torch {torch.__version__}",
        flush=True,
    )
    rows = []
    for name in names:
        sides = _make_sides(name, dtype, not arguments.no_compile)
        rows.append(measure(name, sides, arguments.seconds / len(names)))
    print(table(rows))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"weft": torchweft.__version__, "dtype": str(dtype), "rows": rows}, file, indent=1)
    if arguments.plot:
        plot(rows, arguments.plot)


def _make_sides(name: str, dtype: torch.dtype, compiles: bool) -> dict[str, Run]:
    """Returns the sides of a problem, ready to be timed."""
    torch.manual_seed(0)
    made: Sides = PROBLEMS[name](dtype)
    sides = {"weft": made.weft, "eager": made.eager}
    if compiles:
        _progress(f"{name}: compiling")
        sides["compile"] = made.compiled()
    for side, call in list(sides.items()):
        try:
            call()
        except Exception as error:
            if side != "compile":
                raise
            print(
                f"\r{name}: torch.compile failed: {(str(error).strip() or repr(error)).splitlines()[0]}",
                file=sys.stderr,
            )
            del sides["compile"]
    return sides


# ---- measurement --------------------------------------------------------------------------------------------------


def measure(name: str, sides: dict[str, Run], seconds: float) -> dict[str, Any]:
    """Times the sides, interleaved, for so many seconds. Returns medians in milliseconds, and ratios with the interval
    in which the median ratio of a round lies with 95 %."""
    rounds: list[dict[str, float]] = []
    start = time.perf_counter()
    while len(rounds) < _MIN_ROUNDS or time.perf_counter() - start < seconds:
        order = list(sides) if len(rounds) % 2 == 0 else list(reversed(sides))
        rounds.append({side: _time(sides[side]) for side in order})
        _progress(name, min(1.0, (time.perf_counter() - start) / seconds))
    _progress("")
    row: dict[str, Any] = {"problem": name, "rounds": len(rounds)}
    for side in sides:
        row[f"{side} ms"] = statistics.median(spent[side] for spent in rounds) * 1e3
        if side != "weft":
            ratios = [spent["weft"] / spent[side] for spent in rounds]
            row[f"weft / {side}"] = statistics.median(ratios)
            row[f"weft / {side}, interval"] = _interval(ratios)
    return row


def _time(call: Run) -> float:
    call()  # warms up
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _interval(values: list[float]) -> tuple[float, float]:
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(500))
    return medians[12], medians[487]


# ---- output -------------------------------------------------------------------------------------------------------


def _progress(text: str, part: float | None = None) -> None:
    """Draws a progress bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        return
    bar = "" if part is None else f" [{'#' * round(30 * part):30}] {part:4.0%}"
    print(f"\r\x1b[K{text}{bar}", end="", file=sys.stderr, flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the results as text."""
    header = ["problem", "eager ms", "compile ms", "weft ms", "weft / eager", "weft / compile"]
    lines = [header, *([_cell(row, column) for column in header] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cell(row: dict[str, Any], column: str) -> str:
    if column not in row:
        return "-"
    if column == "problem":
        return str(row[column])
    if " / " not in column:
        return f"{row[column]:.2f}"
    low, high = row[f"{column}, interval"]
    return f"{row[column]:.2f} [{low:.2f}, {high:.2f}]"


def _check_writable(file: Path) -> None:
    """Raises if the file cannot be written: before the measurement, not after it."""
    existed = file.exists()
    try:
        file.open("a", encoding="utf-8").close()
    except OSError as error:
        raise CommandError(f"cannot write '{file}': {error.strerror}.") from error
    if not existed:
        file.unlink()


def _check_plot(file: str) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise CommandError("--plot needs matplotlib: pip install matplotlib.") from error
    suffixes = FigureCanvasAgg.get_supported_filetypes()
    if Path(file).suffix[1:] not in suffixes:
        raise CommandError(f"cannot draw {file!r}; expected a name that ends in .{', .'.join(sorted(suffixes))}.")


def plot(rows: list[dict[str, Any]], file: str) -> None:
    """Draws the times over eager's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 1.8 * len(rows), 3), layout="constrained")
    axes = figure.subplots()
    sides = [side for side in ("eager", "compile", "weft") if any(f"{side} ms" in row for row in rows)]
    for i, (side, color) in enumerate(zip(sides, ("#9aa5b1", "#5b7a99", "#d1495b"), strict=False)):
        heights = [row.get(f"{side} ms", float("nan")) / row["eager ms"] for row in rows]
        axes.bar([x + 0.27 * i for x in range(len(rows))], heights, 0.25, label=side, color=color)
    axes.set_xticks([x + 0.135 * (len(sides) - 1) for x in range(len(rows))], [row["problem"] for row in rows])
    axes.set_ylabel("time / eager's")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=len(sides), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(file, dpi=150)
