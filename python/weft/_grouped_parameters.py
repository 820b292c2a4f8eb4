"""Parameters of a grouped operation: one for each group, or one for all of them."""

from __future__ import annotations

from typing import Any

import torch


class GroupedParameters(torch.nn.Module):
    """A module with a weight, and maybe a bias, for each of `num_groups` groups.

    They are Parameters `weight0`, `weight1`, …, which at first lie one behind the other in memory, or with
    `single_grouped_weight` one Parameter `weight` of shape [groups, out, in]; biases likewise. A checkpoint of either
    layout loads into the other.
    """

    _op: Any

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
        for kind in ("weight", "bias"):
            parameters.setdefault(kind, None)
        for name, parameter in parameters.items():  # past the checks, which would look at all of them for each
            torch.nn.Module.register_parameter(self, name, parameter)
        if not any(parameter is not None and parameter.is_meta for parameter in parameters.values()):
            self.reset_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "num_groups" and value != self.num_groups:
            kind = type(self).__name__
            raise ValueError(
                f"{kind}: num_groups is {self.num_groups} and cannot become {value}: the Parameters are those of "
                f"{self.num_groups} groups. Make a new {kind} with num_groups={value} and give it the weights to keep"
            )
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        known = [spec[0] for spec in self._op.params()]
        if param is not None and name not in known and name.rstrip("0123456789") in ("weight", "bias"):
            raise ValueError(
                f"{type(self).__name__} has no parameter '{name}'; it has {known[0]} to {known[-1]}. "
                "See bias, single_grouped_weight and single_grouped_bias"
            )
        super().register_parameter(name, param)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        state_dict = dict(state_dict)
        fields = self._op.fields()
        _to_layout(state_dict, prefix + "weight", fields["num_groups"], fields["single_grouped_weight"])
        if fields["bias"]:
            bias = state_dict.get(prefix + "bias")
            if bias is not None and bias.dim() == 3:  # [groups, 1, out]
                state_dict[prefix + "bias"] = bias.squeeze(1)
            _to_layout(state_dict, prefix + "bias", fields["num_groups"], fields["single_grouped_bias"])
        super()._load_from_state_dict(state_dict, prefix, *args)


def _to_layout(state_dict: dict[str, torch.Tensor], key: str, groups: int, single: bool) -> None:
    """Turns one packed tensor into members, or members into a packed one; an incomplete set of members stays."""
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
    """Rows [all of a, all of b] of a gated layer's weight or bias as blocks of `size` rows of a and of b in turn, which
    is what an activation with ``glu_interleave_size=size`` reads."""
    _check_blocks(rows, size)
    return rows.unflatten(0, (2, -1, size)).transpose(0, 1).flatten(0, 2)


def deinterleave_glu(rows: torch.Tensor, size: int) -> torch.Tensor:
    """The inverse of :func:`interleave_glu`."""
    _check_blocks(rows, size)
    return rows.unflatten(0, (-1, 2, size)).transpose(0, 1).flatten(0, 2)


def _check_blocks(rows: torch.Tensor, size: int) -> None:
    if size <= 0 or rows.dim() == 0 or rows.size(0) % (2 * size):
        raise ValueError(f"blocks of {size} rows of a and of b do not fill a tensor of shape {tuple(rows.shape)}")
