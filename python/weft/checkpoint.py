"""State dicts of tensor-parallel modules, between group sizes.

Each rank's ``state_dict()`` holds its parts. The whole is what one process without parallelism would save::

    whole = weft.checkpoint.gather_state_dict(model)                    # the same on every rank
    model.load_state_dict(weft.checkpoint.shard_state_dict(whole, model))

Without a process group the same is done on files: ``merge`` and ``split`` take the list of all ranks' state dicts and a
layout, which `layout_of` reads from a module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .linear import Linear
from .native import NativeOperation
from .state_keys import StateKeys

StateDict = Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """How a tensor lies on the ranks: in equal parts of dimension `dim`, or, if that is None, as parts of a sum.

    `stacked` tensors that were joined in that dimension (gate and up, or q, k and v) are each split on their own.
    """

    dim: int | None
    stacked: int = 1

    def merge(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.dim is None:
            return torch.stack(list(parts)).sum(0)
        pieces = [part.chunk(self.stacked, self.dim) for part in parts]
        return torch.cat([piece[i] for i in range(self.stacked) for piece in pieces], self.dim)

    def split(self, key: str, whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        if self.dim is None:  # the first rank brings it, the others nothing
            return [whole if rank == 0 else torch.zeros_like(whole) for rank in range(ranks)]
        if whole.shape[self.dim] % (self.stacked * ranks):
            raise ValueError(
                f"{key}: dimension {self.dim} of {tuple(whole.shape)} does not divide into {self.stacked} stacked "
                f"tensors over {ranks} ranks"
            )
        pieces = [tensor.chunk(ranks, self.dim) for tensor in whole.chunk(self.stacked, self.dim)]
        return [torch.cat([piece[rank] for piece in pieces], self.dim) for rank in range(ranks)]


Layout = dict[str, Spread]  # by key of the state dict, of either kind; what is not named is equal on all ranks


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
    return {key: spread for key, (spread, _) in _described(module, modes, stacked).items()}


def _described(
    module: torch.nn.Module, modes: Mapping[str, str] | None, stacked: Mapping[str, int] | None
) -> dict[str, tuple[Spread, Any]]:
    """For each key of the layout: how its tensor lies on the ranks, and the module it belongs to."""
    modes, stacked, found = dict(modes or {}), dict(stacked or {}), {}
    for name, child in module.named_modules():
        prefix = name + "." if name else ""
        rows = Spread(0, stacked.pop(name, 1))
        if isinstance(child, Linear):
            layout = _of_linear(child, modes.pop(name, child.tensor_parallel_mode), rows)
        else:
            layout = _of_operation(child, rows) if isinstance(child, NativeOperation) else {}
        found.update({prefix + key: (spread, child) for key, spread in layout.items()})
    if modes or stacked:
        raise ValueError(f"modes or stacked name {', '.join([*modes, *stacked])}: the module has no such Linear")
    return found


def _of_linear(linear: Linear, mode: str | None, rows: Spread) -> Layout:
    found: Layout = {}
    if mode == "column":
        found = dict.fromkeys(("weight", "bias"), rows)
    if mode == "row":
        found = {"weight": Spread(1)} | ({} if linear.replicated_bias else {"bias": Spread(None)})
    te_names = linear._te_names()  # has the Parameters that the linear has
    return {key: found[name] for name in te_names if name in found for key in (name, te_names[name])}


def _of_operation(operation: NativeOperation, rows: Spread) -> Layout:
    fields = operation._op.fields()
    if fields.get("tensor_parallel_mode"):
        return {"weight": rows if fields["tensor_parallel_mode"] == "column" else Spread(1)}
    return {"bias": rows} if fields.get("tensor_parallel") else {}


def merge(shards: Sequence[StateDict], layout: Layout) -> dict[str, Any]:
    """The whole state dict of the ranks' ones, given in the order of ranks. No process group is needed."""
    if not shards:
        raise ValueError("merge: no state dicts, expected one for each rank")
    for rank, shard in enumerate(shards):
        if shard.keys() != shards[0].keys():
            different = sorted(shard.keys() ^ shards[0].keys())
            raise ValueError(f"merge: ranks 0 and {rank} have different keys: {', '.join(different)}")
    return {
        key: layout[key].merge([shard[key] for shard in shards]) if key in layout else value
        for key, value in shards[0].items()
    }


def split(whole: StateDict, layout: Layout, ranks: int) -> list[dict[str, Any]]:
    """The state dict of each of `ranks` ranks. A row-parallel bias that is a sum goes to the first rank, the others get
    zeros."""
    shards: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for key, value in whole.items():
        parts = layout[key].split(key, value, ranks) if key in layout else [value] * ranks
        for shard, part in zip(shards, parts, strict=True):
            shard[key] = part
    return shards


# ---- with the groups that the modules name --------------------------------------------------------------------------


def gather_state_dict(module: torch.nn.Module, stacked: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The whole state dict, on every rank. All ranks of the module's groups must call it."""
    described, whole = _described(module, None, stacked), {}
    for key, value in module.state_dict().items():
        if hasattr(value, "full_tensor"):  # a DTensor of FSDP2
            value = value.full_tensor()
        if key in described:
            spread, owner = described[key]
            parts = [torch.empty_like(value) for _ in range(owner.tensor_parallel_size)]
            torch.distributed.all_gather(parts, value.contiguous(), group=owner.tensor_parallel_group)
            value = spread.merge(parts)
        whole[key] = value
    return whole


def shard_state_dict(
    whole: StateDict, module: torch.nn.Module, stacked: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """This rank's part of a whole state dict, for ``module.load_state_dict``."""
    mine = dict(whole)
    for key, (spread, owner) in _described(module, None, stacked).items():
        if key in mine:
            parts = spread.split(key, mine[key], owner.tensor_parallel_size)
            mine[key] = parts[owner.tensor_parallel_group.rank()]
    return mine
