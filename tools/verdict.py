"""Verdicts of claims: *holds*, *missed* or *not measured*. This module runs no commands.

A timed ratio holds if the unfavourable end of its interval is within the bound, provided that it was measured: enough
rounds were kept and the A/A control is within 2 % of 1. Tests hold if at least one ran, all that ran passed, and every
skip is listed as "does not apply" in tests/allowed_skips.txt. A check that was skipped, matched nothing or kept no
round is not measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from skips import Skip, applies, gtest_skips, pytest_skips

MAX_CONTROL_ERROR = 0.02  # maximum distance of the A/A control from 1
MIN_ROUNDS = 9  # fewer than 6 rounds give no 95 % interval of a median; 9 exclude the extremes


class Verdict(str, Enum):
    HOLDS = "holds"
    MISSED = "missed"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Outcome:
    measured: str
    verdict: Verdict


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """Missed if any is missed, else not measured if any is not measured or there are none, else holds."""
    found = set(verdicts)
    for verdict in (Verdict.MISSED, Verdict.NOT_MEASURED, Verdict.HOLDS):
        if verdict in found:
            return verdict
    return Verdict.NOT_MEASURED


def join_outcomes(outcomes: Iterable[Outcome], separator: str = "; ") -> Outcome:
    found = list(outcomes)
    return Outcome(separator.join(o.measured for o in found), overall(o.verdict for o in found))


# ---- figures --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A figure of a benchmark. Without a bound it is only reported."""

    name: str
    value: float | None = None
    interval: tuple[float, float] | None = None
    control: float | None = None
    kept: int | None = None
    at_most: float | None = None
    at_least: float | None = None
    exact: bool = False  # counted, not timed: bytes, instructions, allocations
    end: str = "unfavourable"  # end of the interval that must be within the bound, or "favourable"
    skipped: str = ""  # why it was not measured

    def not_measured_reason(self) -> str:
        numbers = [self.value] if self.exact else [self.value, *(self.interval or (None,)), self.control]
        if self.skipped:
            return self.skipped
        if not self.exact and self.kept is not None and self.kept < MIN_ROUNDS:
            return f"kept {self.kept} rounds of at least {MIN_ROUNDS}"
        if any(number is None or not math.isfinite(number) for number in numbers):
            return "no figure" if self.value is None else "no interval or control"
        if not self.exact and self.kept is None:
            return "rounds not counted"
        if not self.exact and abs(self.control - 1) > MAX_CONTROL_ERROR:
            return f"control {self.control:.3f}"
        return ""

    def within(self) -> bool:
        low, high = (self.value, self.value) if self.exact else self.interval
        if self.end == "favourable":
            low, high = high, low
        return (self.at_most is None or high <= self.at_most) and (self.at_least is None or low >= self.at_least)

    def judge(self) -> Outcome:
        if why := self.not_measured_reason():
            return Outcome(f"{self.text()} ({why})", Verdict.NOT_MEASURED)
        return Outcome(self.text(), Verdict.HOLDS) if self.within() else Outcome(f"{self.text()} (!)", Verdict.MISSED)

    def text(self) -> str:
        if self.value is None:
            return self.name
        ends = "" if self.exact or not self.interval else f" [{self.interval[0]:.2f}, {self.interval[1]:.2f}]"
        return f"{self.name} {self.value:.3g}{ends}" if self.exact else f"{self.name} {self.value:.2f}{ends}"


def figure_from(row: dict) -> Figure:
    """Reads a figure from JSON; ignores other fields."""
    known = {key: row[key] for key in Figure.__dataclass_fields__ if key in row}
    if known.get("interval"):
        known["interval"] = tuple(known["interval"])
    return Figure(**known)


