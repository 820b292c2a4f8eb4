"""examples/python/train_gpt.py as users run it."""

import os
import subprocess
import sys
from pathlib import Path

import torch

import torchweft

SCRIPT = Path(__file__).parents[2] / "examples/python/train_gpt.py"
PACKAGE = str(Path(torchweft.__file__).parent.parent)


def train(out: Path, *words: object, **environment: str) -> subprocess.CompletedProcess:
    text = out.parent / "text.txt"
    text.write_text("".join(f"{i} grüße\n" for i in range(200)), encoding="utf-8")
    command = [sys.executable, SCRIPT, "--text", text, "--out", out, "--threads", 1, *words]
    environment = {**os.environ, "PYTHONPATH": PACKAGE, **environment}
    return subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_resumed_training_of_example_equals_uninterrupted_training(tmp_path):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden/matplotlib.py").write_text("raise ImportError")
    for out, *words in (("whole", "--steps", 4), ("parts", "--steps", 2), ("parts", "--steps", 4, "--resume")):
        done = train(tmp_path / out, *words, PYTHONPATH=f"{PACKAGE}:{tmp_path / 'hidden'}")
        assert done.returncode == 0, done.stderr
        assert "loss.png: matplotlib is not installed" in done.stdout
        assert (tmp_path / out / "sample.txt").read_text(encoding="utf-8") in done.stdout
    whole, parts = (torch.load(tmp_path / out / "checkpoint.pt", weights_only=True) for out in ("whole", "parts"))
    assert list(whole["curves"]["training"]) == [1, 2, 3, 4]
    assert whole["curves"]["training"] == parts["curves"]["training"]
    assert all(torch.equal(value, parts["model"][name]) for name, value in whole["model"].items())


def test_example_draws_loss_curve_and_reports_a_text_that_is_too_short(tmp_path):
    done = train(tmp_path / "out", "--steps", 2)
    assert done.returncode == 0, done.stderr
    if "matplotlib is not installed" not in done.stdout:
        assert (tmp_path / "out/loss.png").read_bytes().startswith(b"\x89PNG")
    done = train(tmp_path / "out", "--size", "nano")
    assert done.returncode == 2 and "--size nano needs 2570" in done.stderr
