"""Parameters of tensor-parallel operations as DTensors.

A DTensor knows how it is sharded, so that FSDP2, ``torch.distributed.checkpoint`` and its optimizer states work on any
mesh. Kernels read the local tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ._linear import Linear
from ._native import NativeOperation
from ._process_groups import has_ranks_of, resolve_parallel
from .checkpoint import _is_shard, _sharded_tensors

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["ColwiseParallel", "RowwiseParallel", "distribute_parameters"]


class _Slot(NamedTuple):
    """Where a module holds a Parameter."""

    key: str
    module: torch.nn.Module
    name: str
    param: torch.nn.Parameter


def distribute_parameters(module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Replaces the Parameters of the operations in a module by DTensors, which share their memory: sharded ones by
    ``Shard``, the others by ``Replicate``. Parameters of `GroupedLinear` and of modules that are not operations stay.

    Call it before you create the optimizer, register hooks of Parameters and call ``fully_shard``. DDP does not take
    DTensors.

    Args:
        module: a module with operations whose `tensor_parallel_group` is `mesh` or its process group.
        mesh: a mesh of one dimension; of a larger one, ``mesh["tp"]``.

    Returns:
        `module`.

    Example::

        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        linear = torchweft.ops.Linear(8, 4, tensor_parallel_mode="column", tensor_parallel_group=mesh["tp"])
        model = fully_shard(torchweft.parallel.distribute_parameters(linear, mesh["tp"]), mesh=mesh["dp"])
    """
    who = "distribute_parameters"
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise TypeError(f"{who}: mesh is {mesh!r}, expected a DeviceMesh of one dimension, such as mesh['tp'].")
    if mesh.size() == 1:
        return module
    placements = _placements(who, module, mesh)
    replaced = {param: _distribute(param, mesh, placement) for param, placement in placements.items()}
    for slot in _slots(module):
        if slot.param in replaced:
            setattr(slot.module, slot.name, replaced[slot.param])
    return module


def _slots(module: torch.nn.Module) -> list[_Slot]:
    return [
        _Slot(f"{path}.{name}" if path else name, child, name, param)
        for path, child in module.named_modules(remove_duplicate=False)
        for name, param in child._parameters.items()
        if param is not None
    ]


def _placements(who: str, module: torch.nn.Module, mesh: DeviceMesh) -> dict[torch.nn.Parameter, Placement]:
    """Returns the placement of each Parameter to be replaced. Raises for what DTensors cannot represent."""
    sharded = _shards(who, module, mesh)
    found: dict[torch.nn.Parameter, Placement] = {}
    for key, owner, name, param in _slots(module):
        if not isinstance(owner, Linear | NativeOperation) or hasattr(owner, "num_groups"):
            continue
        own = sharded.get((id(owner), name), Replicate())
        if found.setdefault(param, own) != own:
            _reject(who, key, f"belongs to several operations, as {own} and as {found[param]}. Untie them.")
        if isinstance(param, DTensor) and not _is_distributed(owner, name, param, mesh, own):
            raise ValueError(
                f"{who}: {key} is already a DTensor over {param.device_mesh} with {param.placements}. Call it before "
                "fully_shard."
            )
    for key, owner, _, param in _slots(module):
        if param in found and not isinstance(owner, Linear | NativeOperation):
            _reject(who, key, f"also belongs to a {type(owner).__name__}, which does not read DTensors. Untie them.")
    return found


def _shards(who: str, module: torch.nn.Module, mesh: DeviceMesh) -> dict[tuple[int, str], Placement]:
    """Returns the placements of sharded Parameters, by the id of their operation and their name."""
    sharded: dict[tuple[int, str], Placement] = {}
    for keys, placement, owner in _sharded_tensors(module, None, None):
        if not has_ranks_of(mesh.get_group(), owner.tensor_parallel_group):
            raise ValueError(f"{who}: {keys[0]} is sharded over other ranks than {mesh}. Pass the mesh of its group.")
        name = keys[0].rpartition(".")[2]
        if not _is_shard(placement):
            _reject(who, keys[0], "is the sum of the ranks' biases. Create the linear with replicated_bias=True.")
        if name not in owner._parameters:
            _reject(who, keys[0], "has a parametrization. Remove it first.")
        if getattr(owner, "_wgrad_bypasses_autograd", False) and name in owner._weight_names():
            _reject(who, keys[0], "has accumulate_into_main_grad or delay_wgrad_compute. Create it without them.")
        assert placement.dim is not None
        sharded[id(owner), name] = Shard(placement.dim)
    if not sharded:
        raise ValueError(f"{who}: no operation of the module is sharded over {mesh}. Create them with that group.")
    return sharded


def _is_distributed(
    owner: Linear | NativeOperation, name: str, param: DTensor, mesh: DeviceMesh, own: Placement
) -> bool:
    """Whether a Parameter is what `distribute_parameters` would make of it; FSDP2 shards it once more."""
    shapes = {key: tuple(shape) for op in owner._stages() for key, shape, *_ in op._description().params()}
    over_mesh = param.device_mesh.ndim == 1 and has_ranks_of(param.device_mesh.get_group(), mesh.get_group())
    return over_mesh and param.placements == (own,) and tuple(param.to_local().shape) == shapes[name]


