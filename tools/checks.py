"""Checks behind the claims: each runs commands and returns an Outcome."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from verdict import (
    Figure,
    Outcome,
    Verdict,
    figure_from,
    join_outcomes,
    judge_ctest,
    judge_figures,
    judge_pytest,
    judge_script,
    suite_figure,
)

ROOT = Path(__file__).resolve().parent.parent
TIERS = {"amx": "amx_bf16", "avx512": "avx512dq", "avx2": "avx2", "ref": ""}  # tier: CPU flag


@dataclass(frozen=True)
class Settings:
    """Command-line options of a run."""

    quick: bool = False
    old: Path | None = None  # the build to compare with
    defects: Path | None = None  # scripts that must exit with status 0
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def attempts(self) -> int:
        """How often a benchmark may run until it keeps enough rounds and its control is within the limit."""
        return 1 if self.quick else 2

    def run(self, command: list[str], timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a command in the repository; prints its output only if it fails."""
        environment = {**os.environ, "PYTHONPATH": "python", "PYTHON": sys.executable, **self.environment}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": timeout}
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False, **options)
        if done.returncode:
            print(f"---- {' '.join(command)}: exit status {done.returncode}\n{done.stdout[-8000:]}", file=sys.stderr)
        return done


Check = Callable[[Settings], Outcome]


@dataclass(frozen=True)
class Row:
    number: str
    claim: str
    checks: tuple[Check, ...]

    def is_part_of(self, number: str) -> bool:
        return self.number == number or self.number.startswith(f"{number}.")


def build(settings: Settings, preset: str) -> bool:
    """Builds build/<preset>; returns whether it succeeded."""
    configure = ["cmake", "--preset", preset, "-DWEFT_TEST_SHARDS=OFF"]  # tests are selected by name
    if not (ROOT / "build" / preset / "CMakeCache.txt").exists():
        configure.append(f"-DPython3_EXECUTABLE={sys.executable}")
    command = ["cmake", "--build", "--preset", preset, "-j", str(os.cpu_count())]
    return not settings.run(configure).returncode and not settings.run(command).returncode


def needs_build(check: Check, preset: str = "release") -> Check:
    def checked(settings: Settings) -> Outcome:
        if not build(settings, preset):
            return Outcome(f"{preset} does not build", Verdict.MISSED)
        return check(settings)

    return checked


# ---- tests ----------------------------------------------------------------------------------------------------------


def pytest(*arguments: str, slow: bool = False, figure: str | None = None) -> Check:
    """Runs tests by path and -k; with `slow` also those marked slow, unless --quick. `figure` is a pattern that must
    occur in their output."""

    def check(settings: Settings) -> Outcome:
        marks = "slow or not slow" if slow and not settings.quick else "not slow"
        done = settings.run([sys.executable, "-m", "pytest", "-q", "-rsP", "-m", marks, *arguments])
        return judge_pytest(done.stdout, done.returncode, figure)

    return check


def with_te(settings: Settings) -> Settings:
    """With the unmodified Transformer Engine, which .ci/common.sh installs in build/te."""
    paths = os.pathsep.join([str(ROOT / "python"), str(ROOT / "build/te")])
    return replace(settings, environment={**settings.environment, "PYTHONPATH": paths})


def te(check: Check) -> Check:
    """Runs a check with the unmodified Transformer Engine."""
    return lambda settings: check(with_te(settings))


def te_pytest(*arguments: str) -> Check:
    """Runs tests with the unmodified Transformer Engine."""
    return te(pytest("-p", "torchweft.te.pytest_plugin", *arguments))


def te_tests(*options: str) -> Check:
    """Draws of Transformer Engine's own tests, which lie in the folder $WEFT_TE_TESTS."""

    def check(settings: Settings) -> Outcome:
        folder = os.environ.get("WEFT_TE_TESTS")
        if folder is None:
            return Outcome("skipped: WEFT_TE_TESTS is not set", Verdict.NOT_MEASURED)
        drawn = "6" if settings.quick else "60"
        command = [sys.executable, "tools/te_tests.py", folder, "--draw", drawn, "--test-seconds", "100", *options]
        done = settings.run(command)
        found = re.findall(r"\d+ tests of \d+ files passed.*|in plans of weft: .*", done.stdout)
        holds = bool(found) and done.returncode == 0
        return Outcome("; ".join(found) or "no figure", Verdict.HOLDS if holds else Verdict.MISSED)

    return te(check)


