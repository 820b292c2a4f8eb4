"""Processes that this one starts, by `multiprocessing` or as programs, get the devices that it has."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# Each new Python reads these two variables: it runs the folder's sitecustomize.py, which reads the other.
PATH, PARENT = "PYTHONPATH", "WEFT_PARENT"
FOLDER = str(Path(__file__).parent / "children")


def inherit(module: str, function: str, before: str = "torch", **arguments: object) -> None:
    """Lets new processes call this function of `module` with these arguments as soon as they have imported torch, which
    they do at the latest when they import the package `before`."""
    os.environ[PARENT] = json.dumps([list(sys.version_info[:2]), module, function, before, arguments])
    inherited = os.environ.get(PATH)
    paths = inherited.split(os.pathsep) if inherited else []
    os.environ[PATH] = os.pathsep.join([FOLDER, *(path for path in paths if path != FOLDER)])
