"""A skip for a reason that nobody has allowed fails a run of pytest."""

import pathlib
import shutil
import subprocess
import sys

import pytest

CONFTEST = pathlib.Path(__file__).resolve().parents[1] / "conftest.py"


def run(folder, body):
    shutil.copy(CONFTEST, folder)
    (folder / "test_it.py").write_text(f"import pytest\n\n{body}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "body",
    (
        'def test_it():\n    pytest.skip("not today")',
        '@pytest.mark.skipif(True, reason="not today")\ndef test_it():\n    pass',
        'pytest.skip("not today", allow_module_level=True)',
    ),
)
def test_a_skip_that_is_not_listed_fails_the_run(tmp_path, body):
    done = run(tmp_path, body + "\n\n\ndef test_other():\n    pass")
    assert done.returncode != 0
    assert "SKIP NOT ALLOWED" in done.stdout and "not today" in done.stdout


def test_a_listed_skip_passes(tmp_path):
    done = run(tmp_path, 'def test_it():\n    pytest.skip("slow; run with -m slow")')
    assert done.returncode == 0, done.stdout
