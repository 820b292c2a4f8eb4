"""Delayed scaling: modules own scales and histories of maximum magnitudes, and regions update them.

A state has one part for forward (input and weight) and one for backward (gradient of the output), each float32
[1 + history, tensors]: the scales, then the history, whose first row collects the maxima of the current step, the
second is the oldest and the last the newest.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from . import _C
from ._autocast import Region, active, called_in_backward
from .recipe import DelayedScaling

_ATTRIBUTE = "_delayed_scaling"
FORWARD, BACKWARD = 0, 1
_TENSORS = (2, 1)
MAX_LENGTH = 1 << 20  # of a history in a checkpoint
_PICKLED_NONE = re.compile(rb"\x80[\x02-\x05]N\.")  # alone, or in a file of torch.save
_VERSION = 7766561.0  # first value of the saved form; float32 holds it exactly


def state_of(operation: torch.nn.Module, length: int) -> list[torch.Tensor]:
    """Returns the state of an operation, for forward and backward; creates it, or changes the length of its history.
    The module that owns the operation's Parameters owns it."""
    owner = operation.__dict__.get("_owner", operation)
    with torch.inference_mode(False):  # a later call may train
        state = owner.__dict__[_ATTRIBUTE] = _with_length(owner.__dict__.get(_ATTRIBUTE), length)
    return state


def _with_length(parts: list[torch.Tensor] | None, length: int) -> list[torch.Tensor]:
    """Returns a state with the newest rows of a history, or a new one."""
    if parts is None:
        return [_C.make_delayed_state(length, tensors) for tensors in _TENSORS]
    if all(len(part) == 1 + length for part in parts):
        return parts
    return [_resized(part, length) for part in parts]


def _resized(part: torch.Tensor, length: int) -> torch.Tensor:
    resized = _C.make_delayed_state(length, part.shape[1])
    resized[:2] = part[:2]
    kept = min(length, len(part) - 1) - 1
    if kept > 0:
        resized[-kept:] = part[-kept:]
    return resized


def save(module: torch.nn.Module) -> torch.Tensor | None:
    """Returns the state of a module as one tensor for its ``state_dict``: float32, the version, the length of the
    history and the values. None without a state."""
    state: list[torch.Tensor] | None = module.__dict__.get(_ATTRIBUTE)
    if state is None:
        return None
    length = len(state[0]) - 1
    return torch.cat([torch.tensor([_VERSION, float(length)]), *(part.flatten() for part in state)])


def load(module: torch.nn.Module, saved: Any, key: str) -> None:
    """Sets the state of a module to what `save` returned, or to that of Transformer Engine, a pickle that is read as
    data: nothing in it is executed. An empty state, and with a warning anything else, removes the state: scales start
    at 1.

    Raises:
        ValueError: if it begins like a state of `save`, but is not one of this module.
    """
    state: list[torch.Tensor] | None = None
    with torch.inference_mode(False):
        if (own := _own_values(saved)) is not None:
            state = _split(own, key)
            _check(state, key)
        elif not is_empty(saved):
            try:
                state = _read_pickle(saved, key)
                _check(state or (), key)
            except ValueError as error:
                state = None
                warn_ignored(key, f"scales of delayed scaling start at 1. Reason: {error}")
    module.__dict__.pop(_ATTRIBUTE, None)
    if state is not None:
        module.__dict__[_ATTRIBUTE] = state


def is_empty(saved: Any) -> bool:
    """Whether an `_extra_state` contains nothing: None, no elements, no bytes, or a pickle of None."""
    if isinstance(saved, torch.Tensor):
        return not saved.numel()
    if isinstance(saved, io.BytesIO):
        saved = saved.getvalue()
    return saved is None or (isinstance(saved, bytes) and (not saved or _PICKLED_NONE.search(saved) is not None))


def warn_ignored(key: str, consequence: str) -> None:
    """Warns that an `_extra_state` which is not empty has no effect."""
    warnings.warn(f"{key} is ignored: {consequence.rstrip('.')}.", UserWarning, stacklevel=4)


def _own_values(saved: Any) -> torch.Tensor | None:
    """Returns what `save` returned as float32; None for something else."""
    if not isinstance(saved, torch.Tensor) or _unusable_form(saved):
        return None
    if saved.dtype not in (torch.float32, torch.float64):
        return None
    values = saved.detach().cpu().float()
    return values if len(values) >= 2 and values[0] == _VERSION else None


def _unusable_form(saved: torch.Tensor) -> str:
    """Returns why the values of a tensor cannot be a state; empty if they can."""
    if type(saved.detach()) is not torch.Tensor or saved.layout != torch.strided:
        return f"it is a {type(saved).__name__} of layout {saved.layout}, expected a dense torch.Tensor"
    if saved.is_meta:
        return "it is on the meta device and has no values, expected a tensor with values"
    return "" if saved.dim() == 1 else f"it has shape {list(saved.shape)}, expected one dimension"


def _read_pickle(saved: Any, key: str) -> list[torch.Tensor] | None:
    """Returns Transformer Engine's state; None if its recipe has none."""
    if isinstance(saved, io.BytesIO):
        raise ValueError("it has the form of Transformer Engine 1, expected a tensor. Save it with a newer one")
    if not isinstance(saved, torch.Tensor):
        raise ValueError(f"it is {type(saved).__name__}, expected a tensor")
    if why := _unusable_form(saved):
        raise ValueError(why)
    if saved.dtype != torch.uint8:
        dtype = str(saved.dtype).removeprefix("torch.")
        raise ValueError(
            f"it has {len(saved)} values of {dtype}, expected a state of weft, which is float32, or of Transformer "
            "Engine, which is uint8. Leave keys that end in _extra_state as they are when you convert a state_dict to "
            "another dtype"
        )
    from .convert._extra_state import read_extra_state

    states = read_extra_state(saved.detach().cpu().numpy().tobytes(), key)
    if not states:
        return None
    if len(states) != 1:
        raise ValueError(f"weft: {key} has states of {len(states)} linears, expected 1.")
    return states[0]


