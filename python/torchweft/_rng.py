"""Named random number generator states, for random numbers that differ between tensor-parallel ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from . import _C

_generator_lock = threading.RLock()  # the CPU has one generator for all threads


class RNGStatesTracker:
    """Named states of the CPU's random number generator.

    Tensor-parallel ranks draw the weights of a sharded layer from a state seeded with their rank, and everything else
    from the default state.

    Example::

        >>> tracker = torchweft.RNGStatesTracker()
        >>> tracker.add("model-parallel-rng", seed + rank)
        >>> linear = torchweft.ops.Linear(256, 1024, rng_state_tracker_function=lambda: tracker)
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Removes all states."""
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def add(self, name: str, seed: int) -> None:
        """Adds a state.

        Args:
            name: name of the state.
            seed: its seed.

        Raises:
            RuntimeError: if the name or the seed was added before.
        """
        if seed in self._seeds:
            raise RuntimeError(
                f"RNGStatesTracker: seed {seed} was already added, and two states would draw the same numbers. Use a "
                "different seed for each state."
            )
        if name in self._states:
            raise RuntimeError(f"RNGStatesTracker: state {name!r} was already added. Choose another name.")
        self._seeds.add(seed)
        self._states[name] = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Context manager that draws random numbers from the named state and restores the generator's state on exit.
        Another thread waits until this one has left.

        Args:
            name: name of a state passed to :meth:`add`.
        """
        if name not in self._states:
            near = _C.did_you_mean(name, list(self._states))
            raise KeyError(f"RNGStatesTracker: unknown state {name!r}.{near} Call add() first.")
        with _generator_lock:
            saved_state = torch.get_rng_state()
            torch.set_rng_state(self._states[name])
            try:
                yield
            finally:
                self._states[name] = torch.get_rng_state()
                torch.set_rng_state(saved_state)

    def get_states(self) -> dict[str, torch.Tensor]:
        """Returns copies of all states by name, e.g. for a checkpoint."""
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replaces all states by copies of `states`, as returned by :meth:`get_states`."""
        self._states = {name: state.clone() for name, state in states.items()}
