"""Parameters of a grouped operation: one per group, or one for all groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _C


class GroupedParameters(torch.nn.Module):
    """A module with a weight, and optionally a bias, for each of `num_groups` groups (experts).

    The Parameters are `weight0`, `bias0`, `weight1`, …, in this order, by which optimizer states are keyed. The weights
    are initially adjacent in memory; with `single_grouped_weight` they are one Parameter `weight` of shape
    [groups, out, in]. The same holds for biases and `single_grouped_bias`. A checkpoint of either layout loads into
    the other.
    """

    _op: _C.Op
    reset_parameters: Callable[..., None]
    _has_delayed_scaling = False

    def _make_parameters(self, device: torch.device | str | None) -> None:
        specs = self._op.params()
        groups = self._op.fields()["num_groups"]
        parameters: dict[str, torch.nn.Parameter | None] = {}
        for kind in ("weight", "bias"):
            members = [spec for spec in specs if spec[0] != kind and spec[0].startswith(kind)]
            if members:
                _, shape, dtype, *_ = members[0]
                block = torch.empty((groups, *shape), dtype=dtype, device=device)
                parameters |= {
                    name: torch.nn.Parameter(member) for (name, *_), member in zip(members, block, strict=True)
                }
            else:
                parameters |= {f"{kind}{i}": None for i in range(groups)}
        for name, shape, dtype, *_ in specs:
            if name in ("weight", "bias"):
                parameters[name] = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        order = [f"{kind}{group}" for group in range(groups) for kind in ("weight", "bias")]
        for name in (*order, "weight", "bias"):  # bypasses the override below, which checks all names each time
            torch.nn.Module.register_parameter(self, name, parameters.get(name))
        if not any(parameter is not None and parameter.is_meta for parameter in parameters.values()):
            self.reset_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "num_groups" and value != self.num_groups:
            kind = type(self).__name__
            raise ValueError(
                f"{kind}: num_groups is {self.num_groups} and cannot become {value}, because the Parameters exist for "
                f"{self.num_groups} groups. Create a new {kind} with num_groups={value} and copy the weights to keep."
            )
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        known = [spec[0] for spec in self._op.params()]
        if param is not None and name not in known and name.rstrip("0123456789") in ("weight", "bias"):
            raise ValueError(
                f"{type(self).__name__} has no parameter '{name}'; it has {known[0]} to {known[-1]}. "
                "See the arguments bias, single_grouped_weight and single_grouped_bias."
            )
        super().register_parameter(name, param)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict = dict(state_dict)
        fields = self._op.fields()
        to_layout(state_dict, prefix + "weight", fields["num_groups"], fields["single_grouped_weight"])
        if fields["bias"]:
            bias = state_dict.get(prefix + "bias")
            if bias is not None and bias.dim() == 3:  # [groups, 1, out]
                state_dict[prefix + "bias"] = bias.squeeze(1)
            to_layout(state_dict, prefix + "bias", fields["num_groups"], fields["single_grouped_bias"])
        super()._load_from_state_dict(state_dict, prefix, *args)


def to_layout(state_dict: dict[str, torch.Tensor], key: str, groups: int, single: bool) -> None:
    """Splits a stacked tensor into one per group, or stacks them; an incomplete set is left as it is."""
    members = [f"{key}{i}" for i in range(groups)]
    found = [name for name in members if name in state_dict]
    if single and key not in state_dict and len(found) == groups:
        state_dict[key] = torch.stack([state_dict[name] for name in members])
    if single and key in state_dict:
        for name in found:
            del state_dict[name]
    elif not single and key in state_dict and not found:
        state_dict.update(zip(members, state_dict.pop(key).unbind(0), strict=False))
    elif not single and len(found) == groups:
        state_dict.pop(key, None)


def interleave_glu(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Interleaves the two halves of a gated layer's weight or bias in blocks of rows.

    Use it to load a checkpoint whose rows are [all of a, all of b] into a layer whose activation has
    ``glu_interleave_size=size``.

    Args:
        rows: weight or bias of the layer, rows of a first, then rows of b.
        size: rows per block.

    Returns:
        A tensor with `size` rows of a, `size` rows of b, `size` rows of a, and so on.

    Shape:
        - rows: ``(2 * n, ...)`` with n a multiple of `size`.
        - Output: same as `rows`.

    Example::

        >>> torchweft.interleave_glu(torch.arange(8), 2)
        tensor([0, 1, 4, 5, 2, 3, 6, 7])
    """
    return _swap_blocks(rows, size, (2, -1, size))


def deinterleave_glu(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Inverse of :func:`interleave_glu`: returns the rows as [all of a, all of b].

    Args:
        rows: weight or bias with alternating blocks of `size` rows of a and of b.
        size: rows per block.

    Returns:
        A tensor with the rows of a first, then the rows of b.

    Shape:
        - rows: ``(2 * n, ...)`` with n a multiple of `size`.
        - Output: same as `rows`.

    Example::

        >>> torchweft.deinterleave_glu(torch.tensor([0, 1, 4, 5, 2, 3, 6, 7]), 2)
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    return _swap_blocks(rows, size, (-1, 2, size))


def _swap_blocks(rows: torch.Tensor, size: int, shape: tuple[int, int, int]) -> torch.Tensor:
    """Transposes the blocks of rows, which `shape` numbers by two indices."""
    if size <= 0 or rows.dim() == 0 or rows.size(0) % (2 * size):
        raise ValueError(
            f"GLU interleaving: got size {size} and a tensor of shape {tuple(rows.shape)}, expected size > 0 and a "
            "first dimension that is a multiple of 2 * size."
        )
    blocks: torch.Tensor = rows.unflatten(0, shape)
    return blocks.transpose(0, 1).flatten(0, 2)