def suite_figure(row: dict) -> Figure:
    """Returns the figure that the bound in a problem line of weft_bench applies to."""
    target = row["target"]
    peer = next((p for p in row["versus"] if p["against"] == target["against"]), None)
    name = " ".join(word for word in row["problem"].split() if not word.startswith(("at_", "against=")))
    measured = {"name": name, "control": row["control"], "kept": row["kept"]}
    if peer is None:
        return Figure(**measured)
    bound, ratio, (low, high) = target["at_most"], peer["ratio"], peer["interval"]
    if not target["inverse"]:
        return Figure(**measured, value=ratio, interval=(low, high), at_most=bound)
    # Bounds are printed with four digits: round, so that 1 / 0.6250 is 1.6 and not 1.6000001.
    return Figure(**measured, value=1 / ratio, interval=(1 / high, 1 / low), at_least=round(1 / bound, 3))


def judge_figures(figures: Iterable[Figure], expected: int = 1) -> Outcome:
    """Judges all figures; fewer than expected are not measured."""
    outcomes = [figure.judge() for figure in figures]
    if len(outcomes) < expected:
        outcomes.append(Outcome(f"{len(outcomes)} of {expected} figures", Verdict.NOT_MEASURED))
    return join_outcomes(outcomes, ", ")


# ---- tests and scripts ----------------------------------------------------------------------------------------------


def judge_skips(skips: Iterable[Skip]) -> list[Outcome]:
    """Returns an outcome for each skip reason that leaves something unmeasured; "does not apply" does not."""
    reasons = sorted({skip.reason for skip in skips if applies(skip)})
    return [Outcome(f"skipped: {reason}", Verdict.NOT_MEASURED) for reason in reasons]


def judge_pytest(output: str, status: int, figure: str | None = None) -> Outcome:
    """Judges the output of `pytest -q -rsP`. `figure` is a pattern that must occur in it."""
    last = output.rstrip().rpartition("\n")[2]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|errors?|xfailed|xpassed)\b", last)}
    words = ", ".join(f"{count} {word}" for word, count in counts.items()) or "no test ran"
    found = re.findall(figure, output) if figure else []
    measured = Outcome("; ".join([words, *found]), Verdict.HOLDS)
    if set(counts) - {"passed"}:
        return Outcome(measured.measured, Verdict.MISSED)
    if status not in (0, 5) and (counts or status < 0):  # 5: nothing was collected
        return Outcome(f"{words}, exit status {status}", Verdict.MISSED)
    if not counts.get("passed") or (figure and not found):
        measured = Outcome(measured.measured + ("" if found or not figure else "; no figure"), Verdict.NOT_MEASURED)
    return join_outcomes([measured, *judge_skips(pytest_skips(output))])


def judge_ctest(output: str, status: int, log: str) -> Outcome:
    """Judges the output of ctest. `log` is its log with the output of the tests."""
    summary = re.search(r"(\d+) tests failed out of (\d+)", output)
    if not summary:
        return Outcome("no test ran", Verdict.MISSED if status < 0 else Verdict.NOT_MEASURED)
    failed, total = int(summary[1]), int(summary[2])
    left_out = len(re.findall(r"\((?:Skipped|Disabled|Not Run)\)", output))
    measured = f"{total - failed - left_out} of {total} passed"
    if failed or status:
        return Outcome(measured, Verdict.MISSED)
    ran = Verdict.HOLDS if total > left_out else Verdict.NOT_MEASURED
    return join_outcomes([Outcome(measured, ran), *judge_skips(gtest_skips(log))])


def judge_script(output: str, status: int, figure: str) -> Outcome:
    """Judges a command that exits with status 0 if its claim holds and prints what it measured."""
    found = [" ".join(filter(None, f)) if isinstance(f, tuple) else f for f in re.findall(figure, output)]
    skipped = re.findall(r"(?m)\bskipped\b.*$|no round was steady", output)
    words = "; ".join([*found, *skipped])
    if status:
        return Outcome("; ".join(filter(None, [words, f"exit status {status}"])), Verdict.MISSED)
    if skipped or not found:
        return Outcome(words or "no figure", Verdict.NOT_MEASURED)
    return Outcome(words, Verdict.HOLDS)
