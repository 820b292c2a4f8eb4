"""Unmodified Megatron-Bridge converts models without a GPU, in a process of its own. CI installs it in build/te."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from test_page import run

PROGRAM = Path(__file__).parent / "bridge_models.py"


def test_tensors_come_back_with_the_same_bits(tmp_path):
    try:
        importlib.metadata.version("megatron-bridge")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("megatron.bridge is not installed")
    done = run("-m", "torchweft.te", str(PROGRAM), ".", folder=tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    for line in (
        "LlamaForCausalLM: 21 tensors, 21 of 21 came back with the same bits",
        "Qwen3MoeForCausalLM: 45 tensors, 45 of 45 came back with the same bits",
    ):
        assert line in done.stdout
