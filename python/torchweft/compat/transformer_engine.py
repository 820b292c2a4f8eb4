"""Makes ``import transformer_engine`` resolve to weft::

from torchweft.compat import transformer_engine

transformer_engine.install()
import transformer_engine.pytorch as te
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import _namespace, _recipes

__all__ = ["install", "installed", "uninstall"]

_ROOT = "transformer_engine"
_finder: _Finder | None = None
_replaced_modules: dict[str, ModuleType | None] = {}  # modules of the real package, for uninstall()


def install(recipes: str | None = None, replace: bool = False) -> None:
    """Makes ``import transformer_engine`` resolve to weft in this process. A second call sets only `recipes`.

    Args:
        recipes: what a quantized region does: ``"quantize"`` (the default), or ``"high_precision"`` to run unquantized
            and warn once. None: unchanged.
        replace: replace Transformer Engine even if it is installed or was imported.

    Raises:
        ImportError: if Transformer Engine is installed or was imported, and `replace` is False.
    """
    global _finder
    present = installed()
    if not present and not replace:
        _reject_real_package()
    _set_recipes(recipes)
    if not present:
        _replaced_modules.update({name: sys.modules.pop(name) for name in _loaded() if not _is_own(name)})
        _finder = _finder or _Finder()
        sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undoes :func:`install` and restores what it replaced. No-op if not installed.

    What another library has replaced or wrapped since then stays in place; weft's part of it has no effect any more.
    """
    global _finder
    if _finder is None:
        return
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _finder = None
    for name in _loaded():
        if _is_own(name):
            del sys.modules[name]
    for name, module in _replaced_modules.items():
        sys.modules.setdefault(name, module)  # type: ignore[arg-type]
    _replaced_modules.clear()
    _recipes.set_policy("quantize")


def installed() -> bool:
    """Whether ``import transformer_engine`` currently resolves to weft."""
    return _finder is not None and _finder in sys.meta_path


def _set_recipes(policy: str | None) -> None:
    if policy is not None:
        _recipes.set_policy(policy)


def _loaded() -> list[str]:
    return [name for name in sys.modules if name == _ROOT or name.startswith(_ROOT + ".")]


def _is_own(name: str) -> bool:
    """Whether a loaded module is weft's."""
    return isinstance(getattr(getattr(sys.modules[name], "__spec__", None), "loader", None), _Finder)


def _reject_real_package() -> None:
    """Raises ImportError if the real package was imported or can be found."""
    hint = "To replace it with weft, call install(replace=True)."
    if _ROOT in sys.modules and not _is_own(_ROOT):
        module = sys.modules[_ROOT]
        if module is None:
            raise ImportError(f"{_ROOT} is blocked (sys.modules[{_ROOT!r}] is None). {hint}")
        raise ImportError(f"{_ROOT} was already imported from {getattr(module, '__file__', None)}. {hint}")
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(_ROOT, None) if find is not None else None
        if spec is not None and not isinstance(spec.loader, _Finder):
            locations = spec.origin or ", ".join(spec.submodule_search_locations or ())
            raise ImportError(f"{_ROOT} is installed in {locations}. {hint}")


class _Finder(MetaPathFinder, Loader):
    """Import hook that finds `transformer_engine` and its modules in the tables of `_namespace`."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if self is not _finder or (fullname != _ROOT and not fullname.startswith(_ROOT + ".")):
            return None  # another library may have wrapped it, and keep it after uninstall()
        if fullname not in _namespace.MODULES:
            raise ModuleNotFoundError(
                f"{fullname} is not supported: torchweft.compat replaces {_ROOT}; docs/compat.md lists what is "
                "supported",
                name=fullname,
            )
        return importlib.util.spec_from_loader(fullname, self, origin="torchweft.compat", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name, f"{spec.name}, implemented by weft.")

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(_namespace.MODULES[module.__name__])
        module.__dict__["__all__"] = [name for name in _namespace.MODULES[module.__name__] if not name.startswith("_")]

        def missing_attribute(name: str) -> Any:
            if f"{module.__name__}.{name}" in _namespace.MODULES:  # a submodule that was not imported yet
                return importlib.import_module(f"{module.__name__}.{name}")
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            reason = _namespace.unsupported_reason(module.__name__, name)
            raise AttributeError(
                f"{module.__name__}.{name} is not supported: {reason} (torchweft.compat replaces {_ROOT})"
            )

        module.__dict__["__getattr__"] = missing_attribute