def _reject(who: str, key: str, reason: str) -> None:
    raise NotImplementedError(f"{who}: {key} cannot be a DTensor: it {reason}")


def _distribute(param: torch.nn.Parameter, mesh: DeviceMesh, placement: Placement) -> torch.nn.Parameter:
    if isinstance(param, DTensor):
        return param
    distributed = DTensor.from_local(param.detach(), mesh, [placement], run_check=False)
    other = torch.nn.Parameter(distributed, requires_grad=param.requires_grad)
    other.__dict__.update(param.__dict__)
    return other


def local_shard(owner: torch.nn.Module, name: str, param: DTensor) -> torch.Tensor:
    """Returns the tensor that the kernels of `owner` read, with a gradient that is a DTensor."""
    mesh, group = param.device_mesh, getattr(owner, "tensor_parallel_group", None)
    replicated = param.placements == (Replicate(),)
    if mesh.ndim != 1 or not (replicated or (group is not None and has_ranks_of(mesh.get_group(), group))):
        raise NotImplementedError(
            f"{type(owner).__name__}: {name} is a DTensor over {mesh} with {param.placements}, expected a dense "
            "tensor, or a DTensor over its tensor-parallel group (torchweft.parallel.distribute_parameters). If it is "
            "sharded by FSDP2, call the module that fully_shard wrapped, so that its parameters are gathered first."
        )
    local: torch.Tensor = param.to_local()
    return local


# ---- parallelize_module ---------------------------------------------------------------------------------------------


class _LinearStyle(ParallelStyle):
    """Shards a :class:`torchweft.ops.Linear` in place."""

    _mode: str

    def __init__(self, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        who = f"torchweft.parallel.{type(self).__name__}"
        linear = self._check(who, module)
        fields = linear._fields | {
            "tensor_parallel_mode": self._mode,
            "tensor_parallel_group": device_mesh,
            "sequence_parallel": self.sequence_parallel,
            "replicated_bias": True,
        }
        resolve_parallel(who, fields)
        if fields["tensor_parallel_mode"] is None:  # a mesh of one rank
            return linear
        whole = {
            name: self._values(param, device_mesh) for name, param in linear._parameters.items() if param is not None
        }
        linear._set_fields(fields)
        placements = {keys[0]: placement for keys, placement, _ in _sharded_tensors(linear, None, None)}
        for name, values in whole.items():
            if name in placements:
                shards = placements[name].split(name, values, fields["tensor_parallel_size"])
                values = shards[device_mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
            requires_grad = getattr(linear, name).requires_grad
            setattr(linear, name, torch.nn.Parameter(values, requires_grad=requires_grad))
        return distribute_parameters(linear, device_mesh)

    def _check(self, who: str, module: torch.nn.Module) -> Linear:
        if not isinstance(module, Linear):
            kind = f"{type(module).__module__}.{type(module).__name__}"
            raise TypeError(
                f"{who}: got {kind}, expected torchweft.ops.Linear. For modules of torch use torch's styles."
            )
        if module.tensor_parallel_mode is not None:
            raise ValueError(f"{who}: {module} is already tensor parallel. Apply a style once, to a new linear.")
        if module._wgrad_bypasses_autograd:
            _reject(who, "weight", "has accumulate_into_main_grad or delay_wgrad_compute. Create it without them.")
        names = ["weight", "bias"] if module._fields["bias"] else ["weight"]
        if any(type(module._parameters.get(name)) is not torch.nn.Parameter for name in names):
            _reject(who, " or ".join(names), "is not a plain Parameter. Apply styles before fully_shard.")
        return module

    def _values(self, param: torch.nn.Parameter, mesh: DeviceMesh) -> torch.Tensor:
        """The values of rank `src_data_rank`, which parallelize_module sets; None: each rank's own."""
        values = param.detach().clone()
        source: Any = getattr(self, "src_data_rank", 0)
        if source is not None:
            torch.distributed.broadcast(values, group=mesh.get_group(), group_src=source)
        return values


class ColwiseParallel(_LinearStyle):
    """Shards the output features of a :class:`torchweft.ops.Linear`, for
    ``torch.distributed.tensor.parallel.parallelize_module``. Its Parameters become DTensors, and are no longer shared
    with other modules.

    Args:
        sequence_parallel: whether the ranks' inputs are different rows, which the linear gathers. Sum the gradients of
            a norm before it over the ranks.

    Example::

        >>> import torchweft.parallel
        >>> plan = {"up": torchweft.parallel.ColwiseParallel(), "down": torchweft.parallel.RowwiseParallel()}
    """

    _mode = "column"


class RowwiseParallel(_LinearStyle):
    """Shards the input features of a :class:`torchweft.ops.Linear`; see :class:`ColwiseParallel`. The bias is
    replicated.

    Args:
        sequence_parallel: whether the ranks get different rows of the sum.

    Example::

        >>> import torchweft.parallel
        >>> style = torchweft.parallel.RowwiseParallel(sequence_parallel=True)
    """

    _mode = "row"
