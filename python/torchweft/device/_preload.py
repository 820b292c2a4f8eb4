"""Imported by a process that `multiprocessing` starts with a new interpreter: makes the devices of its parent."""

import json
import os

from ._simulate import simulate
from ._spawn import PARENT

if parent := os.environ.get(PARENT):
    devices, capability, memory, name = json.loads(parent)
    simulate(devices, capability=tuple(capability), memory=memory, name=name)
