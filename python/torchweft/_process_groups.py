"""Process groups. Operations refer to a group by its name in torch.distributed."""

from __future__ import annotations

from typing import Any, cast

import torch

# Fields that hold a group, with the field that holds its size.
GROUP_FIELDS = {"tensor_parallel_group": "tensor_parallel_size", "process_group": "process_group_size"}


def named_group(name: str | None) -> torch.distributed.ProcessGroup | None:
    """Returns the ProcessGroup with this name; None for None."""
    if name is None:
        return None
    from torch._C._distributed_c10d import _resolve_process_group

    return _resolve_process_group(cast("Any", name))


def group_name_and_size(owner: str, group: Any) -> tuple[str | None, int]:
    """Returns the name and size of a ProcessGroup, a 1-D DeviceMesh or the default group (None). The name is None if
    the group has one rank: there is no parallelism then."""
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{owner}: the group is a DeviceMesh with {group.ndim} dimensions, expected 1. Slice it: mesh['tp']."
            )
        group = group.get_group()
    if isinstance(group, str):
        group = named_group(group)
    if group is None:
        group = torch.distributed.group.WORLD
        if group is None:
            raise ValueError(
                f"{owner}: no process group was passed and torch.distributed is not initialized. Pass a group or call "
                "torch.distributed.init_process_group() first."
            )
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(
            f"{owner}: the group is {group!r}, expected a ProcessGroup that contains this rank, a DeviceMesh or None."
        )
    size = group.size()
    return (group.group_name if size > 1 else None), size


def is_dtensor(t: Any) -> bool:
    """Whether a tensor is a DTensor; by name, so that weft does not import torch.distributed.tensor."""
    return type(t).__name__ == "DTensor"


def has_ranks_of(group: Any, other: Any) -> bool:
    """Whether two process groups have the same ranks. Equal meshes, which DTensor does not distinguish, may have
    different groups."""
    if group.group_name == other.group_name:
        return True
    return torch.distributed.get_process_group_ranks(group) == torch.distributed.get_process_group_ranks(other)


def resolve_parallel(owner: str, arguments: dict[str, Any]) -> None:
    """Checks the parallel arguments of an operation in place: replaces groups by names and fills in their sizes."""
    mode = arguments.get("tensor_parallel_mode")
    if mode not in (None, "column", "row"):
        raise ValueError(f"{owner}: tensor_parallel_mode is {mode!r}, expected None, 'column' or 'row'.")
    if "process_group" in arguments:
        field, needed = "process_group", arguments["process_group"] is not None or _is_initialized()
    elif "tensor_parallel_mode" in arguments:
        field, needed = "tensor_parallel_group", mode is not None
    elif "tensor_parallel" in arguments:
        needed = arguments["tensor_parallel"] or arguments.get("sequence_parallel", False)
        field = "tensor_parallel_group"
    else:
        return
    name, size = group_name_and_size(owner, arguments[field]) if needed else (None, 1)
    arguments[field], arguments[GROUP_FIELDS[field]] = name, size
    if size == 1:
        for flag, off in (("tensor_parallel_mode", None), ("tensor_parallel", False), ("sequence_parallel", False)):
            if flag in arguments:
                arguments[flag] = off


def _is_initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
