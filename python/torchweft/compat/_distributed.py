"""Activation recomputation with tensor-parallel random states; all-reduce with Transformer Engine's gradient."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .. import _autocast, ops
from .._delayed_scaling import ForwardScales
from .._rng import RNGStatesTracker as CudaRNGStatesTracker

__all__ = ["CudaRNGStatesTracker", "activation_recompute_forward", "checkpoint", "is_fp8_activation_recompute_enabled"]


@contextmanager
def _tracker_states(tracker: Any, states: Any) -> Iterator[None]:
    """Sets the tracker's states inside the context and restores the previous ones."""
    saved_states = tracker.get_states()
    tracker.set_states(states)
    try:
        yield
    finally:
        tracker.set_states(saved_states)


class _Entered(threading.local):
    """What a thread has entered and not left yet."""

    def __init__(self) -> None:
        self.stacks: list[ExitStack] = []


class _RepeatedCall(AbstractContextManager[None]):
    """Context of a call that is repeated in backward, with the recipe, the scales and the tracker's states of the first
    one. It may be entered again, also by several threads."""

    def __init__(self, get_tracker: Callable[[], Any] | None) -> None:
        self.scales = ForwardScales()
        self._entered = _Entered()
        self._recipe = _autocast.active.recipe
        self._tracker = get_tracker() if get_tracker is not None else None
        self._states = None if self._tracker is None else self._tracker.get_states()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(_autocast.autocast(self._recipe is not None, recipe=self._recipe))
            stack.enter_context(self.scales.replay())
            if self._tracker is not None:
                stack.enter_context(_tracker_states(self._tracker, self._states))
            self._entered.stacks.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.stacks.pop().__exit__(*error)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Runs ``function(*args, **kwargs)`` and recomputes it in backward instead of saving its activations.

    The tracker's random numbers, the recipe of :func:`autocast` and the scales of delayed scaling are the same in both
    runs.

    Args:
        function: function or module to run.
        *args: its arguments.
        distribute_saved_activations: not supported.
        get_rng_state_tracker: returns the tracker of tensor-parallel random states.
        tp_group: ignored.
        use_reentrant: ignored; torch's non-reentrant checkpoint is always used.
        **kwargs: keyword arguments of `function`.

    Returns:
        The result of `function`.
    """
    if distribute_saved_activations:
        raise NotImplementedError(
            "checkpoint: distribute_saved_activations=True is not supported. Pass False: each rank saves its own input."
        )

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        repeated = _RepeatedCall(get_rng_state_tracker)
        return repeated.scales.record(), repeated

    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    """Does nothing: a call that is repeated in backward does not update scales."""
    yield


def is_fp8_activation_recompute_enabled() -> bool:
    """Returns False: a call that is repeated in backward needs no other state."""
    return False


def dropout(x: torch.Tensor, p: float, training: bool, get_rng_state_tracker: Callable[[], Any] | None) -> torch.Tensor:
    """Dropout with random numbers of the tracker, if given."""
    if not p or not training:
        return x
    with get_rng_state_tracker().fork() if get_rng_state_tracker is not None else nullcontext():
        return torch.nn.functional.dropout(x, p, True)


class AllReduce(ops.AllReduce):
    """y is the sum of x over all ranks; dx = dy, which assumes the same computation on all ranks afterwards.

    Transformer Engine stores `reduce_in_backward` but never reads it, and callers such as Megatron's TEFusedMLP rely on
    that.

    Args:
        process_group: a ProcessGroup, a 1-D DeviceMesh, or None for the default group.
        reduce_in_backward: ignored.
    """

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group, reduce_in_backward=False)
