"""The region in which linears are quantized."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator
from typing import Any, NamedTuple, TypeVar

import torch

from . import _C
from .recipe import Recipe

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Region:
    """What an outermost region collects: the modules that use delayed scaling, by recipe, and the group of ranks."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.used: dict[int, tuple[Any, dict[int, Any]]] = {}  # id of a recipe: it, and modules by id
        self.updates_backward = False


class _Outer(NamedTuple):
    """What a region that is left restores."""

    recipe: Recipe | None
    quantizers: _C.Recipe | None
    text: str
    id: int  # of the active recipe in C++
    region: Region | None


class _Active(threading.local):
    """The recipe of this thread. The compiler guards on these values, and compiles again if they change."""

    def __init__(self) -> None:
        self.entered: list[tuple[autocast, _Outer]] = []  # the regions that are open, the innermost last
        self.recipe: Recipe | None = None
        self.quantizers: _C.Recipe | None = None  # of the recipe
        self.text = ""  # as in the text of a call
        self.region: Region | None = None  # the outermost one
        self.recorded_scales: list[list[torch.Tensor]] = []  # of delayed scaling: see ForwardScales
        self.replayed_scales: Iterator[torch.Tensor] | None = None


active = _Active()


def called_in_backward() -> bool:
    """Whether this runs within a backward, where gradient checkpointing repeats calls."""
    return torch._C._current_graph_task_id() != -1


def check_enabled(who: str, enabled: Any) -> None:
    """Raises TypeError if the first argument of a region is not a bool, such as one meant for torch.autocast."""
    if isinstance(enabled, bool):
        return
    cure = ""
    if isinstance(enabled, Recipe):
        cure = " Pass a recipe by name: recipe=..."
    elif isinstance(enabled, torch.dtype | torch.device | str):
        cure = " For a dtype or a device use torch.autocast, e.g. torch.autocast('cpu', dtype=torch.bfloat16)."
    raise TypeError(f"{who}: enabled is {enabled!r}, expected True or False: whether to quantize linears.{cure}")


class autocast(ContextDecorator):  # noqa: N801  # Transformer Engine's name
    """Quantizes the linears that are called in its region, in this thread. Their backward is quantized, too.

    Regions nest: the inner one applies. A region also decorates functions, and any number of threads may enter it. For
    the dtypes of :func:`torch.autocast` use that.

    Gradient checkpointing calls functions again, outside of the region: open the region inside of the checkpointed
    function, or pass :func:`torchweft.recompute_contexts`. Without that torch raises a ``CheckpointError``, except
    with ``use_reentrant=True``, where the repeated call and the backward are not quantized.

    Args:
        enabled: False: the region is not quantized, also within another one.
        calibrating: has no effect.
        recipe: how linears are quantized; required if enabled.
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
        check_enabled("autocast", enabled)
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(f"autocast: recipe is {recipe!r}, expected a recipe of torchweft.recipe or None.")
        if enabled and recipe is None:
            raise TypeError(
                "autocast: recipe is None, expected a recipe of torchweft.recipe. Pass one, such as "
                "recipe=torchweft.recipe.Float8CurrentScaling(), or enabled=False."
            )
        self._recipe = recipe if enabled else None
        self._group = amax_reduction_group

    def __call__(self, func: _Function) -> _Function:
        """Decorates a function: each call of it opens a region of its own."""
        deferred = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isclass
        if any(is_kind(func) for is_kind in deferred):
            raise TypeError(
                f"autocast: {func!r} is a generator function, a coroutine function or a class, expected a function "
                "whose body runs when it is called. Open the region inside of it: with torchweft.autocast(...)."
            )
        return super().__call__(func)

    def __enter__(self) -> None:
        quantizers = None if self._recipe is None else self._recipe.quantizers()
        before = _C.set_active_recipe(0 if quantizers is None else quantizers.id)
        outer = _Outer(active.recipe, active.quantizers, active.text, before, active.region)
        active.entered.append((self, outer))  # of the thread: several may enter one object
        active.recipe, active.quantizers = self._recipe, quantizers
        active.text = "" if quantizers is None else f", recipe={quantizers.quoted}"
        if active.region is None and self._recipe is not None:
            active.region = Region(self._group)

    def __exit__(self, *_: object) -> None:
        places = [i for i, (entered, _) in enumerate(active.entered) if entered is self]
        if not places:
            raise RuntimeError(
                "autocast: this thread did not enter the region that it leaves. Enter and leave it in the same thread."
            )
        place = places[-1]
        outer = active.entered.pop(place)[1]
        if place < len(active.entered):  # a generator may leave its region before regions that were entered later
            active.entered[place] = active.entered[place][0], outer
            return
        region = active.region
        active.recipe, active.quantizers, active.text, before, active.region = outer
        _C.set_active_recipe(before)
        if active.region is None and region is not None and region.used:
            from . import _delayed_scaling

            _delayed_scaling.update_after_forward(region)
