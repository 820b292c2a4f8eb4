"""The region in which linears are quantized."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ContextDecorator
from typing import Any

import torch

from . import _C
from .recipe import Recipe, get_default_recipe


class Region:
    """What an outermost region collects: the modules that use delayed scaling, by recipe, and the group of ranks."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.used: dict[int, tuple[Any, dict[int, Any]]] = {}  # id of a recipe: it, and modules by id
        self.updates_backward = False


class _Active(threading.local):
    """The recipe of this thread. The compiler guards on these values, and compiles again if they change."""

    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.quantizers: _C.Recipe | None = None  # of the recipe
        self.text = ""  # as in the text of a call
        self.region: Region | None = None  # the outermost one
        self.recorded_scales: list[list[torch.Tensor]] = []  # of delayed scaling: see ForwardScales
        self.replayed_scales: Iterator[torch.Tensor] | None = None
        self.model_init: tuple[Recipe, bool] | None = None  # recipe of new Parameters; whether to keep initial values


active = _Active()


def called_in_backward() -> bool:
    """Whether this runs within a backward, where gradient checkpointing repeats calls."""
    return torch._C._current_graph_task_id() != -1


def reject_model_init(operation: str) -> None:
    """Raises in a region that creates quantized Parameters."""
    if active.model_init is not None:
        raise NotImplementedError(
            f"{operation}: weights of operations cannot be quantized Parameters. Create it outside of "
            "quantized_model_init, or use a module such as transformer_engine.pytorch.Linear."
        )


class autocast(ContextDecorator):  # noqa: N801  # Transformer Engine's name
    """Quantizes the linears that are called in its region, in this thread. Their backward is quantized, too.

    Regions nest: the inner one applies. Gradient checkpointing calls functions again, outside of the region: open the
    region inside of the checkpointed function. Without that torch raises a ``CheckpointError``, except with
    ``use_reentrant=True``, where the repeated call and the backward are not quantized.

    Args:
        enabled: False: the region is not quantized, also within another one.
        calibrating: has no effect.
        recipe: None: :func:`torchweft.recipe.get_default_recipe`.
        amax_reduction_group: of the ranks that share the maxima of delayed scaling; None: all. Other recipes do not
            reduce them, except over a tensor-parallel group that gathers a tensor.

    Example::

        >>> linear = torchweft.ops.Linear(64, 32)
        >>> with torchweft.autocast(recipe=torchweft.recipe.Float8CurrentScaling()):
        ...     y = linear(torch.randn(8, 64))
        >>> y.sum().backward()
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        if isinstance(enabled, Recipe):
            raise TypeError("autocast: enabled is a recipe, expected True or False. Pass it by name: recipe=...")
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"autocast: recipe is {recipe!r}, expected a recipe of torchweft.recipe or None.")
        self._recipe = (get_default_recipe() if recipe is None else recipe) if enabled else None
        self._group = amax_reduction_group
        # One entry per region that is open.
        self._outer: list[tuple[Recipe | None, _C.Recipe | None, str, int, Region | None]] = []

    def __enter__(self) -> None:
        quantizers = None if self._recipe is None else self._recipe.quantizers()
        before = _C.set_active_recipe(0 if quantizers is None else quantizers.id)
        self._outer.append((active.recipe, active.quantizers, active.text, before, active.region))
        active.recipe, active.quantizers = self._recipe, quantizers
        active.text = "" if quantizers is None else f", recipe={quantizers.quoted}"
        if active.region is None and self._recipe is not None:
            active.region = Region(self._group)

    def __exit__(self, *_: object) -> None:
        region = active.region
        active.recipe, active.quantizers, active.text, before, active.region = self._outer.pop()
        _C.set_active_recipe(before)
        if active.region is None and region is not None and region.used:
            from . import _delayed_scaling

            _delayed_scaling.update_after_forward(region)
