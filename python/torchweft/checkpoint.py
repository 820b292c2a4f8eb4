"""Resharding of tensor-parallel state dicts: load a checkpoint on another number of ranks.

Each rank's ``state_dict()`` holds its shards. The full state dict is what a single process would save::

    full = torchweft.checkpoint.gather_state_dict(model)                    # the same on every rank
    model.load_state_dict(torchweft.checkpoint.shard_state_dict(full, model))

:func:`merge` and :func:`split` do the same without a process group, on the list of all ranks' state dicts. They take a
layout, which :func:`layout_of` reads from a module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import _delayed_scaling
from ._linear import Linear
from ._native import NativeOperation
from ._process_groups import has_ranks_of
from ._state_keys import StateKeys

__all__ = [
    "Layout",
    "Placement",
    "create_delayed_states",
    "distributed_state_dict",
    "gather_state_dict",
    "layout_of",
    "load_distributed_state_dict",
    "merge",
    "set_te_keys",
    "shard_state_dict",
    "split",
]

StateDict = Mapping[str, Any]


@dataclass(frozen=True)
class Placement:
    """How a tensor is distributed over ranks: sharded in equal parts along a dimension, or as terms of a sum.

    Args:
        dim: the sharded dimension (DTensor's ``Shard(dim)``), or None if the full tensor is the sum of the ranks'
            tensors (DTensor's ``Partial``).
        stacked: number of tensors concatenated along `dim` (2 for gate and up, 3 for q, k and v). Each of them is
            sharded separately.
    """

    dim: int | None
    stacked: int = 1

    def merge(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the full tensor of the shards, given in the order of ranks."""
        if self.dim is None:
            return torch.stack(list(shards)).sum(0)
        chunks = [shard.chunk(self.stacked, self.dim) for shard in shards]
        return torch.cat([chunk[i] for i in range(self.stacked) for chunk in chunks], self.dim)

    def split(self, key: str, full: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        """Returns the shards of `full`, one per rank. `key` is its name in error messages."""
        if self.dim is None:  # a sum: rank 0 holds the tensor, the others zeros
            return [full if rank == 0 else torch.zeros_like(full) for rank in range(ranks)]
        if full.shape[self.dim] % (self.stacked * ranks):
            raise ValueError(
                f"{key}: dimension {self.dim} of {tuple(full.shape)} does not divide into {self.stacked} stacked "
                f"tensors over {ranks} ranks."
            )
        chunks = [tensor.chunk(ranks, self.dim) for tensor in full.chunk(self.stacked, self.dim)]
        return [torch.cat([chunk[rank] for chunk in chunks], self.dim) for rank in range(ranks)]


# By state_dict key, both the Parameter's name and Transformer Engine's key. Tensors without an entry are replicated.
Layout = dict[str, Placement]


def create_delayed_states(module: torch.nn.Module, amax_history_len: int = 1024) -> torch.nn.Module:
    """Creates the state of delayed scaling of every linear in `module`, as a first call in its region would.

    ``torch.distributed.checkpoint`` loads into tensors that exist and have the same size, so a new module needs its
    states before it loads those of a checkpoint.

    Args:
        module: the module.
        amax_history_len: of the recipe that the checkpoint was saved with.

    Returns:
        `module`.

    Example::

        >>> linear = torchweft.checkpoint.create_delayed_states(torchweft.ops.Linear(4, 2), amax_history_len=16)
        >>> list(linear.state_dict())
        ['weight', 'bias', '_extra_state']
    """
    for child in module.modules():
        if getattr(child, "_has_delayed_scaling", False):
            _delayed_scaling.state_of(child, amax_history_len)
    return module


def set_te_keys(module: torch.nn.Module, enabled: bool = True) -> torch.nn.Module:
    """Selects the keys that ``state_dict`` writes for every weft operation in `module`.

    Sets the attribute `te_keys` of each operation; operations added later are not affected. Both kinds of keys load.

    Args:
        module: the module.
        enabled: True for Transformer Engine's keys (``basic_ops.0.weight``, ``_extra_state``), False for the names of
            the Parameters.

    Returns:
        `module`.

    Example::

        >>> state = torchweft.checkpoint.set_te_keys(model).state_dict()
    """
    for child in module.modules():
        if isinstance(child, StateKeys):
            child.te_keys = enabled
    return module


def layout_of(
    module: torch.nn.Module, modes: Mapping[str, str] | None = None, stacked: Mapping[str, int] | None = None
) -> Layout:
    """Returns how the tensors of a module are sharded over ranks.

    Args:
        module: the module. Linears created with `tensor_parallel_mode` are recognized.
        modes: for a module created without process groups, the mode of each parallel linear by name:
            ``{"mlp.up": "column", "mlp.down": "row"}``.
        stacked: column-parallel linears whose output features are several concatenated tensors, with the number of
            tensors: ``{"mlp.gate_up": 2, "attention.qkv": 3}``.

    Returns:
        A dictionary of state_dict keys to :class:`Placement`. Tensors without an entry are replicated.
    """
    return {key: placement for keys, placement, _ in _sharded_tensors(module, modes, stacked) for key in keys}


class _ShardedTensor(NamedTuple):
    """A tensor that is sharded over the ranks of the module that owns it."""

    keys: tuple[str, ...]  # the Parameter's name and Transformer Engine's key
    placement: Placement
    owner: Any


def _sharded_tensors(
    module: torch.nn.Module, modes: Mapping[str, str] | None, stacked: Mapping[str, int] | None
) -> list[_ShardedTensor]:
    """Returns the sharded tensors of a module; see :func:`layout_of`."""
    modes, stacked, found = dict(modes or {}), dict(stacked or {}), []
    for name, child in module.named_modules():
        # The state dict of a module with activation checkpointing omits the name of the wrapper.
        name = name.replace("_checkpoint_wrapped_module.", "").removesuffix("._checkpoint_wrapped_module")
        prefix = name + "." if name else ""
        rows = Placement(0, stacked.get(name, 1))  # of column-parallel weights and biases
        if isinstance(child, Linear):
            layout = _linear_layout(child, modes.pop(name, child.tensor_parallel_mode), rows)
        else:
            layout = _operation_layout(child, rows) if isinstance(child, NativeOperation) else {}
        te_names = child._te_names() if isinstance(child, Linear) else {}
        for own, placement in layout.items():
            keys = dict.fromkeys((prefix + own, prefix + te_names.get(own, own)))
            found.append(_ShardedTensor(tuple(keys), placement, child))
        if rows in layout.values():
            stacked.pop(name, None)
    if modes or stacked:
        raise ValueError(
            f"layout_of: modes or stacked contain {', '.join([*modes, *stacked])}, expected names of Linears "
            "(in stacked of column-parallel ones): "
            f"{', '.join(name for name, child in module.named_modules() if isinstance(child, Linear))}."
        )
    return found


def _linear_layout(linear: Linear, mode: str | None, rows: Placement) -> Layout:
    found: Layout = {}
    if mode == "column":
        found = dict.fromkeys(("weight", "bias"), rows)
    if mode == "row":
        found = {"weight": Placement(1)} | ({} if linear.replicated_bias else {"bias": Placement(None)})
    return {name: found[name] for name in linear._te_names() if name in found}  # Parameters that the linear has


def _sharded_in(
    state: StateDict, module: torch.nn.Module, stacked: Mapping[str, int] | None
) -> dict[str, tuple[Placement, Any]]:
    """Returns {key: (placement, owner)} of the sharded tensors in a state dict of the module, in the same order on all
    ranks. Raises if one is missing: under another name it would be treated as replicated."""
    found = {}
    for keys, placement, owner in _sharded_tensors(module, None, stacked):
        key = next((key for key in keys if key in state), None)
        if key is None:
            raise ValueError(
                f"The state dict has no {keys[0]}, which is sharded over ranks. Remove wrappers and parametrizations "
                "that rename it, or pass the state dict of this module."
            )
        found[key] = placement, owner
    return found


def _operation_layout(operation: NativeOperation, rows: Placement) -> Layout:
    fields = operation._op.fields()
    if fields.get("tensor_parallel_mode"):
        return {"weight": rows if fields["tensor_parallel_mode"] == "column" else Placement(1)}
    return {"bias": rows} if fields.get("tensor_parallel") else {}


def merge(state_dicts: Sequence[StateDict], layout: Layout) -> dict[str, Any]:
    """Merges the state dicts of all ranks into the full state dict. Requires no process group.

    Args:
        state_dicts: one state dict per rank, in the order of ranks.
        layout: from :func:`layout_of`.

    Returns:
        The full state dict.
    """
    if not state_dicts:
        raise ValueError("merge: got no state dicts, expected one for each rank.")
    for rank, state_dict in enumerate(state_dicts):
        if state_dict.keys() != state_dicts[0].keys():
            different = sorted(state_dict.keys() ^ state_dicts[0].keys())
            raise ValueError(f"merge: ranks 0 and {rank} have different keys: {', '.join(different)}.")
    return {
        key: layout[key].merge([state_dict[key] for state_dict in state_dicts]) if key in layout else value
        for key, value in state_dicts[0].items()
    }


def split(full: StateDict, layout: Layout, ranks: int) -> list[dict[str, Any]]:
    """Splits a full state dict into one per rank. Requires no process group.

    A row-parallel bias that is summed over ranks goes to rank 0; the other ranks get zeros.

    Args:
        full: the full state dict.
        layout: from :func:`layout_of`.
        ranks: number of ranks.

    Returns:
        A list with the state dict of each rank.
    """
    state_dicts: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for key, value in full.items():
        shards = layout[key].split(key, value, ranks) if key in layout else [value] * ranks
        for state_dict, shard in zip(state_dicts, shards, strict=True):
            state_dict[key] = shard
    return state_dicts


# ---- over the process groups of the modules -------------------------------------------------------------------------


def gather_state_dict(module: torch.nn.Module, stacked: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Gathers the full state dict on every rank. All ranks of the module's process groups must call it.

    Args:
        module: the tensor-parallel module. Sharded Parameters of FSDP2 are gathered too.
        stacked: see :func:`layout_of`.

    Returns:
        The full state dict.
    """
    state, full = module.state_dict(), {}
    placements = _sharded_in(state, module, stacked)
    for key, value in state.items():
        sharded = key in placements and not _is_distributed(key, value, *placements[key])
        if hasattr(value, "full_tensor"):  # a DTensor
            value = value.full_tensor()
        full[key] = _gather(value, *placements[key]) if sharded else value
    return full


def _parameter(key: str, owner: Any) -> Any:
    """Returns the Parameter of this name or Transformer Engine's key."""
    return owner._parameters[key.rpartition(".")[2]]


def _is_distributed(key: str, value: Any, placement: Placement, owner: Any) -> bool:
    """Whether a tensor is a DTensor over the tensor-parallel group of its owner, see torchweft.parallel. Raises if it
    has another placement than the layout."""
    mesh, group = getattr(value, "device_mesh", None), owner.tensor_parallel_group
    dims = [] if mesh is None else [dim for dim in range(mesh.ndim) if has_ranks_of(mesh.get_group(dim), group)]
    if not dims:
        return False
    if not _is_shard(placement) or not value.placements[dims[-1]].is_shard(placement.dim):
        raise ValueError(
            f"{key} is a DTensor with {value.placements}, but its layout is {placement}. Pass no `stacked` for it: "
            "DTensors are not stacked."
        )
    return True


def _gather(value: torch.Tensor, placement: Placement, owner: Any) -> torch.Tensor:
    """Returns the full tensor of the shards of the ranks of `owner`."""
    shards = [torch.empty_like(value) for _ in range(owner.tensor_parallel_size)]
    torch.distributed.all_gather(shards, value.contiguous(), group=owner.tensor_parallel_group)
    return placement.merge(shards)


def shard_state_dict(
    full: StateDict, module: torch.nn.Module, stacked: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Returns this rank's shards of a full state dict, for ``module.load_state_dict``.

    Args:
        full: the full state dict.
        module: the tensor-parallel module.
        stacked: see :func:`layout_of`.

    Returns:
        This rank's state dict.
    """
    local = dict(full)
    for key, value in module.state_dict().items():
        if key in local and (placements := getattr(value, "placements", ())) and placements[0].is_replicate():
            local[key] = _distribute(key, local[key], value)
    for keys, placement, owner in _sharded_tensors(module, None, stacked):
        for key in keys:
            if key in local:
                local[key] = _own_shard(key, local[key], placement, owner)
    return local


def _own_shard(key: str, full: torch.Tensor, placement: Placement, owner: Any) -> torch.Tensor:
    rank: int = owner.tensor_parallel_group.rank()
    shard = placement.split(key, full, owner.tensor_parallel_size)[rank]
    param = _parameter(key, owner)
    if not _is_distributed(key, param, placement, owner):
        return shard
    return _distribute(key, shard, param)


def _distribute(key: str, shard: torch.Tensor, like: Any) -> torch.Tensor:
    """Returns a shard as a DTensor with the mesh and placements of `like`."""
    from torch.distributed.tensor import DTensor

    if like.device_mesh.ndim > 1:
        raise NotImplementedError(
            f"shard_state_dict: {key} is also sharded by FSDP2. Load the full state dict with "
            "torch.distributed.checkpoint.state_dict.set_model_state_dict and full_state_dict=True."
        )
    return DTensor.from_local(shard.contiguous(), like.device_mesh, like.placements, run_check=False)


# ---- torch.distributed.checkpoint -----------------------------------------------------------------------------------


def distributed_state_dict(module: torch.nn.Module, stacked: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Returns the state dict of a tensor-parallel module for ``torch.distributed.checkpoint``, which would treat each
    rank's shard as the full tensor. All ranks of the module's process groups must call it.

    A sharded tensor is a DTensor that shares its memory with the module, so that it can be saved and loaded on any
    number of ranks. Stacked tensors, and biases that are summed over ranks, are gathered.

    Args:
        module: the tensor-parallel module.
        stacked: see :func:`layout_of`.

    Returns:
        The state dict. After ``dcp.load`` pass it to :func:`load_distributed_state_dict`.

    Example::

        >>> import tempfile, torch.distributed.checkpoint as dcp
        >>> folder = tempfile.mkdtemp()
        >>> metadata = dcp.save(torchweft.checkpoint.distributed_state_dict(model), checkpoint_id=folder)
        >>> state = torchweft.checkpoint.distributed_state_dict(model)
        >>> dcp.load(state, checkpoint_id=folder)
        >>> torchweft.checkpoint.load_distributed_state_dict(model, state)
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    state = module.state_dict()
    meshes: dict[str, DeviceMesh] = {}
    for key, (placement, owner) in _sharded_in(state, module, stacked).items():
        value, group = state[key], owner.tensor_parallel_group
        if _is_distributed(key, value, placement, owner):
            continue
        if isinstance(value, DTensor):
            raise NotImplementedError(
                f"distributed_state_dict: {key} is sharded over a tensor-parallel group and by FSDP2, which is not "
                "supported. Call torchweft.parallel.distribute_parameters before fully_shard, or save "
                "gather_state_dict(module)."
            )
        if not _is_shard(placement):
            state[key] = _gather(value, placement, owner)
            continue
        if group.group_name not in meshes:
            meshes[group.group_name] = DeviceMesh.from_group(group, value.device.type)
        assert placement.dim is not None
        state[key] = DTensor.from_local(value, meshes[group.group_name], [Shard(placement.dim)], run_check=False)
    return state


def _is_shard(placement: Placement) -> bool:
    """Whether DTensor has this placement; others are gathered."""
    return placement.dim is not None and placement.stacked == 1


def load_distributed_state_dict(
    module: torch.nn.Module, state: StateDict, stacked: Mapping[str, int] | None = None
) -> None:
    """Loads what :func:`distributed_state_dict` returned and ``dcp.load`` filled.

    Args:
        module: the tensor-parallel module.
        state: the state dict.
        stacked: as for :func:`distributed_state_dict`.
    """
    from torch.distributed.tensor import DTensor

    local = dict(state)
    for key, (placement, owner) in _sharded_in(state, module, stacked).items():
        value = state[key]
        if _is_distributed(key, _parameter(key, owner), placement, owner):
            continue
        if isinstance(value, DTensor) != _is_shard(placement):
            raise ValueError(
                f"load_distributed_state_dict: {key} is {'' if isinstance(value, DTensor) else 'not '}a DTensor. Pass "
                "the result of distributed_state_dict, and the same `stacked`."
            )
        local[key] = value.to_local() if isinstance(value, DTensor) else _own_shard(key, value, placement, owner)
    module.load_state_dict(local)
