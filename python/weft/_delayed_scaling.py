"""Delayed scaling: modules own scales and histories of maximum magnitudes, and regions update them.

A state has one part for forward (input and weight) and one for backward (gradient of the output), each float32
[1 + history, tensors]: the scales, then the history, whose first row collects the maxima of the current step, the
second is the oldest and the last the newest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from . import _C
from ._autocast import Region, active
from .recipe import DelayedScaling

_ATTRIBUTE = "_delayed_scaling"
FORWARD, BACKWARD = 0, 1
_TENSORS = (2, 1)
_VERSION = 7766561.0  # first value of the saved form; float32 holds it exactly
_MAX_LENGTH = 1 << 20


def state_of(operation: torch.nn.Module, length: int) -> list[torch.Tensor]:
    """Returns the state of an operation, for forward and backward; creates it, or changes the length of its history.
    The module that owns the operation's Parameters owns it."""
    owner = operation.__dict__.get("_owner", operation)
    parts: list[torch.Tensor] | None = owner.__dict__.get(_ATTRIBUTE)
    if parts is None:
        parts = [_C.make_delayed_state(length, tensors) for tensors in _TENSORS]
        owner.__dict__[_ATTRIBUTE] = parts
    for i, part in enumerate(parts):
        if len(part) != 1 + length:
            parts[i] = _resized(part, length)
    return parts


def _resized(part: torch.Tensor, length: int) -> torch.Tensor:
    """Returns a state with the newest rows of the history."""
    resized = _C.make_delayed_state(length, part.shape[1])
    resized[:2] = part[:2]
    kept = min(length, len(part) - 1) - 1
    if kept > 0:
        resized[-kept:] = part[-kept:]
    return resized


def save(module: torch.nn.Module) -> torch.Tensor | None:
    """Returns the state of a module as one tensor for its ``state_dict``: float32, the version, the length of the
    history, then the values. None without a state."""
    parts: list[torch.Tensor] | None = module.__dict__.get(_ATTRIBUTE)
    if parts is None:
        return None
    head = torch.tensor([_VERSION, len(parts[0]) - 1.0])
    return torch.cat([head, *(part.flatten() for part in parts)])


def load(module: torch.nn.Module, saved: Any, key: str) -> None:
    """Sets the state of a module to what `save` returned. Anything else is ignored, as Transformer Engine's state is.

    Raises:
        ValueError: if it begins like a state, but is not one.
    """
    plain = isinstance(saved, torch.Tensor) and saved.layout == torch.strided and not saved.is_meta
    if not plain or saved.dtype != torch.float32 or saved.dim() != 1 or len(saved) < 2 or saved[0] != _VERSION:
        return
    values = saved.detach().cpu()
    length = values[1].item()
    if not 1 <= length <= _MAX_LENGTH or len(values) != 2 + (1 + int(length)) * sum(_TENSORS):
        raise ValueError(f"weft: {key} has {len(values)} values, which do not fit a history of {length}.")
    rows = 1 + int(length)
    flat = values[2:].split([rows * tensors for tensors in _TENSORS])
    parts = [part.reshape(rows, -1).clone() for part in flat]
    for part in parts:
        if not (part[0].isfinite() & (part[0] > 0)).all() or not (part[1:] >= 0).all():
            raise ValueError(f"weft: {key} has a scale that is not positive, or a negative maximum.")
    module.__dict__[_ATTRIBUTE] = parts


def use_state(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the state of a module for a call, and adds it to the states that the region updates. Without gradients,
    and where a call is repeated within a backward, the maxima are not recorded."""
    recipe = active.recipe
    assert isinstance(recipe, DelayedScaling)
    forward, backward = state_of(module, recipe.amax_history_len)
    if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        return forward.clone(), backward
    assert active.region is not None
    active.region.used.setdefault(id(recipe), (recipe, {}))[1][id(module)] = module
    return forward, backward


def update_after_backward(output: torch.Tensor) -> None:
    """Updates the scales of the gradients of a region after the backward of its first pipeline, which ends last."""
    region = active.region
    if region is None or region.updates_backward or torch._C._current_graph_task_id() != -1:
        return
    region.updates_backward = True
    assert output.grad_fn is not None
    output.grad_fn.register_hook(lambda *_: _update(region, BACKWARD))


def update_after_forward(region: Region) -> None:
    """Updates the scales of inputs and weights when the outermost region ends."""
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
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
