"""Compares functions ("sides") on a machine of varying speed, with the method of benchmarks/driver/measure.h.

A round runs two anchors (GEMMs of random matrices that fit in cache; a copy that does not), each side once, one peer
again as a control, all of that in reverse, and the anchors: with two sides A, B, B, A. It counts only if each of its
anchors reached 85 % of the 90th percentile of all anchors so far. A short pass runs once untimed before it is timed, so
that the state of caches and clocks left by another side does not matter.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

GATE, REFERENCE = 0.85, 0.90
MAX_WAIT = 0.25  # seconds to wait for an idle machine, per round to keep
LONG = 50e-3  # seconds; longer passes do not depend on what ran before
Side = Callable[[], object]


@dataclass
class Ratio:
    """The first side's time over another's: median over rounds and its bootstrap interval."""

    ratio: float
    interval: tuple[float, float]
    ms: float  # of the other side


@dataclass
class Measured:
    ms: float
    versus: dict[str, Ratio]
    control: float
    kept: int
    rounds: int

    def figure(self, name: str, against: str, at_most: float | None = None) -> dict[str, object]:
        """Returns the ratio to a peer in the form that tools/verdict.py judges."""
        found = self.versus[against]
        taken = {"value": found.ratio, "interval": found.interval, "control": self.control, "kept": self.kept}
        return {"name": name, **taken, "at_most": at_most}

    def inverse(self, name: str, against: str, at_least: float | None = None) -> dict[str, object]:
        """Returns the inverse: the peer's time over the first side's."""
        found = self.versus[against]
        ends = (1 / found.interval[1], 1 / found.interval[0])
        taken = {"value": 1 / found.ratio, "interval": ends, "control": self.control, "kept": self.kept}
        return {"name": name, **taken, "at_least": at_least}


def quantile(values: list[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))]


def bootstrap(values: list[float], resamples: int = 500) -> tuple[float, float]:
    rng = random.Random(0)
    medians = [statistics.median(rng.choices(values, k=len(values))) for _ in range(resamples)]
    return quantile(medians, 0.025), quantile(medians, 0.975)


@dataclass
class Rounds:
    """Seconds of two passes of each side, by round: the rounds that count, or all if none counts."""

    names: list[str]
    spent: list[list[float]]  # by round; the control is last
    control: str
    kept: int
    rounds: int

    def ms(self, name: str) -> float:
        """Returns the median time of a pass."""
        i = self.names.index(name)
        return statistics.median(spent[i] for spent in self.spent) * 500

    def ratio(self, name: str, against: str) -> Ratio:
        return self._ratio(self.names.index(name), self.names.index(against))

    def control_ratio(self) -> float:
        return self._ratio(len(self.names), self.names.index(self.control)).ratio

    def _ratio(self, i: int, j: int) -> Ratio:
        found = [spent[i] / spent[j] for spent in self.spent]
        ms = statistics.median(spent[j] for spent in self.spent) * 500
        return Ratio(statistics.median(found), bootstrap(found), ms)


@dataclass
class Meter:
    threads: int = 1
    rounds: int = 21  # rounds to keep
    max_rounds: int = 63  # rounds to run
    sample: float = 10e-3  # seconds per sample; a short pass is repeated
    compute: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.set_num_threads(self.threads)
        self._a, self._b = torch.randn(256, 256).bfloat16(), torch.randn(256, 256).bfloat16()
        self._from, self._to = torch.randn(2 << 20), torch.empty(2 << 20)

    def now(self) -> float:
        return time.thread_time() if self.threads == 1 else time.perf_counter()

    def time_per_pass(self, side: Side, passes: int = 1) -> float:
        start = self.now()
        for _ in range(passes):
            side()
        return (self.now() - start) / passes

    def anchors(self) -> tuple[float, float]:
        compute = 1 / self.time_per_pass(lambda: torch.mm(self._a, self._b), 40)
        copy = 1 / self.time_per_pass(lambda: self._to.copy_(self._from))
        self.compute.append(compute)
        self.copy.append(copy)
        return compute, copy

    def wait(self, until: float) -> None:
        """Runs the anchors until the first is fast enough for a round to count."""
        while time.monotonic() < until and len(self.compute) > 20:
            if self.anchors()[0] >= GATE * quantile(self.compute, REFERENCE):
                return

    def sampled(self, side: Side, passes: int, lead_in: bool) -> float:
        if lead_in:
            side()
        return self.time_per_pass(side, passes)

    def round(self, sides: list[Side], passes: list[tuple[int, bool]]) -> tuple[float, float, list[float]]:
        before = self.anchors()
        spent = [self.sampled(side, *how) for side, how in zip(sides, passes, strict=True)]
        for i in reversed(range(len(sides))):
            spent[i] += self.sampled(sides[i], *passes[i])
        after = self.anchors()
        return min(before[0], after[0]), min(before[1], after[1]), spent

    def kept(self, rounds: list[tuple[float, float, list[float]]]) -> list[list[float]]:
        compute, copy = (GATE * quantile(rates, REFERENCE) for rates in (self.compute, self.copy))
        return [spent for c, m, spent in rounds if c >= compute and m >= copy]

    def run_rounds(self, sides: dict[str, Side], control: str) -> Rounds:
        """Times all sides round by round; `control` names the side that is compared with itself."""
        runs = [*sides.values(), sides[control]]
        passes = []
        for run in runs:
            self.time_per_pass(run, 2)
            one = self.time_per_pass(run)
            passes.append((max(1, round(self.sample / one)), one < LONG))
        rounds: list[tuple[float, float, list[float]]] = []
        until = time.monotonic() + MAX_WAIT * self.rounds
        while len(rounds) < self.max_rounds and (len(rounds) < self.rounds or len(self.kept(rounds)) < self.rounds):
            self.wait(until)
            rounds.append(self.round(runs, passes))
        kept = self.kept(rounds)
        used = kept or [spent for _, _, spent in rounds]  # no round counted: use all and report 0 kept
        return Rounds(list(sides), used, control, len(kept), len(rounds))

    def measure(self, sides: dict[str, Side], control: str) -> Measured:
        """Compares the first side with each other one."""
        found = self.run_rounds(sides, control)
        first, *others = found.names
        ratios = {name: found.ratio(first, name) for name in others}
        return Measured(found.ms(first), ratios, found.control_ratio(), found.kept, found.rounds)