def _check(state: Iterable[torch.Tensor], key: str) -> None:
    """Raises for values that no state has: scales must be normal numbers, whose reciprocals are finite."""
    smallest = torch.finfo(torch.float32).tiny
    for part in state:
        scales, history = part[0], part[1:]
        wrong_scales = scales[~((scales >= smallest) & scales.isfinite())]
        wrong_maxima = history[~(history >= 0)]
        for wrong, what, expected in (
            (wrong_scales, "scale", f"a finite number, {smallest:.3g} or more"),
            (wrong_maxima, "maximum magnitude", "0 or more"),
        ):
            if len(wrong):
                raise ValueError(
                    f"weft: {key} has a {what} of {wrong[0].item():.3g}, expected {expected}. Load another "
                    "checkpoint, or remove the key to start with scales of 1."
                )


def _split(saved: torch.Tensor, key: str) -> list[torch.Tensor]:
    """Returns the state that `save` joined."""
    length = saved[1].item()
    rows = 1 + int(length) if 1 <= length <= MAX_LENGTH else 0
    if rows == 0 or len(saved) != 2 + rows * sum(_TENSORS):
        raise ValueError(
            f"weft: {key} has {len(saved)} values, which do not fit a history of {length:g}. Load a checkpoint of the "
            "same module, or remove the key to start with scales of 1."
        )
    parts = saved[2:].split([rows * tensors for tensors in _TENSORS])
    return [part.reshape(rows, -1).clone() for part in parts]


def use_state(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the state of a module for a call, and adds it to the states that the region updates. Without gradients,
    and where a call is repeated within a backward, the maxima are not recorded."""
    recipe = active.recipe
    assert isinstance(recipe, DelayedScaling)
    forward, backward = state_of(module, recipe.amax_history_len)
    repeated = _is_repeated()
    records_maxima = torch.is_grad_enabled() and not repeated
    if not records_maxima:
        forward = forward.clone()
    if repeated and active.replayed_scales is not None:
        forward[0] = next(active.replayed_scales, forward[0])
    for recorded in active.recorded_scales:
        recorded.append(forward[0].clone())
    if not records_maxima:
        return forward, backward
    assert active.region is not None
    active.region.used.setdefault(id(recipe), (recipe, {}))[1][id(module)] = module
    return forward, backward


def _is_repeated() -> bool:
    """Whether a call repeats another one, for gradient checkpointing."""
    return active.replayed_scales is not None or called_in_backward()


class ForwardScales:
    """The scales of inputs and weights in the calls of a function, for calls that repeat it in backward: the region may
    have updated them since then."""

    def __init__(self) -> None:
        self._scales: list[torch.Tensor] = []

    @contextmanager
    def record(self) -> Iterator[None]:
        active.recorded_scales.append(self._scales)
        try:
            yield
        finally:
            active.recorded_scales.pop()

    @contextmanager
    def replay(self) -> Iterator[None]:
        before, active.replayed_scales = active.replayed_scales, iter(self._scales)
        try:
            yield
        finally:
            active.replayed_scales = before


def update_after_backward(output: torch.Tensor) -> None:
    """Updates the scales of the gradients of a region after the backward of its first pipeline, which ends last."""
    region = active.region
    if region is None or region.updates_backward or _is_repeated():
        return
    region.updates_backward = True
    assert output.grad_fn is not None
    output.grad_fn.register_hook(lambda *_: _update(region, BACKWARD))


def update_after_forward(region: Region) -> None:
    """Updates the scales of inputs and weights when the outermost region ends."""
    if torch.is_grad_enabled() and not _is_repeated():
        _update(region, FORWARD)


def _update(region: Region, direction: int) -> None:
    for recipe, modules in region.used.values():
        parts = [state_of(module, recipe.amax_history_len)[direction] for module in modules.values()]
        reduced = _reduced(recipe, region.group, parts)
        for part, amax in zip(parts, reduced, strict=True):
            _update_part(recipe, part, amax, direction)


def _reduced(recipe: DelayedScaling, group: Any, parts: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Returns the maxima of the step over all ranks of the group; None without ranks."""
    if not recipe.reduce_amax or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [None] * len(parts)
    amax = torch.cat([part[1] for part in parts])
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
    return list(amax.split([part.shape[1] for part in parts]))


def _update_part(recipe: DelayedScaling, part: torch.Tensor, reduced: torch.Tensor | None, direction: int) -> None:
    largest = recipe.fp8_format.value[direction]
    choose, compute = recipe.amax_compute_algo, recipe.scaling_factor_compute_algo
    if not callable(choose) and compute is None:
        _C.update_delayed_state(part, reduced, largest, recipe.margin, choose)
        return
    history, scale = part[1:], part[0]  # functions of the user get all rows, and every row moves
    if reduced is not None:
        history[0] = reduced
    amax = choose(history) if callable(choose) else history.amax(0) if choose == "max" else history[0].clone()
    history.copy_(history.roll(-1, 0))
    history[0] = 0
    if compute is not None:
        scale.copy_(compute(amax, scale.clone(), largest, recipe))
    else:
        usable = amax.isfinite() & (amax > 0)
        new = (largest / amax / 2.0**recipe.margin).clamp(max=torch.finfo(torch.float32).max)
        scale.copy_(torch.where(usable, new, scale))