def ctest(preset: str, pattern: str = ".") -> Check:
    """Runs the C++ tests whose name matches."""

    def check(settings: Settings) -> Outcome:
        labels = ["-LE", "slow"] if settings.quick else []
        command = ["ctest", "--preset", preset, "-R", pattern, *labels, "--no-tests=error", "-j", str(os.cpu_count())]
        done = settings.run(command)
        log = ROOT / "build" / preset / "Testing/Temporary/LastTest.log"
        outcome = judge_ctest(done.stdout, done.returncode, log.read_text(errors="replace") if log.exists() else "")
        return replace(outcome, measured=f"C++ ({preset}): {outcome.measured}")

    return needs_build(check, preset)


def every_tier(check: Check) -> Check:
    """Runs a check with each kernel tier forced; with --quick only with the CPU's best tier and with ref."""

    def checked(settings: Settings) -> Outcome:
        flags = Path("/proc/cpuinfo").read_text().split()
        present = [tier for tier, flag in TIERS.items() if flag in (*flags, "")]
        outcomes = []
        for tier in (present[0], present[-1]) if settings.quick else TIERS:
            if tier not in present:
                outcomes.append(Outcome(f"{tier}: skipped, this CPU has none", Verdict.NOT_MEASURED))
                continue
            found = check(replace(settings, environment={**settings.environment, "WEFT_TIER": tier}))
            outcomes.append(replace(found, measured=f"{tier}: {found.measured}"))
        return join_outcomes(outcomes)

    return checked


# ---- benchmarks -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def json_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "rows.json"


def rows_of(settings: Settings, *command: str) -> tuple[list[dict], subprocess.CompletedProcess[str]]:
    """Returns the rows that a benchmark (a script or a program) writes with --json."""
    with json_file() as out:
        runner = [sys.executable] if command[0].endswith(".py") else []
        done = settings.run([*runner, *command, "--json", str(out)])
        content = json.loads(out.read_text()) if out.exists() else []
        return (content if isinstance(content, list) else content["rows"]), done


def measured(once: Callable[[], tuple[list[Figure], bool]], expected: int = 1, attempts: int = 2) -> Outcome:
    """Judges the figures of a benchmark, which also reports whether its results were correct. Repeats it for figures
    that were not measured."""
    found: dict[str, Figure] = {}
    for _ in range(attempts):
        figures, right = once()
        if not right:
            return join_outcomes([judge_figures(figures), Outcome("wrong results or a failed run", Verdict.MISSED)])
        for figure in figures:
            if figure.name not in found or found[figure.name].not_measured_reason():
                found[figure.name] = figure
        if len(found) >= expected and not any(figure.not_measured_reason() for figure in found.values()):
            break
    return judge_figures(found.values(), expected)


def figures(*command: str, if_quick: tuple[str, ...] = ()) -> Check:
    """Runs a benchmark in Python. Each of its rows has `figures`; an exit status other than 0 means wrong results."""

    def check(settings: Settings) -> Outcome:
        def once() -> tuple[list[Figure], bool]:
            rows, done = rows_of(settings, *command, *(if_quick if settings.quick else ()))
            return [figure_from(f) for row in rows for f in row["figures"]], not done.returncode

        return measured(once, attempts=settings.attempts)

    return needs_build(check)


def problems_of(file: str, only: str) -> int:
    """Returns how many problems of a file weft_bench runs."""
    lines = (line.partition("#")[0].rstrip() for line in (ROOT / file).read_text().splitlines())
    return sum(bool(line) and only in line for line in lines)


