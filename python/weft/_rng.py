"""Random numbers that differ between tensor-parallel ranks, beside those that must not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RNGStatesTracker:
    """Named states of the CPU's random generator. Ranks that share a layer draw its weights from a state seeded with
    their rank, and everything else from the usual one::

        tracker = weft.RNGStatesTracker()
        tracker.add("model-parallel-rng", seed + rank)
        Linear(…, rng_state_tracker_function=lambda: tracker)
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all states."""
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def add(self, name: str, seed: int) -> None:
        """Starts a state. A seed or a name that is there already is a RuntimeError."""
        if seed in self._seeds:
            raise RuntimeError(f"seed {seed} was added before; two states would draw the same numbers")
        if name in self._states:
            raise RuntimeError(f"a state called {name!r} was added before")
        self._seeds.add(seed)
        self._states[name] = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draws from the named state inside; afterwards the generator goes on from where it was."""
        if name not in self._states:
            raise KeyError(f"no state is called {name!r}; add() it first")
        saved_state = torch.get_rng_state()
        torch.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = torch.get_rng_state()
            torch.set_rng_state(saved_state)

    def get_states(self) -> dict[str, torch.Tensor]:
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self._states = {name: state.clone() for name, state in states.items()}
