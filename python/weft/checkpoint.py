"""State dicts of tensor-parallel modules, between group sizes.

Each rank's ``state_dict()`` holds its parts. The whole is what one process without parallelism would save::

    full = weft.checkpoint.gather_state_dict(model)                    # the same on every rank
    model.load_state_dict(weft.checkpoint.shard_state_dict(full, model))

Without a process group the same is done on files: ``merge`` and ``split`` take the list of all ranks' state dicts and a
layout, which `layout_of` reads from a module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._linear import Linear
from ._native import NativeOperation
from ._state_keys import StateKeys

__all__ = [
    "Layout",
    "Placement",
    "gather_state_dict",
    "layout_of",
    "merge",
    "set_te_keys",
    "shard_state_dict",
    "split",
]

StateDict = Mapping[str, Any]


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on the ranks: in equal parts of dimension `dim`, or, if that is None, as parts of a sum.

    `stacked` tensors that were joined in that dimension (gate and up, or q, k and v) are each split on their own.
    """

    dim: int | None
    stacked: int = 1

    def merge(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.dim is None:
            return torch.stack(list(shards)).sum(0)
        chunks = [shard.chunk(self.stacked, self.dim) for shard in shards]
        return torch.cat([chunk[i] for i in range(self.stacked) for chunk in chunks], self.dim)

    def split(self, key: str, full: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        if self.dim is None:  # the first rank brings it, the others nothing
            return [full if rank == 0 else torch.zeros_like(full) for rank in range(ranks)]
        if full.shape[self.dim] % (self.stacked * ranks):
            raise ValueError(
                f"{key}: dimension {self.dim} of {tuple(full.shape)} does not divide into {self.stacked} stacked "
                f"tensors over {ranks} ranks"
            )
        chunks = [tensor.chunk(ranks, self.dim) for tensor in full.chunk(self.stacked, self.dim)]
        return [torch.cat([chunk[rank] for chunk in chunks], self.dim) for rank in range(ranks)]


Layout = dict[str, Placement]  # by key of the state dict, of either kind; what is not named is equal on all ranks


def set_te_keys(module: torch.nn.Module, enabled: bool = True) -> torch.nn.Module:
    """Chooses the keys that ``state_dict`` writes for every weft operation below `module`: Transformer Engine's
    (`basic_ops.0.weight`, `_extra_state`), or with ``enabled=False`` the names of the Parameters.

    The same as setting the attribute `te_keys` of each. Operations that are added later keep their own choice. Both
    kinds of keys load.

    Returns:
        `module`.
    """
    for child in module.modules():
        if isinstance(child, StateKeys):
            child.te_keys = enabled
    return module


def layout_of(
    module: torch.nn.Module, modes: Mapping[str, str] | None = None, stacked: Mapping[str, int] | None = None
) -> Layout:
    """How the tensors of a module lie on the ranks.

    A parallel module knows its modes. For one that was made without groups `modes` names its parallel linears:
    ``{"mlp.up": "column", "mlp.down": "row"}``. `stacked` names column-parallel linears whose output features are
    several tensors one after the other: ``{"mlp.gate_up": 2, "attention.qkv": 3}``.
    """
    return {key: placement for key, (placement, _) in _placements_with_owners(module, modes, stacked).items()}


def _placements_with_owners(
    module: torch.nn.Module, modes: Mapping[str, str] | None, stacked: Mapping[str, int] | None
) -> dict[str, tuple[Placement, Any]]:
    """For each key of the layout: how its tensor lies on the ranks, and the module it belongs to."""
    modes, stacked, found = dict(modes or {}), dict(stacked or {}), {}
    for name, child in module.named_modules():
        prefix = name + "." if name else ""
        rows = Placement(0, stacked.pop(name, 1))
        if isinstance(child, Linear):
            layout = _linear_layout(child, modes.pop(name, child.tensor_parallel_mode), rows)
        else:
            layout = _operation_layout(child, rows) if isinstance(child, NativeOperation) else {}
        found.update({prefix + key: (placement, child) for key, placement in layout.items()})
    if modes or stacked:
        raise ValueError(f"modes or stacked name {', '.join([*modes, *stacked])}: the module has no such Linear")
    return found


def _linear_layout(linear: Linear, mode: str | None, rows: Placement) -> Layout:
    found: Layout = {}
    if mode == "column":
        found = dict.fromkeys(("weight", "bias"), rows)
    if mode == "row":
        found = {"weight": Placement(1)} | ({} if linear.replicated_bias else {"bias": Placement(None)})
    te_names = linear._te_names()  # has the Parameters that the linear has
    return {key: found[name] for name in te_names if name in found for key in (name, te_names[name])}


def _operation_layout(operation: NativeOperation, rows: Placement) -> Layout:
    fields = operation._op.fields()
    if fields.get("tensor_parallel_mode"):
        return {"weight": rows if fields["tensor_parallel_mode"] == "column" else Placement(1)}
    return {"bias": rows} if fields.get("tensor_parallel") else {}


def merge(state_dicts: Sequence[StateDict], layout: Layout) -> dict[str, Any]:
    """The whole state dict of the ranks' ones, given in the order of ranks. No process group is needed."""
    if not state_dicts:
        raise ValueError("merge: no state dicts, expected one for each rank")
    for rank, state_dict in enumerate(state_dicts):
        if state_dict.keys() != state_dicts[0].keys():
            different = sorted(state_dict.keys() ^ state_dicts[0].keys())
            raise ValueError(f"merge: ranks 0 and {rank} have different keys: {', '.join(different)}")
    return {
        key: layout[key].merge([state_dict[key] for state_dict in state_dicts]) if key in layout else value
        for key, value in state_dicts[0].items()
    }


def split(full: StateDict, layout: Layout, ranks: int) -> list[dict[str, Any]]:
    """The state dict of each of `ranks` ranks. A row-parallel bias that is a sum goes to the first rank, the others get
    zeros."""
    state_dicts: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for key, value in full.items():
        shards = layout[key].split(key, value, ranks) if key in layout else [value] * ranks
        for state_dict, shard in zip(state_dicts, shards, strict=True):
            state_dict[key] = shard
    return state_dicts


# ---- with the groups that the modules name --------------------------------------------------------------------------


def gather_state_dict(module: torch.nn.Module, stacked: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The whole state dict, on every rank. All ranks of the module's groups must call it."""
    placements, full = _placements_with_owners(module, None, stacked), {}
    for key, value in module.state_dict().items():
        if hasattr(value, "full_tensor"):  # a DTensor of FSDP2
            value = value.full_tensor()
        if key in placements:
            placement, owner = placements[key]
            shards = [torch.empty_like(value) for _ in range(owner.tensor_parallel_size)]
            torch.distributed.all_gather(shards, value.contiguous(), group=owner.tensor_parallel_group)
            value = placement.merge(shards)
        full[key] = value
    return full


def shard_state_dict(
    full: StateDict, module: torch.nn.Module, stacked: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """This rank's part of a whole state dict, for ``module.load_state_dict``."""
    local = dict(full)
    for key, (placement, owner) in _placements_with_owners(module, None, stacked).items():
        if key in local:
            shards = placement.split(key, local[key], owner.tensor_parallel_size)
            local[key] = shards[owner.tensor_parallel_group.rank()]
    return local
