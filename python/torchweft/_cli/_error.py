"""Errors of commands."""

from __future__ import annotations

import argparse
import sysconfig
import traceback
from pathlib import Path
from typing import NoReturn

import torch

_NOT_THE_USERS = (  # starts of the paths of code
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent.parent),
    sysconfig.get_path("stdlib"),
    "<",
)
# Their messages say enough without the name of the class.
_PLAIN = (RuntimeError, TypeError, ValueError, ImportError, OSError)


class CommandError(Exception):
    """Printed instead of a traceback."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.rstrip('.')}. See {self.prog} --help.\n")


def describe(error: BaseException) -> str:
    """Returns an error as one line: its message, and where the user's code raised it."""
    message = " ".join(str(error).partition("Exception raised from")[0].split())
    if not message or not isinstance(error, (*_PLAIN, CommandError)):
        message = f"{type(error).__name__}: {message}".rstrip(": ")
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    return f"{message} ({own[-1].filename}, line {own[-1].lineno})" if own else message
