"""examples/transformer_engine as users run it: in a copied folder, with pytest, and the script by the launcher."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_page import ROOT, run

EXAMPLE, PAGE = ROOT / "examples/transformer_engine", ROOT / "docs/te_in_ci.md"
FILES = sorted(file.name for file in EXAMPLE.iterdir() if file.is_file())


@pytest.fixture
def folder(tmp_path):
    """A copy of the example."""
    for name in FILES:
        shutil.copy(EXAMPLE / name, tmp_path)
    return tmp_path


def losses(done: subprocess.CompletedProcess) -> dict[int, float]:
    """Returns the printed losses by step."""
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
    return {int(step): float(loss) for step, loss in lines}


def test_workflow_command_passes_in_copied_folder(folder):
    commands = re.findall(r"- run: WEFT_DEVICES=2 python (.*)", (folder / "ci.yml").read_text())
    assert commands == ["-m pytest -p torchweft.te.pytest_plugin"]
    command = [*commands[0].split(), "-p", "no:cacheprovider"]
    done = run(*command, folder=folder, OMP_NUM_THREADS="1", WEFT_DEVICES="2")
    shown = re.search(r"# (\d+) tests,", PAGE.read_text())[1]
    assert done.returncode == 0 and f"{shown} passed" in done.stdout, done.stdout + done.stderr


def test_script_runs_and_resumes(folder):
    command = ["-m", "torchweft.te", "train.py", "--checkpoint", "run", "--fp8"]
    assert list(losses(run(*command, "--steps", "2", folder=folder, OMP_NUM_THREADS="1"))) == [0, 1]
    assert list(losses(run(*command, "--steps", "4", folder=folder, OMP_NUM_THREADS="1"))) == [2, 3]
    assert [file.name for file in (folder / "run").iterdir()] == ["rank0.pt"]


def test_script_does_not_mention_weft():
    assert "weft" not in (EXAMPLE / "train.py").read_text()


@pytest.mark.parametrize("name", FILES)
def test_page_shows_complete_file(name):
    language = {".py": "python", ".yml": "yaml"}[Path(name).suffix]
    assert f"`{name}`\n\n```{language}\n{(EXAMPLE / name).read_text()}```\n" in PAGE.read_text()
