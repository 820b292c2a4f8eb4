"""Starting the program again, for devices that must exist before its first backward."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

_RESTARTED = "WEFT_DEVICE_RESTARTED"  # set in a process that was started again


class TooLateError(RuntimeError):
    """Autograd has started its threads, one for each device that existed then."""


def command_with_devices(words: list[str], arguments: list[str]) -> list[str] | None:
    """The command line `words`, a script or a module with these arguments, under ``python -m torchweft.device``.
    None if there is none, as for ``python -c`` and a notebook."""
    program = len(words) - len(arguments) - 1
    if program < 1 or words[program + 1 :] != arguments or words[program].startswith("-"):
        return None
    if words[program - 1] == "-m":
        program -= 1
    elif words[program - 1] == "-c" or not os.path.isfile(words[program]):
        return None
    return [*words[:program], "-m", "torchweft.device", *words[program:]]


def start_again_if_late(start: Callable[[], object], command: list[str] | None) -> None:
    """Calls `start`. If it comes too late, replaces this process by `command`, once."""
    try:
        start()
    except TooLateError:
        if command is None or os.environ.get(_RESTARTED):
            raise
        os.environ[_RESTARTED] = "1"
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *command[1:]])
