"""Processes that `multiprocessing` starts with a new interpreter get the devices of this one."""

from __future__ import annotations

import multiprocessing.spawn
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._simulate import SimulatedDevices


def install(devices: SimulatedDevices) -> None:
    command_line = multiprocessing.spawn.get_command_line
    call = (
        f"from torchweft.device import simulate; simulate({devices.count}, capability={devices.capability}, "
        f"memory={devices.memory}, name={devices.name!r}); "
    )

    def get_command_line(**kwargs: Any) -> list[str]:
        words = command_line(**kwargs)
        program = words.index("-c") + 1 if "-c" in words else 0  # a frozen program has none
        return [*words[:program], call + words[program], *words[program + 1 :]] if program else words

    multiprocessing.spawn.get_command_line = get_command_line
