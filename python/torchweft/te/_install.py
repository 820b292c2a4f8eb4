"""`install`: what `import transformer_engine` finds instead of CUDA's libraries and its compiled module."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import device
from ..device._children import inherit
from ..device._simulate import options_from_environment
from . import _apex, _fusion, _triton

COMMON, EXTENSION = "transformer_engine.common", "transformer_engine_torch"
# Read by Transformer Engine and Triton when they are imported. Each may be set otherwise before.
DEFAULTS = {
    "TRITON_INTERPRET": "1",  # Triton has no compiler for CPUs
    "NVTE_TORCH_COMPILE": "0",  # its small fused functions run eagerly: Inductor would compile them for a GPU
    "NVTE_BIAS_GELU_NVFUSION": "0",  # eagerly this one is slower than a GEMM that adds the bias, and the module's GELU
}
SWITCH = "NVTE_PROJECT_BUILDING"  # Transformer Engine's own: set, it loads no library of CUDA
STRICT, FUSION, CAPABILITY = "WEFT_TE_STRICT", "WEFT_TE_FUSION", "10.0"  # variables of the environment; a default


def extension_path() -> Path:
    """The file of weft's `transformer_engine_torch`."""
    folder = Path(__file__).parent
    found = [folder / (EXTENSION + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    for path in found:
        if path.exists():
            return path
    raise ImportError(f"torchweft.te: no file {found[0].name} in {folder}. Install torchweft again.")


class _Loader:
    """Another loader, with something done around it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module


class _CommonLoader(_Loader):
    """Runs `transformer_engine.common` without CUDA's libraries, and tells it where the compiled module lies."""

    def exec_module(self, module: ModuleType) -> None:
        before = os.environ.get(SWITCH)
        os.environ[SWITCH] = "1"
        try:
            self._loader.exec_module(module)
        finally:
            if before is None:
                del os.environ[SWITCH]
            else:
                os.environ[SWITCH] = before
        find: Callable[[str], Path] = module._get_shared_object_file

        def find_shared_object(library: str) -> Path:
            return extension_path() if library == "torch" else find(library)

        module._get_shared_object_file = find_shared_object  # type: ignore[attr-defined]


class _OpsLoader(_Loader):
    """Runs `transformer_engine.pytorch.ops`, and then registers weft's fusion."""

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _fusion.register()


_LOADERS: dict[str, type[_Loader]] = {COMMON: _CommonLoader, _fusion.OPS: _OpsLoader}


class _Finder:
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name not in _LOADERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LOADERS[name](spec.loader)  # type: ignore[assignment]
        return spec


def install(
    *,
    devices: int = 1,
    capability: tuple[int, int] = (10, 0),
    memory: int | str = "80GiB",
    strict: bool = True,
    fusion: bool = False,
) -> None:
    """Lets `import transformer_engine` work on this machine. Call it before that import.

    Args:
        devices: The number of simulated devices, as in :func:`torchweft.device.simulate`.
        capability: Their compute capability. Recipes depend on it: MXFP8 and NVFP4 require (10, 0).
        memory: The memory of each device.
        strict: Refuse shapes that the kernels of a GPU refuse. Without it weft computes them.
        fusion: Run `transformer_engine.pytorch.ops` by weft's plans, which fuse more operations than Transformer
            Engine does. Modules keep the plans that they have made.

    A second call with the same devices changes `strict` and `fusion` only.
    """
    installed = any(isinstance(finder, _Finder) for finder in sys.meta_path)
    if not installed:
        if COMMON in sys.modules:
            raise RuntimeError(
                "torchweft.te.install: transformer_engine is imported already. Call install() before its first import, "
                "or start the program with python -m torchweft.te."
            )
        if importlib.util.find_spec("transformer_engine") is None:
            raise ImportError(
                "torchweft.te.install: transformer_engine is not installed. Install its Python package: "
                "pip install transformer_engine --no-deps, or with what it imports: pip install 'torchweft[te]'"
            )
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    device.simulate(devices, capability=capability, memory=memory)
    inherit(
        __name__,
        "install",
        "transformer_engine",
        devices=devices,
        capability=capability,
        memory=memory,
        strict=strict,
        fusion=fusion,
    )
    _triton.install()
    if not installed:
        sys.meta_path.insert(0, _Finder())
        _apex.provide()
    _load_extension()._set_strict(strict)
    _fusion.enabled = fusion


def install_from_environment() -> None:
    """Calls :func:`install` with what the environment variables say."""
    install(**options_from_environment(CAPABILITY), strict=_flag(STRICT, "1"), fusion=_flag(FUSION, "0"))


def _flag(name: str, otherwise: str) -> bool:
    value = os.environ.get(name, otherwise)
    if value not in ("0", "1"):
        raise ValueError(f"{name}: got {value!r}, expected 0 or 1.")
    return value == "1"


def _load_extension() -> Any:
    """Loads the module under its name; Transformer Engine loads the same file again and gets the same module."""
    if EXTENSION not in sys.modules:
        spec = importlib.util.spec_from_file_location(EXTENSION, extension_path())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[EXTENSION] = module
        spec.loader.exec_module(module)
    return sys.modules[EXTENSION]
