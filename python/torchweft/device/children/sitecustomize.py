"""Python runs this when a process starts that inherits devices: they are made once torch has been imported.

`torchweft.device._children` puts this folder on the path. The process may have another torch, or none of torchweft.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class _AfterTorch:
    """Starts the devices after `import torch`, or, where torchweft imports it, after `import torchweft`."""

    def __init__(self, module: str, function: str, before: str, arguments: dict[str, Any]) -> None:
        self.module, self.function, self.before, self.arguments = module, function, before, arguments

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name == self.before != "torch" and importlib.util.find_spec("torch") is not None:
            importlib.import_module("torch")
        if name not in ("torch", "torchweft"):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_start(module: Any) -> None:
                execute(module)
                if name == "torchweft" or "torchweft" not in sys.modules:
                    self.start()

            loader.exec_module = execute_and_start
        return spec

    def start(self) -> None:
        if self not in sys.meta_path:
            return
        sys.meta_path.remove(self)
        if importlib.util.find_spec("torchweft") is not None:
            getattr(importlib.import_module(self.module), self.function)(**self.arguments)


def _run_hidden() -> None:
    """Runs the sitecustomize.py that this one hides."""
    own = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != own])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# A launcher or plugin of torchweft on the command line chooses for itself.
if "WEFT_PARENT" in os.environ and not any(word.startswith("torchweft.") for word in getattr(sys, "orig_argv", ())):
    sys.meta_path.insert(0, _AfterTorch(*json.loads(os.environ["WEFT_PARENT"])))
_run_hidden()
