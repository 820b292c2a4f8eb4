"""``pytest -p torchweft.device.pytest_plugin``: simulates CUDA devices before any test module is imported."""

from ._simulate import from_environment

from_environment()
