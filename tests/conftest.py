"""A test may be skipped for a reason of this list; any other skip fails the run."""

import fnmatch
import re

import pytest

ALLOWED_SKIPS = (  # glob of the node id, glob of the reason
    ("*", "slow; run with -m slow"),  # run nightly
    ("tests/python/test_tiers.py*", "this CPU has no *"),
    ("tests/python/test_fusions.py*", "the best this CPU has is *"),
    ("tests/python/test_fusions.py*", "this process has its tier already"),  # runs without WEFT_TIER
    ("tests/python/test_fusions.py*", "takes any number of rows"),  # a rule without a least number of rows
    ("tests/python/test_fusions.py*", "one output"),  # nothing to leave out
    ("tests/python/test_grouped_mlp.py*", "has no halves"),  # activations that are not gated
    ("tests/python/test_grouped_wgrad.py*", "what comes between the layers is rounded"),  # low precision
    ("tests/python/test_packed_weights.py*", "weights are packed by the amx tier only"),
    ("tests/python/test_packed_weights.py*", "no other test of this file ran"),  # selected alone
    ("tests/dist/test_shared_link.py*", "only root can start a process of another user"),
    ("tests/dist/test_shared_link.py*", "no control group can be made here"),
    ("tests/dist/test_ucx.py*", "*network namespaces need root"),
    ("tests/dist/test_ucx.py*", "*netns*"),  # forbidden in this container
    ("tests/dist/test_megatron.py*", "* is not there, nor in $WEFT_MEGATRON *"),  # not published for every Python
)

refused: list[str] = []


def is_allowed(node: str, reason: str) -> bool:
    return any(fnmatch.fnmatch(node, where) and fnmatch.fnmatch(reason, why) for where, why in ALLOWED_SKIPS)


def note(report) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = re.sub(r"^Skipped: ", "", text)
    if not is_allowed(report.nodeid, reason):
        refused.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report):
    note(report)


def pytest_collectreport(report):
    note(report)


def pytest_sessionfinish(session, exitstatus):
    if refused and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    for text in refused:
        terminalreporter.write_line(f"SKIP NOT ALLOWED (tests/conftest.py) {text}", red=True)