def suite(file: str, quick_only: str, threads: tuple[int, ...] = (1,), command: str = "suite") -> Check:
    """Times the problems of a file with weft_bench and compares each with the bound in its line. With --quick only
    lines that contain `quick_only`."""
    path = f"benchmarks/problems/{file}.txt"

    def check(settings: Settings) -> Outcome:
        only = quick_only if settings.quick else ""
        words = ["--rounds", "9", "--only", only] if settings.quick else []

        def once() -> tuple[list[Figure], bool]:
            found, right = [], True
            for count in threads:
                how = ["--time", "--threads", str(count)] if command == "suite" else []
                rows, done = rows_of(settings, "build/release/weft_bench", command, *how, *words, path)
                right = right and done.returncode in (0, 1) and "WRONG" not in done.stdout
                where = f" on {count}" if len(threads) > 1 else ""
                found += [replace(f, name=f.name + where) for f in map(suite_figure, rows)]
            return found, right

        return measured(once, len(threads) * problems_of(path, only), settings.attempts)

    return needs_build(check)


def sweep(shapes: int, quick_shapes: int) -> Check:
    """Times random shapes with `weft_bench sweep`; with --quick fewer and smaller ones. A shape counts as slower if the
    whole interval is above 1.02."""

    def check(settings: Settings) -> Outcome:
        count = quick_shapes if settings.quick else shapes
        small = ["--flop", "1e9"] if settings.quick else []
        rows, _ = rows_of(settings, "build/release/weft_bench", "sweep", "--shapes", str(count), *small)
        found = [
            figure_from({**row, "name": f"{row['rule']} {row['m']}x{row['h']}x{row['f']}", "value": row["ratio"],
                         "at_most": 1.02, "end": "favourable"}) for row in rows
        ]  # fmt: skip
        verdict = judge_figures(found, expected=count).verdict
        notable = [o.measured for f in found if (o := f.judge()).verdict != Verdict.HOLDS]
        return Outcome(", ".join([f"{len(rows)} of {count} shapes", *notable]), verdict)

    return needs_build(check)


def instructions(at_most: dict[str, float], count: str = "ratio", gate: bool = False) -> Check:
    """Compares callgrind counts of benchmarks/framework_cost.py: the ratio to hand-written code, or weft's count."""

    def check(settings: Settings) -> Outcome:
        words = [*at_most, *(["--gate"] if gate else [])]
        rows, done = rows_of(settings, "benchmarks/framework_cost.py", *words)
        found = [Figure(r["problem"], r[count], at_most=at_most[r["problem"]], exact=True) for r in rows]
        outcome = judge_figures(found, expected=len(at_most))
        if done.returncode and rows:
            return join_outcomes([outcome, Outcome("over the stored ratio", Verdict.MISSED)])
        return outcome

    return needs_build(check)


# ---- scripts and files ----------------------------------------------------------------------------------------------


def script(*command: str, figure: str, if_quick: tuple[str, ...] = ()) -> Check:
    """Runs a command that must exit with status 0. `figure` is a pattern that must occur in its output; `if_quick` are
    additional arguments for --quick."""

    def check(settings: Settings) -> Outcome:
        done = settings.run([*command, *(if_quick if settings.quick else ())])
        return judge_script(done.stdout, done.returncode, figure)

    return check


def program(*arguments: str, figure: str, if_quick: tuple[str, ...] = ()) -> Check:
    """Runs a subcommand of weft_bench that must exit with status 0."""
    return needs_build(script("build/release/weft_bench", *arguments, figure=figure, if_quick=if_quick))


def files_of(word: str, folder: str, count: int) -> Check:
    """Checks that code, build files and generic tests contain a word in `count` files of a folder and nowhere else."""

    def check(settings: Settings) -> Outcome:
        places = ["weft", "python", "tests/cpp", "tests/python", "CMakeLists.txt", "pyproject.toml"]
        found = settings.run(["git", "grep", "-il", word, "--", *places]).stdout.split()
        inside = [path for path in found if path.startswith(folder)]
        holds = len(inside) == len(found) == count
        words = f"{len(inside)} new, {len(found) - len(inside)} edited"
        return Outcome(words, Verdict.HOLDS if holds else Verdict.MISSED)

    return check
