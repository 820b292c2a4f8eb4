#!/usr/bin/env python3
"""Compares skipped tests with the list of allowed skip reasons, tests/allowed_skips.txt.

tools/skips.py FILE…    reads logs of ctest (LastTest.log); exits with 1 and prints every skip that is not allowed
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ALLOWED = Path(__file__).resolve().parent.parent / "tests/allowed_skips.txt"


class Skip(NamedTuple):
    test: str
    reason: str


class SkipRule(NamedTuple):
    kind: str  # "does not apply" or "machine"
    reason: re.Pattern[str]


def rules(text: str) -> list[SkipRule]:
    """Parses lines of `kind: pattern`. The pattern must match the whole reason."""
    lines = (line.strip() for line in text.splitlines())
    parts = [line.split(": ", 1) for line in lines if line and not line.startswith("#")]
    found = [SkipRule(kind, re.compile(pattern)) for kind, pattern in parts]
    if unknown := {rule.kind for rule in found} - {"does not apply", "machine"}:
        raise ValueError(f"{ALLOWED.name}: unknown kinds {sorted(unknown)}")
    return found


def rule_for(skip: Skip) -> SkipRule | None:
    return next((r for r in rules(ALLOWED.read_text()) if r.reason.fullmatch(skip.reason.strip())), None)


def applies(skip: Skip) -> bool:
    """Whether the skipped test could run on another machine or in another build."""
    rule = rule_for(skip)
    return rule is None or rule.kind != "does not apply"


def not_allowed(skips: Iterable[Skip]) -> list[Skip]:
    return [skip for skip in skips if rule_for(skip) is None]


def pytest_skips(output: str) -> list[Skip]:
    """Parses the summary of `pytest -rs`."""
    lines = re.findall(r"^SKIPPED \[\d+\] ([^\n]*?:\d+|[^:\n]*): ([^\n]*)$", output, re.MULTILINE)
    return [Skip(where, reason.removeprefix("Skipped: ").strip()) for where, reason in lines]


def gtest_skips(log: str) -> list[Skip]:
    """Parses the output of GoogleTest: file and line, the reason, then the name of the test."""
    parts = re.findall(
        r"^\S+:\d+: Skipped\n(.*?)^\[  SKIPPED \] (\S+)", log.replace("\r", ""), re.DOTALL | re.MULTILINE
    )
    found = [Skip(name.rstrip(","), " ".join(reason.split())) for reason, name in parts]
    named = set(re.findall(r"^\[  SKIPPED \] ([^\s,]+)", log, re.MULTILINE)) - {"tests"}
    return found + [Skip(name, "") for name in sorted(named - {skip.test for skip in found}) if not name.isdigit()]


def main() -> int:
    skips = [skip for name in sys.argv[1:] for skip in gtest_skips(Path(name).read_text(errors="replace"))]
    bad = not_allowed(skips)
    for skip in bad:
        print(f"skipped and not in {ALLOWED.name}: {skip.test}: {skip.reason or 'no reason'}", file=sys.stderr)
    print(f"{len(skips)} skipped, {len(bad)} of them not allowed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
