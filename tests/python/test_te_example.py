"""examples/transformer_engine as users run it: in a copied folder, with pytest, and the script on weft."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torchweft

ROOT = Path(__file__).parent.parent.parent
EXAMPLE, PAGE = ROOT / "examples/transformer_engine", ROOT / "docs/te_in_ci.md"
FILES = sorted(file.name for file in EXAMPLE.iterdir() if file.is_file())


@pytest.fixture
def folder(tmp_path):
    """A copy of the example."""
    for name in FILES:
        shutil.copy(EXAMPLE / name, tmp_path)
    return tmp_path


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {"PYTHONPATH": str(Path(torchweft.__file__).parent.parent), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def losses(done: subprocess.CompletedProcess) -> dict[int, float]:
    """Returns the printed losses by step."""
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
    return {int(step): float(loss) for step, loss in lines}


def test_workflow_command_passes_in_copied_folder(folder):
    command = re.findall(r"- run: python (.*)", (folder / "ci.yml").read_text())
    assert command == ["-m pytest"]
    done = run(folder, *command[0].split(), "-p", "no:cacheprovider")
    shown = re.search(r"# (\d+) tests,", PAGE.read_text())[1]
    assert done.returncode == 0 and f"{shown} passed" in done.stdout, done.stdout + done.stderr


def test_script_runs_and_resumes(folder):
    quantized = ["--fp8", "--steps", "2", "--checkpoint", "run"]
    done = run(folder, "-m", "torchweft.compat", "--high-precision", "train.py", *quantized)
    assert list(losses(done)) == [0, 1] and done.stderr.count("runs unquantized") == 1
    done = run(folder, "-m", "torchweft.compat", "train.py", "--steps", "4", "--checkpoint", "run")
    assert list(losses(done)) == [2, 3]
    assert [file.name for file in (folder / "run").iterdir()] == ["rank0.pt"]
    done = run(folder, "-m", "torchweft.compat", "train.py", *quantized, "--steps", "5")
    assert list(losses(done)) == [4]


def test_script_does_not_mention_weft():
    assert "weft" not in (EXAMPLE / "train.py").read_text()


def test_weft_is_not_imported_with_real_package(folder):
    """A fake package reports whether torchweft was imported."""
    real = folder / "site/transformer_engine"
    real.mkdir(parents=True)
    asked = "import sys\nraise ImportError(f'real; torchweft imported: {\"torchweft\" in sys.modules}')\n"
    (real / "__init__.py").write_text(asked)
    done = run(folder, "-m", "pytest", "-p", "no:cacheprovider", PYTHONPATH=str(real.parent))
    assert done.returncode == 2 and "ImportError: real; torchweft imported: False" in done.stdout, done.stdout


@pytest.mark.parametrize("name", FILES)
def test_page_shows_complete_file(name):
    language = {".py": "python", ".yml": "yaml"}[Path(name).suffix]
    assert f"`{name}`\n\n```{language}\n{(EXAMPLE / name).read_text()}```\n" in PAGE.read_text()


def test_quick_start_of_page_works(tmp_path):
    (tmp_path / "conftest.py").write_text(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1])
    (tmp_path / "test_layer.py").write_text(
        "import torch, transformer_engine.pytorch as te\n\n"
        "def test_layer():\n    assert te.Linear(4, 8)(torch.ones(2, 4)).shape == (2, 8)\n"
    )
    done = run(tmp_path, "-m", "pytest", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout
