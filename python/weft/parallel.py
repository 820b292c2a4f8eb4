"""Parameters of tensor-parallel operations as DTensors.

A DTensor knows how it is sharded, so that FSDP2, ``torch.distributed.checkpoint`` and its optimizer states work on any
mesh. Kernels read the local tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch.distributed.tensor.parallel import ParallelStyle

from ._linear import Linear
from ._process_groups import group_name_and_size, has_ranks_of, resolve_parallel
from .checkpoint import _is_shard, _sharded_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["ColwiseParallel", "RowwiseParallel", "distribute_parameters"]


def distribute_parameters(
    module: torch.nn.Module, mesh: DeviceMesh, stacked: Mapping[str, int] | None = None
) -> torch.nn.Module:
    """Replaces the Parameters that are sharded over a mesh by DTensors, which share their memory. Create the optimizer
    and wrap the module in FSDP2 afterwards. DDP does not take DTensors.

    Args:
        module: a module with operations whose `tensor_parallel_group` is `mesh` or its process group.
        mesh: a mesh of one dimension; of a larger one, ``mesh["tp"]``.
        stacked: see :func:`weft.checkpoint.layout_of`. DTensors cannot represent these Parameters: it raises.

    Returns:
        `module`.

    Example::

        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        linear = weft.ops.Linear(8, 4, tensor_parallel_mode="column", tensor_parallel_group=mesh["tp"])
        model = fully_shard(weft.parallel.distribute_parameters(linear, mesh["tp"]), mesh=mesh["dp"])
    """
    _, ranks = group_name_and_size("distribute_parameters", mesh)
    replaced: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # a Parameter may belong to several modules
    for keys, placement, owner in _sharded_tensors(module, None, stacked):
        if ranks == 1 or not has_ranks_of(mesh.get_group(), owner.tensor_parallel_group):
            continue
        name = keys[0].rpartition(".")[2]
        param = owner._parameters[name]
        if not _is_shard(placement):
            _reject(
                keys[0],
                "is the sum of the ranks' biases. Create the linear with replicated_bias=True."
                if placement.dim is None
                else "consists of stacked tensors. Use a linear for each of them.",
            )
        if getattr(owner, "_wgrad_bypasses_autograd", False) and name in owner._weight_names():
            _reject(keys[0], "has accumulate_into_main_grad or delay_wgrad_compute. Create the linear without them.")
        if param not in replaced:
            replaced[param] = _distribute(param, mesh, placement.dim)
        setattr(owner, name, replaced[param])
    return module


def _reject(key: str, reason: str) -> NoReturn:
    raise NotImplementedError(f"distribute_parameters: {key} cannot be a DTensor, because it {reason}")


def _distribute(param: torch.nn.Parameter, mesh: DeviceMesh, dim: int | None) -> torch.nn.Parameter:
    from torch.distributed.tensor import DTensor, Shard

    if isinstance(param, DTensor):
        return param
    assert dim is not None
    distributed = DTensor.from_local(param.detach(), mesh, [Shard(dim)], run_check=False)
    return torch.nn.Parameter(distributed, requires_grad=param.requires_grad)


def local_shard(owner: torch.nn.Module, param: DTensor) -> torch.Tensor:
    """Returns the tensor that the kernels of `owner` read, with a gradient that is a DTensor."""
    mesh, group = param.device_mesh, getattr(owner, "tensor_parallel_group", None)
    if group is None or mesh.ndim != 1 or not has_ranks_of(mesh.get_group(), group):
        raise NotImplementedError(
            f"{type(owner).__name__}: a parameter is a DTensor over {mesh}, expected a dense tensor, or a DTensor over "
            "the tensor-parallel group of the operation (weft.parallel.distribute_parameters). If it is sharded by "
            "FSDP2, call the module that fully_shard wrapped, so that its parameters are gathered first."
        )
    local: torch.Tensor = param.to_local()
    return local


# ---- parallelize_module ---------------------------------------------------------------------------------------------


class _LinearStyle(ParallelStyle):
    """Shards a :class:`weft.ops.Linear` in place."""

    _mode: str

    def __init__(self, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        who = type(self).__name__
        if not isinstance(module, Linear):
            raise TypeError(f"weft.parallel.{who}: got {type(module).__name__}, expected weft.ops.Linear.")
        if module.tensor_parallel_mode is not None:
            raise ValueError(f"weft.parallel.{who}: {module} is already tensor parallel.")
        fields = module._fields | {
            "tensor_parallel_mode": self._mode,
            "tensor_parallel_group": device_mesh,
            "sequence_parallel": self.sequence_parallel,
            "replicated_bias": True,
        }
        resolve_parallel(who, fields)
        if fields["tensor_parallel_mode"] is None:  # a mesh of one rank
            return module
        whole = {name: param for name, param in module._parameters.items() if param is not None}
        module._set_fields(fields)
        for (name, *_), placement, _ in _sharded_tensors(module, None, None):
            param = whole[name]
            shards = placement.split(name, param.detach(), fields["tensor_parallel_size"])
            shard = shards[device_mesh.get_local_rank()].clone(memory_format=torch.contiguous_format)
            setattr(module, name, torch.nn.Parameter(shard, requires_grad=param.requires_grad))
        return distribute_parameters(module, device_mesh)


class ColwiseParallel(_LinearStyle):
    """Shards the output features of a :class:`weft.ops.Linear`, for
    ``torch.distributed.tensor.parallel.parallelize_module``. Its Parameters become DTensors.

    Args:
        sequence_parallel: whether the ranks' inputs are different rows, which the linear gathers.

    Example::

        >>> import weft.parallel
        >>> plan = {"up": weft.parallel.ColwiseParallel(), "down": weft.parallel.RowwiseParallel()}
    """

    _mode = "column"


class RowwiseParallel(_LinearStyle):
    """Shards the input features of a :class:`weft.ops.Linear`; see :class:`ColwiseParallel`. The bias is replicated.

    Args:
        sequence_parallel: whether the ranks get different rows of the sum.

    Example::

        >>> import weft.parallel
        >>> style = weft.parallel.RowwiseParallel(sequence_parallel=True)
    """

    _mode = "row"
