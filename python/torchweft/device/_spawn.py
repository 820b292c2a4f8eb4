"""Processes that `multiprocessing` starts with a new interpreter get the devices of this one."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.spawn
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._simulate import SimulatedDevices

PARENT = "WEFT_DEVICES_OF_PARENT"


def install(devices: SimulatedDevices) -> None:
    os.environ[PARENT] = json.dumps([devices.count, devices.capability, devices.memory, devices.name])
    multiprocessing.set_forkserver_preload(["__main__", "torchweft.device._preload"])
    command_line = multiprocessing.spawn.get_command_line

    def get_command_line(**kwargs: Any) -> list[str]:
        words = command_line(**kwargs)
        if "-c" in words:  # a frozen program has none
            program = words.index("-c") + 1
            words[program] = "import torchweft.device._preload; " + words[program]
        return words

    multiprocessing.spawn.get_command_line = get_command_line
