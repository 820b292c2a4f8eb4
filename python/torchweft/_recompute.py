"""Activation checkpointing of quantized calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from . import _autocast
from ._delayed_scaling import ForwardScales
from ._rng import RNGStatesTracker


def recompute_contexts(
    tracker: RNGStatesTracker | None = None,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Makes activation checkpointing repeat a call with the recipe and the scales of the first one.

    Pass it as `context_fn` to ``torch.utils.checkpoint.checkpoint`` with ``use_reentrant=False``, outside of compiled
    functions. Without it a call under :func:`torchweft.autocast` is repeated outside of that region, and with delayed
    scaling by the current scales.

    Args:
        tracker: its random states are those of the first call, too. Bind it with ``functools.partial``. Several threads
            must not repeat calls of one tracker at the same time.

    Returns:
        The contexts of the first call and of the one that repeats it in backward.

    Example::

        >>> from torch.utils.checkpoint import checkpoint
        >>> linear, x = torchweft.ops.Linear(64, 64), torch.randn(8, 64, requires_grad=True)
        >>> with torchweft.autocast(recipe=torchweft.recipe.DelayedScaling()):
        ...     y = checkpoint(linear, x, use_reentrant=False, context_fn=torchweft.recompute_contexts)
        >>> y.sum().backward()
    """
    if tracker is not None and not isinstance(tracker, RNGStatesTracker):
        raise TypeError(f"recompute_contexts: tracker is {tracker!r}, expected a torchweft.RNGStatesTracker or None.")
    repeated = _RepeatedCall(tracker)
    return repeated.scales.record(), repeated


class _Entered(threading.local):
    """What a thread has entered and not left yet."""

    def __init__(self) -> None:
        self.stacks: list[ExitStack] = []


class _RepeatedCall(AbstractContextManager[None]):
    """Context of a call that is repeated in backward. It may be entered again; without a tracker also by several
    threads."""

    def __init__(self, tracker: RNGStatesTracker | None) -> None:
        self.scales = ForwardScales()
        self._entered = _Entered()
        self._recipe = _autocast.active.recipe
        self._tracker = tracker
        self._states = None if tracker is None else tracker.get_states()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self.scales.replay())  # left last: the region asks for it
            stack.enter_context(_autocast.autocast(self._recipe is not None, recipe=self._recipe))
            stack.enter_context(self._tracker_states())
            self._entered.stacks.append(stack.pop_all())

    def __exit__(self, *error: object) -> None:
        self._entered.stacks.pop().__exit__(*error)  # type: ignore[arg-type]

    @contextmanager
    def _tracker_states(self) -> Iterator[None]:
        if self._tracker is None or self._states is None:
            yield
            return
        before = self._tracker.get_states()
        self._tracker.set_states(self._states)
        try:
            yield
        finally:
            self._tracker.set_states(before)
