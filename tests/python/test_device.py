"""Simulated devices. They change the process for good, so each file of tests/device runs in its own, started here:

WEFT_DEVICES=8 pytest -p torchweft.device.pytest_plugin tests/device
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "tests/device"
FILES = sorted(FOLDER.glob("test_*.py"))


def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), **variables},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def run_file(path: pathlib.Path, marks: str) -> None:
    plugins = ["-p", "torchweft.device.pytest_plugin", "-p", "no:cacheprovider"]
    run = start("-m", "pytest", *plugins, "-q", "-x", "-m", marks, str(path), WEFT_DEVICES="8")
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert re.search(r"[1-9]\d* passed", run.stdout)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file(path):
    run_file(path, "not slow")


@pytest.mark.slow
def test_all_operations():
    run_file(FOLDER / "test_operations.py", "slow")


def succeeds(program: str, *before: str, **variables: str) -> str:
    run = start(*before, "-c", program, **variables)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_nothing_changes_without_a_call():
    assert not torch.cuda.is_available()
    succeeds("import torch, torchweft.device; assert not torch.cuda.is_available()")


def test_simulate_in_code():
    succeeds(
        "import torch\n"
        "x = torch.randn(3).add(1)\n"  # torch has run already
        "from torchweft.device import SimulatedDevices, is_simulated, simulate\n"
        "assert not is_simulated()\n"
        "made = simulate(3, capability=(8, 0), memory='16GiB', name='A')\n"
        "assert made == SimulatedDevices(3, (8, 0), 16 << 30, 'A') and is_simulated()\n"
        "assert simulate(3, capability=(8, 0), memory='16GiB', name='A') is made\n"
        "assert torch.cuda.get_device_capability() == (8, 0) and torch.cuda.get_device_name() == 'A'\n"
        "y = x.cuda(2).requires_grad_()\n"
        "y.exp().sum().backward()\n"
        "assert torch.equal(y.grad.cpu(), x.exp())\n"
    )


@pytest.mark.parametrize(
    "call, error",
    [
        ("simulate(0)", "ValueError: devices: got 0, expected 1 to 16"),
        ("simulate(17)", "ValueError: devices: got 17, expected 1 to 16"),
        ("simulate(memory='lots')", "ValueError: memory: got 'lots', expected a number of bytes or a size"),
        ("simulate(2); simulate(3)", "RuntimeError: simulate: this process already has SimulatedDevices"),
        (
            "import torch; torch.ones(1, requires_grad=True).sum().backward(); simulate()",
            "TooLateError: simulate: autograd has started its threads",
        ),
    ],
)
def test_simulate_raises(call, error):
    run = start("-c", f"from torchweft.device import simulate\n{call}")
    assert run.returncode == 1 and error in run.stderr


PROGRAM = """
import sys, torch
print(__name__, torch.cuda.device_count(), torch.cuda.get_device_capability(), sys.argv[1:])
assert torch.cuda.mem_get_info()[1] == 8 << 30
"""


@pytest.mark.parametrize("kind", ["script", "module", "environment"])
def test_launcher(tmp_path, kind):
    (tmp_path / "program.py").write_text(PROGRAM)
    options = ["--devices", "2", "--capability", "10.0", "--memory", "8GiB"]
    variables = {"PYTHONPATH": f"{ROOT / 'python'}:{tmp_path}"}
    if kind == "environment":
        options, more = [], {"WEFT_DEVICES": "2", "WEFT_DEVICE_CAPABILITY": "10.0", "WEFT_DEVICE_MEMORY": "8GiB"}
        variables.update(more)
    program = ["-m", "program"] if kind == "module" else [str(tmp_path / "program.py")]
    run = start("-m", "torchweft.device", *options, *program, "--lr", "3", **variables)
    assert run.stdout == "__main__ 2 (10, 0) ['--lr', '3']\n", run.stderr


@pytest.mark.parametrize(
    "arguments, error",
    [
        ([], "expected a script, or -m and a module"),
        (["--devices", "two", "x.py"], "devices: got 'two', expected a number such as 2"),
        (["--capability", "9", "x.py"], "capability: got '9', expected such as 9.0"),
    ],
)
def test_launcher_raises(arguments, error):
    run = start("-m", "torchweft.device", *arguments)
    assert run.returncode == 2 and error in run.stderr


def test_launcher_starts_again_after_a_backward(tmp_path):
    """A module that Python loads at its start has run a backward: the devices exist in the process that follows it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if not os.environ.get('WEFT_TEST_ONCE'):\n"
        "    os.environ['WEFT_TEST_ONCE'] = '1'\n"
        "    import torch\n"
        "    torch.ones(1, requires_grad=True).sum().backward()\n"
    )
    (tmp_path / "program.py").write_text("import sys, torch; print(torch.cuda.device_count(), sys.argv[1:])")
    variables = {"PYTHONPATH": f"{ROOT / 'python'}:{tmp_path}", "WEFT_DEVICES": "4"}
    run = start("-m", "torchweft.device", str(tmp_path / "program.py"), "a", **variables)
    assert run.stdout == "4 ['a']\n", run.stderr
