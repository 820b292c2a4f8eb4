"""The C++ kernel tests in one process per tier that this machine supports: a process reads WEFT_TIER once.

ctest runs them in the best tier. Tiers other than `ref` are slow tests.
"""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
KERNELS = "*Kernels*:*Activation*:*Norm.*"


def binary():
    found = ROOT / "build/release/weft_tests"
    if not found.exists():
        pytest.skip("weft_tests is not built: cmake --build --preset release")
    return found


@pytest.mark.parametrize("tier", ["ref", *(pytest.param(t, marks=pytest.mark.slow) for t in ("amx", "avx512", "avx2"))])
def test_kernels_of_every_tier(tier):
    done = subprocess.run(
        [binary(), f"--gtest_filter={KERNELS}-*Slow*"],
        env={**os.environ, "WEFT_TIER": tier},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "but the best this CPU has" in done.stdout + done.stderr:
        pytest.skip(f"this CPU has no {tier}")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


def test_unknown_tier_is_rejected():
    done = subprocess.run(
        [binary(), "--gtest_filter=KernelsRows*"],
        env={**os.environ, "WEFT_TIER": "sse"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "expected amx, avx512, avx2, ref." in done.stdout + done.stderr
