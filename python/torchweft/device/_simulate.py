"""`simulate`: makes the devices of this process, and of the processes that it starts."""

from __future__ import annotations

import atexit
import dataclasses
import os
import re
import sys
import time
from typing import Any

import torch

from .. import _device
from ._children import inherit
from ._restart import TooLateError

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
VARIABLES = {"devices": "WEFT_DEVICES", "capability": "WEFT_DEVICE_CAPABILITY", "memory": "WEFT_DEVICE_MEMORY"}
_simulated: SimulatedDevices | None = None


def _parse_bytes(size: int | str) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]i?B|)", size) if isinstance(size, str) else None
    if not found or not float(found[1]):
        raise ValueError(f"memory: got {size!r}, expected a number of bytes or a size such as '80GiB'.")
    return int(float(found[1]) * _UNITS[found[2]])


@dataclasses.dataclass(frozen=True)
class SimulatedDevices:
    """What :func:`simulate` made.

    Args:
        count: The number of devices.
        capability: Their compute capability, such as ``(9, 0)``.
        memory: The memory of each device in bytes.
        name: What ``torch.cuda.get_device_name`` returns.
    """

    count: int
    capability: tuple[int, int]
    memory: int
    name: str


def is_simulated() -> bool:
    """Whether the CUDA devices of this process are simulated."""
    return _simulated is not None


def _let_backward_threads_finish() -> None:
    """Autograd's threads free the last graph after backward has returned. Without the interpreter they would abort."""
    time.sleep(0.05)


def simulate(
    devices: int = 1,
    *,
    capability: tuple[int, int] = (9, 0),
    memory: int | str = "80GiB",
    name: str = "Simulated CUDA device",
) -> SimulatedDevices:
    """Makes CUDA devices that compute on the CPU, in this process and in those that it starts.

    Args:
        devices: How many, 1 to 16.
        capability: Their compute capability, for code that asks for it: ``(8, 0)``, ``(9, 0)``, ``(10, 0)``.
        memory: The memory of each, in bytes or as ``"80GiB"``. A tensor that does not fit raises
            ``torch.OutOfMemoryError``.
        name: What ``torch.cuda.get_device_name`` returns.

    Returns:
        What was made. A second call with the same arguments returns the same; one with others raises.

    Example:
        >>> from torchweft.device import simulate
        >>> simulate(devices=2, memory="16GiB").count  # doctest: +SKIP
        2
        >>> torch.ones(3, device="cuda:1").sum()  # doctest: +SKIP
        tensor(3., device='cuda:1')
    """
    global _simulated
    major, minor = capability
    wanted = SimulatedDevices(devices, (int(major), int(minor)), _parse_bytes(memory), str(name))
    if _simulated is not None:
        if _simulated != wanted:
            raise RuntimeError(
                f"simulate: this process already has {_simulated}, got {wanted}. Call simulate once, at the start."
            )
        return _simulated
    if not sys.platform.startswith("linux"):
        raise RuntimeError(f"simulate: expected Linux, got {sys.platform}.")
    if torch.cuda.is_available():
        raise RuntimeError(
            "simulate: this machine has a GPU that torch can use. To simulate one instead, use a machine without, or a "
            "build of torch for the CPU: pip install torch --index-url https://download.pytorch.org/whl/cpu"
        )
    if torch.version.cuda is not None or torch.version.hip is not None:
        raise RuntimeError(
            f"simulate: got torch {torch.__version__}, expected a build for the CPU: "
            "pip install torch --index-url https://download.pytorch.org/whl/cpu"
        )
    if _device.autograd_has_started():
        raise TooLateError(
            "simulate: autograd has started its threads for another accelerator. Call simulate before the first "
            "backward, or start the program with python -m torchweft.device."
        )
    _device.start(wanted.count, wanted.memory)
    from . import _comm, _compile, _cuda_module, _distributed, _storage  # after the devices exist

    _cuda_module.install(wanted)
    _comm.install()
    _compile.install()
    _distributed.install()
    _storage.install()
    inherit(
        __name__, "simulate", devices=wanted.count, capability=wanted.capability, memory=wanted.memory, name=wanted.name
    )
    atexit.register(_let_backward_threads_finish)
    _simulated = wanted
    return wanted


def options_from_environment(capability: str = "9.0") -> dict[str, Any]:
    """The arguments of :func:`simulate` that the environment variables name. `capability` is the default of one."""
    defaults = {"devices": "1", "capability": capability, "memory": "80GiB"}
    given = {option: os.environ.get(VARIABLES[option], default) for option, default in defaults.items()}
    found = re.fullmatch(r"(\d+)\.(\d)", given["capability"])
    if not given["devices"].isdecimal():
        raise ValueError(f"devices: got {given['devices']!r}, expected a number such as 2.")
    if not found:
        raise ValueError(f"capability: got {given['capability']!r}, expected such as {capability}.")
    return {
        "devices": int(given["devices"]),
        "capability": (int(found[1]), int(found[2])),
        "memory": given["memory"],
    }


def from_environment() -> SimulatedDevices:
    """Calls :func:`simulate` with what the environment variables say."""
    return simulate(**options_from_environment())
