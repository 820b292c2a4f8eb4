"""--strict-skips: a run fails if a test is skipped for a reason that is not in the list."""

import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture
def project(tmp_path):
    """A separate project with this project's conftest, skip list and tools."""
    (tmp_path / "tests").mkdir()
    for name in ("tests/conftest.py", "tests/allowed_skips.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    settings = ["[pytest]", "testpaths = tests/test_one.py tests/dist", "markers =", "  slow: s", "  serial: s", ""]
    (tmp_path / "pytest.ini").write_text("\n".join(settings))
    return tmp_path


def run(project, body, *arguments):
    (project / "tests/test_one.py").write_text(f"import pytest\n\n{body}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


ALLOWED = "def test_it():\n    pytest.skip('has no halves')\n\ndef test_other(): pass"
OTHER = "def test_it():\n    pytest.skip('the moon is full')\n\ndef test_other(): pass"
MODULE = "pytest.skip('the moon is full', allow_module_level=True)"


@pytest.mark.parametrize("workers", ([], ["-n", "2"]), ids=("one", "two"))
def test_unlisted_skip_fails_strict_run(project, workers):
    if workers:
        pytest.importorskip("xdist")
    assert run(project, ALLOWED, "--strict-skips", *workers).returncode == 0
    done = run(project, OTHER, "--strict-skips", *workers)
    assert done.returncode == 1 and "test_it: the moon is full" in done.stdout
    done = run(project, MODULE, "--strict-skips", *workers)
    assert done.returncode != 0 and "the moon is full" in done.stdout
    assert run(project, OTHER, *workers).returncode == 0


def test_rank_tests_are_serial_and_slow_tests_are_opt_in(project):
    (project / "tests/dist").mkdir()
    (project / "tests/dist/test_two.py").write_text("def test_ranks(): pass\n")
    body = "@pytest.mark.slow\ndef test_slow(): pass\n\ndef test_quick(): pass"
    assert "1 passed, 1 skipped, 1 deselected" in run(project, body, "-m", "not serial").stdout
    assert "1 passed, 2 deselected" in run(project, body, "-m", "serial and not slow").stdout
    assert "1 passed, 2 deselected" in run(project, body, "-m", "slow").stdout
