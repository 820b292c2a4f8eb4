"""The commands and the program of docs/transformer_engine.md, in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs/transformer_engine.md"


def run(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WEFT_", "NVTE_", "TRITON_"))}
    inherited = environment.get("PYTHONPATH", "").split(os.pathsep)
    paths = os.pathsep.join([str(ROOT / "python"), *(path for path in inherited if "torchweft" not in path)])
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env={**environment, "PYTHONPATH": paths, **variables}, cwd=folder, capture_output=True, text=True,
        check=False, timeout=200,
    )  # fmt: skip


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("program", "printed"), list(zip(blocks("python"), blocks("text"), strict=True)))
def test_programs_print_what_is_shown(program, printed, tmp_path):
    (tmp_path / "program.py").write_text(program)
    if "transformers" in program:
        pytest.importorskip("transformers", reason="transformers is not installed")
    launcher = () if "torchweft" in program else ("-m", "torchweft.device")
    done = run(*launcher, "program.py", folder=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip() == printed.rstrip()


def test_unchanged_script_and_test(tmp_path):
    script = blocks("python")[0].split("torchweft.te.install()\n", 1)[1]
    (tmp_path / "train.py").write_text(script)
    done = run("-m", "torchweft.te", "train.py", folder=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("cuda:0"), done.stderr
    (tmp_path / "test_train.py").write_text("def test():\n    import train\n\n    assert train.y.is_cuda\n")
    done = run("-m", "pytest", "-q", "-p", "torchweft.te.pytest_plugin", folder=tmp_path)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


def test_late_install_says_what_to_do(tmp_path):
    done = run("-c", "import sys, types\nsys.modules['transformer_engine.common'] = types.ModuleType('x')\n"
               "import torchweft.te\ntorchweft.te.install()", folder=tmp_path)  # fmt: skip
    assert done.returncode == 1
    assert "Call install() before its first import" in done.stderr.splitlines()[-1]


def test_missing_package_says_what_to_do(tmp_path):
    done = run("-I", "-c", f"import sys\nsys.path.insert(0, {str(ROOT / 'python')!r})\n"
               "import torchweft.te\ntorchweft.te.install()", folder=tmp_path)  # fmt: skip
    assert done.returncode == 1
    assert "pip install 'torchweft[te]'" in done.stderr.splitlines()[-1]


def test_wrong_option_is_one_line(tmp_path):
    done = run("-m", "torchweft.te", "--memory", "much", "train.py", folder=tmp_path)
    assert done.returncode == 2 and "memory: got 'much'" in done.stderr.splitlines()[-1]
