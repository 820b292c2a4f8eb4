"""Activation recomputation with the random numbers of tensor parallelism; the sum over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .. import ops
from .._rng import RNGStatesTracker as CudaRNGStatesTracker

__all__ = ["CudaRNGStatesTracker", "activation_recompute_forward", "checkpoint", "is_fp8_activation_recompute_enabled"]


@contextmanager
def _tracker_states(tracker: Any, states: Any) -> Iterator[None]:
    """The tracker draws from `states` inside and goes on from where it was."""
    saved_states = tracker.get_states()
    tracker.set_states(states)
    try:
        yield
    finally:
        tracker.set_states(saved_states)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Computes ``function(*args, **kwargs)`` again in backward instead of keeping its activations; the tracker's random
    numbers are the same in both runs. Nothing is re-entered, whatever `use_reentrant` says."""
    if distribute_saved_activations:
        raise NotImplementedError("checkpoint: distribute_saved_activations=True is not there; each rank keeps its own")

    def contexts():
        tracker = get_rng_state_tracker() if get_rng_state_tracker is not None else None
        return nullcontext(), nullcontext() if tracker is None else _tracker_states(tracker, tracker.get_states())

    return torch_checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    """Marks the two runs of a recomputed region for delayed scaling; without quantization there is nothing to mark."""
    yield


def is_fp8_activation_recompute_enabled() -> bool:
    return False


def dropout(x: torch.Tensor, p: float, training: bool, get_rng_state_tracker: Callable[[], Any] | None) -> torch.Tensor:
    """Dropout whose numbers come from the tracker, if there is one."""
    if not p or not training:
        return x
    with get_rng_state_tracker().fork() if get_rng_state_tracker is not None else nullcontext():
        return torch.nn.functional.dropout(x, p, True)


class AllReduce(ops.AllReduce):
    """y is the sum of x over all ranks, dx = dy: what follows is taken to be the same on all ranks. The reference
    stores `reduce_in_backward` and never reads it, and callers, such as Megatron's TEFusedMLP, rely on that."""

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group, reduce_in_backward=False)
