"""Fusion rules written in Python, and context managers that enable and disable rules."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from . import _C
from ._operation import FusibleOperation

_FusionFunction = Callable[..., Sequence[FusibleOperation | _C.FusedStep]]

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
    """Removes all Python rules at exit: the C++ rule list outlives the interpreter."""
    while _registered:
        _C.remove_rule(_registered.pop())


class FusionHandle:
    """A registered fusion function. Remove it with :meth:`remove`, or use it as a context manager."""

    def __init__(self, rule: int) -> None:
        self._rule: int | None = rule
        _registered.add(rule)

    def remove(self) -> None:
        """Removes the fusion function. Takes effect at the next call of each pipeline."""
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
    for name in names:
        if name not in known:
            near = _C.did_you_mean(name, known) if isinstance(name, str) else ""
            raise ValueError(f"Unknown fusion rule {name!r}.{near} Registered: {', '.join(known)}.")
    return list(names)


def _register(pass_: str, func: _FusionFunction, prepend: bool) -> FusionHandle:
    if not callable(func):
        raise TypeError(
            f"register_{pass_}_fusion: func is {func!r}, expected a function func(ops, *, recipe) that returns ops."
        )
    return FusionHandle(_C.add_fusion_function("joint" if pass_ == "forward_backward" else pass_, func, prepend))


@contextmanager
def without_rules(*names: str) -> Iterator[None]:
    """Context manager that disables fusion rules, for the whole process.

    Args:
        *names: names of the rules; all rules if none is given.

    Example::

        >>> with torchweft.fusion.without_rules("linear_bias"):
        ...     y = block(x)
    """
    rules = _C.rule_ids(_checked_names(names) or [name for name, _ in _C.rules()])
    _C.disable_rules(rules)
    try:
        yield
    finally:
        _C.enable_rules(rules)


@contextmanager
def with_rules(*names: str) -> Iterator[None]:
    """Context manager that enables fusion rules, including those disabled by default, for the whole process.

    Args:
        *names: names of the rules.
    """
    reenabled = _C.enable_rules(_C.rule_ids(_checked_names(names)))
    try:
        yield
    finally:
        _C.disable_rules(reenabled)


def register_forward_fusion(func: _FusionFunction, prepend: bool = False) -> FusionHandle:
    """Registers a fusion function for the forward pass. Takes effect at the next call of each pipeline.

    Args:
        func: ``func(ops, *, recipe) -> ops``. It gets the operations of a pipeline in order and returns them with some
            consecutive operations replaced by a :class:`FusedOperation`, which then computes their forward. It is
            applied before the library's own rules, which fuse what it leaves.
        prepend: apply the function before the functions registered so far instead of after them.

    Returns:
        A :class:`FusionHandle` that removes the function.

    Example::

        >>> def fuse(ops, *, recipe):
        ...     return ops  # with some of them replaced
        >>> block = torchweft.Sequential(torchweft.ops.RMSNorm(8), torchweft.ops.GELU())
        >>> with torchweft.fusion.register_forward_fusion(fuse):
        ...     y = block(torch.randn(2, 8))
    """
    return _register("forward", func, prepend)


def register_backward_fusion(func: _FusionFunction, prepend: bool = False) -> FusionHandle:
    """Registers a fusion function for the backward pass. It also gets the operations in forward order.

    Args:
        func: see :func:`register_forward_fusion`; the fused operation computes the backward.
        prepend: apply the function before the functions registered so far instead of after them.

    Returns:
        A :class:`FusionHandle` that removes the function.
    """
    return _register("backward", func, prepend)


def register_forward_backward_fusion(func: _FusionFunction, prepend: bool = False) -> FusionHandle:
    """Registers a fusion function whose fused operations compute both the forward and the backward.

    Args:
        func: see :func:`register_forward_fusion`.
        prepend: apply the function before the functions registered so far instead of after them.

    Returns:
        A :class:`FusionHandle` that removes the function.
    """
    return _register("forward_backward", func, prepend)
