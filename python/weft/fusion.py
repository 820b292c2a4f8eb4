"""Fusion rules written in Python."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import _C

__all__ = [
    "FusionHandle",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    "with_rules",
    "without_rules",
]

_registered: set[int] = set()


@atexit.register
def _remove_all() -> None:
    """The list of rules outlives the interpreter and must not hold Python functions then."""
    while _registered:
        _C.remove_rule(_registered.pop())


class FusionHandle:
    """A registered fusion function. Remove it with :meth:`remove`, or use it in a ``with`` statement."""

    def __init__(self, rule: int) -> None:
        self._rule: int | None = rule
        _registered.add(rule)

    def remove(self) -> None:
        if self._rule is not None:
            _C.remove_rule(self._rule)
            _registered.discard(self._rule)
            self._rule = None

    def __enter__(self) -> FusionHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _checked_names(names: tuple[str, ...]) -> list[str]:
    known = [name for name, _ in _C.all_rules()]
    if unknown := set(names) - set(known):
        raise ValueError(f"No rule is called {sorted(unknown)}; there are {known}.")
    return list(names)


@contextmanager
def without_rules(*names: str) -> Iterator[None]:
    """Inside the ``with`` statement plans are made without the rules of these names; without any rule if none is given.
    Holds for the whole process, like the rules themselves."""
    rules = _C.rule_ids(_checked_names(names) or [name for name, _ in _C.rules()])
    _C.disable_rules(rules)
    try:
        yield
    finally:
        _C.enable_rules(rules)


@contextmanager
def with_rules(*names: str) -> Iterator[None]:
    """Inside the ``with`` statement the rules of these names are in force, also those that are off by default."""
    reenabled = _C.enable_rules(_C.rule_ids(_checked_names(names)))
    try:
        yield
    finally:
        _C.disable_rules(reenabled)


def register_forward_fusion(func: Callable, prepend: bool = False) -> FusionHandle:
    """Adds ``func(ops, *, recipe) -> ops``: it gets the operations of a pipeline in order and returns them with some
    runs replaced by a :class:`FusedOperation`, which then runs their forward pass. Takes effect at the next call."""
    return FusionHandle(_C.add_fusion_function("forward", func, prepend))


def register_backward_fusion(func: Callable, prepend: bool = False) -> FusionHandle:
    """As :func:`register_forward_fusion`, for the backward pass. Operations come in forward order here too."""
    return FusionHandle(_C.add_fusion_function("backward", func, prepend))


def register_forward_backward_fusion(func: Callable, prepend: bool = False) -> FusionHandle:
    """As :func:`register_forward_fusion`, for fused operations that serve both passes."""
    return FusionHandle(_C.add_fusion_function("joint", func, prepend))
