"""Python runs this when a process starts that inherits devices: they are made once torch has been imported.

`torchweft.device._children` puts this folder on the path. The process may have another torch, or none of torchweft.
"""

from __future__ import annotations

import importlib.util
import itertools
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
        if name == self.before != "torch" and "torch" not in sys.modules and importlib.util.find_spec("torch"):
            importlib.import_module("torch")
        if name not in ("torch", "torchweft") or self not in sys.meta_path:
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
        if importlib.util.find_spec("torchweft") is None:
            return
        try:
            getattr(importlib.import_module(self.module), self.function)(**self.arguments)
        except (ImportError, RuntimeError) as error:  # the program may not need them
            print(f"torchweft: this process has no simulated devices: {error}", file=sys.stderr)


def _run_hidden() -> None:
    """Runs the sitecustomize.py that this one hides."""
    ours = os.path.join("torchweft", "device", "children")  # of this and of other installations
    path = [folder for folder in sys.path if not os.path.realpath(folder).endswith(ours)]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _chooses_itself() -> bool:
    """Whether a launcher or a plugin of torchweft is on the command line."""
    words = ["", *getattr(sys, "orig_argv", ()), *os.environ.get("PYTEST_ADDOPTS", "").split()]
    options, named = ("-m", "-p"), ("torchweft.device", "torchweft.te")
    return any(
        (before in options and word.startswith(named)) or (word[:2] in options and word[2:].startswith(named))
        for before, word in itertools.pairwise(words)
    )


if "WEFT_PARENT" in os.environ and not _chooses_itself():
    version, *given = json.loads(os.environ["WEFT_PARENT"])
    if version == list(sys.version_info[:2]):
        sys.meta_path.insert(0, _AfterTorch(*given))
_run_hidden()
