"""``pytest -p torchweft.device.pytest_plugin``: simulates CUDA devices before any test module is imported."""

import sys

import pytest

from ._restart import command_with_devices, start_again_if_late
from ._simulate import from_environment

__all__ = ["pytest_load_initial_conftests"]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Starts the devices that the environment describes."""
    start_again_if_late(from_environment, command_with_devices(sys.orig_argv, sys.argv[1:]))
