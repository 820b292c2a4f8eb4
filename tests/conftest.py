"""Markers: slow tests run only on request, tests over ranks are serial. --strict-skips fails on unlisted skips."""

import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tools"))

from skips import ALLOWED, Skip, not_allowed  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--strict-skips", action="store_true", help=f"fail on a skip that {ALLOWED.name} does not allow")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    """Marks tests over ranks as serial, orders files. Slow tests run on request: with `-m slow`, or by node id."""
    asked = "slow" in config.option.markexpr or any("::" in arg for arg in config.args)
    skip = pytest.mark.skip(reason="slow; run with -m slow")
    for item in items:
        if HERE / "dist" in item.path.parents:
            item.add_marker(pytest.mark.serial)
        if "slow" in item.keywords and not asked:
            item.add_marker(skip)
    items.sort(key=lambda item: item.path.name != "test_tiers.py")  # the longest test of one process starts first


def skips_of(reporter):
    """Yields every skipped test or module with its reason."""
    for report in reporter.stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        yield Skip(report.nodeid, reason.removeprefix("Skipped: "))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")  # None in a worker of pytest-xdist
    if not reporter or not session.config.option.strict_skips:
        return
    bad = not_allowed(skips_of(reporter))
    for skip in bad:
        reporter.write_line(f"\nskipped and not in {ALLOWED.name}: {skip.test}: {skip.reason}", red=True)
    if bad and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def run_two_ranks():
    """Returns a function that runs a script on two ranks, each with simulated devices that `launcher` makes."""

    def run(launcher: str, script: pathlib.Path) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", launcher,
             "--devices=2", str(script)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "rank 0: ok" in done.stdout and "rank 1: ok" in done.stdout

    return run
