"""TORCH_LOGS="+torchweft": what is printed, and that nothing is without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torchweft

SCRIPT = """
import torch
from torchweft import ops
model = ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 8), torch.nn.Tanh(), ops.Linear(8, 8))
for rows in (2, 3):
    model(torch.randn(rows, 8))
"""


def messages(**environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    environment = {**inherited, "PYTHONPATH": str(Path(torchweft.__file__).parent.parent), **environment}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_plans_and_separate_modules_are_logged_once():
    text = messages(TORCH_LOGS="+torchweft")
    assert text.count("plan of a pipeline that begins with") == 2 and "RMSNorm" in text
    assert text.count("Sequential: Tanh is not part of a pipeline: not a weft operation") == 1, text
    assert "saved for backward" in text


def test_nothing_is_logged_by_default():
    assert messages() == "" and messages(TORCH_LOGS="dynamo") == ""
