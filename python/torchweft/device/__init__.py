"""Simulated CUDA devices: ``device="cuda"`` on a machine without a GPU, for tests of code that is written for one.

Tensors say ``cuda:0``, mixing them with tensors of the CPU raises torch's own errors, and each operation runs torch's
kernel for the CPU on the same memory. Times mean nothing. Nothing changes until :func:`simulate` is called::

    python -m torchweft.device script.py
    pytest -p torchweft.device.pytest_plugin tests/
"""

from ._simulate import SimulatedDevices, is_simulated, simulate

__all__ = ["SimulatedDevices", "is_simulated", "simulate"]
