"""One rank of test_dtensors.py: Parameters as DTensors. Started as tensor_parallel.py is.

Every rank trains the same block without parallelism, in float64, as the reference.
"""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import tensor_parallel
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensor_parallel import ROWS, block, close, draw, mesh_of_four, whole_block
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import weft
from weft import ops
from weft.parallel import ColwiseParallel, RowwiseParallel, distribute_parameters

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def make_block(mesh: DeviceMesh, state: dict[str, torch.Tensor]) -> ops.Sequential:
    """The block over `mesh`, with DTensors and the values of a full state dict."""
    model = distribute_parameters(block(mesh), mesh)
    assert {type(p) for name, p in model.named_parameters() if name in ("2.weight", "2.bias", "4.weight")} == {DTensor}
    model.load_state_dict(weft.checkpoint.shard_state_dict(state, model))
    return model


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, part: int = 0, parts: int = 1) -> None:
    """Steps on the same rows for all ranks, of which data-parallel rank `part` takes a part."""
    for step in range(steps):
        torch.manual_seed(100 + step)
        x, dy = draw(2 * ROWS, 24), draw(2 * ROWS, 24)
        optimizer.zero_grad()
        model(x.chunk(parts)[part]).backward(dy.chunk(parts)[part] * (parts / 2))  # FSDP2 averages over its ranks
        optimizer.step()


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def reference(steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Full state dict of the block before and after training in one process."""
    model, state = whole_block()
    before = {name: value.clone() for name, value in state.items()}
    train(model, adam(model), steps)
    return before, model.state_dict()


def full_values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()}


def check(model: torch.nn.Module, expected: dict[str, torch.Tensor], what: str) -> None:
    for name, value in full_values(model).items():
        close(value, expected[name], f"{what}: {name}")


@contextmanager
def shared_folder() -> Iterator[pathlib.Path]:
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    yield pathlib.Path(folders[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])


# ---- situations -----------------------------------------------------------------------------------------------------


def trains() -> None:
    """Training with DTensors equals one process, also compiled; gathered state dicts are the full tensors."""
    mesh = world_mesh()
    before, after = reference(2)
    model = make_block(mesh, before)
    for name, value in weft.checkpoint.gather_state_dict(model).items():
        assert torch.equal(value, before[name]), name
    train(model, adam(model))
    assert isinstance(model[2].weight.grad, DTensor) and model[2].weight.grad.placements == model[2].weight.placements
    check(model, after, "eager")
    model = make_block(mesh, before)
    train(torch.compile(model, fullgraph=True, backend="aot_eager"), adam(model))
    check(model, after, "compiled")


def checkpoints() -> None:
    """Parameters and optimizer states saved with plain dcp.save load on other numbers of ranks, and continue."""
    mesh = world_mesh()
    before, after = reference(4)
    with shared_folder() as folder:
        model = make_block(mesh, before)
        optimizer = adam(model)
        train(model, optimizer)
        state, states = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": states}, checkpoint_id=folder)
        meshes = [mesh, *([mesh_of_four()["tp"]] if dist.get_world_size() == 4 else [])]
        for other in [make_block(m, {name: value * 0 for name, value in before.items()}) for m in meshes] + [block()]:
            optimizer = adam(other)
            state, states = get_state_dict(other, optimizer)
            loaded = {"model": state, "optimizer": states}
            dcp.load(loaded, checkpoint_id=folder)
            set_state_dict(other, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
            expected = full_values(model)
            assert all(torch.equal(value, expected[name]) for name, value in full_values(other).items())
            # Two more steps, as if nothing had happened.
            for step in (2, 3):
                torch.manual_seed(100 + step)
                x, dy = draw(2 * ROWS, 24), draw(2 * ROWS, 24)
                optimizer.zero_grad()
                other(x).backward(dy / 2)
                optimizer.step()
            check(other, after, "continued")
        state = weft.checkpoint.distributed_state_dict(model)
        weft.checkpoint.load_distributed_state_dict(model, state)


def fsdp_on_a_mesh() -> None:
    """FSDP2 on the other dimension of a 2 x 2 mesh trains as one process does; checkpoints load at every size."""
    mesh = mesh_of_four()
    before, after = reference(2)
    with shared_folder() as folder:
        model = fully_shard(make_block(mesh["tp"], before), mesh=mesh["dp"])
        optimizer = adam(model)
        train(model, optimizer, 2, mesh["dp"].get_local_rank(), 2)
        check(model, after, "2 x 2")
        state, states = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": states}, checkpoint_id=folder)
        expected = full_values(model)
        others = {
            "one process": block(),
            "4 ranks": make_block(world_mesh(), before),
            "2 ranks": make_block(mesh["tp"], before),
            "2 x 2": fully_shard(make_block(mesh["tp"], before), mesh=mesh["dp"]),
        }
        for name, other in others.items():
            state, states = get_state_dict(other, adam(other))
            dcp.load({"model": state, "optimizer": states}, checkpoint_id=folder)
            set_model_state_dict(other, state)
            for key, value in full_values(other).items():
                assert torch.equal(value, expected[key]), f"{name}: {key}"
    full = get_model_state_dict(model, options=FULL)
    if dist.get_rank() == 0:
        assert all(torch.equal(full[key], value) for key, value in expected.items())


def parallelized() -> None:
    """parallelize_module shards Linears of one process in place."""
    mesh = world_mesh()
    truth, _ = whole_block()
    for sequence in (False, True):
        model, _ = whole_block()
        styles = {"2": ColwiseParallel(sequence_parallel=sequence), "4": RowwiseParallel(sequence_parallel=sequence)}
        parallelize_module(model, mesh, styles)
        x, dy = draw(8, 24), draw(8, 24)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = (lambda t, rank=rank, ranks=ranks: t.chunk(ranks)[rank].clone()) if sequence else (lambda t: t)
        close(model(mine(x)), mine(truth(x)), "y")
        model(mine(x)).backward(mine(dy))
        truth.zero_grad()
        truth(x).backward(dy)
        for name in ("2.weight", "2.bias", "4.weight"):
            grad = model.get_parameter(name).grad
            close(grad.full_tensor(), truth.get_parameter(name).grad, f"gradient of {name}")


def mistakes() -> None:
    mesh, group = world_mesh(), dist.group.WORLD
    column = {"tensor_parallel_mode": "column", "tensor_parallel_group": group}
    wrapped = fully_shard(ops.Sequential(ops.Linear(8, 8)), mesh=mesh)
    own_bias = ops.Linear(8, 8, tensor_parallel_mode="row", tensor_parallel_group=group)
    parallel = ops.Linear(8, 8, **column)
    for error, call, text in (
        (NotImplementedError, lambda: distribute_parameters(own_bias, mesh), "replicated_bias=True"),
        (NotImplementedError, lambda: distribute_parameters(ops.Sequential(parallel), mesh, {"0": 2}), "stacked"),
        (
            NotImplementedError,
            lambda: distribute_parameters(ops.Linear(8, 8, accumulate_into_main_grad=True, **column), mesh),
            "accumulate_into_main_grad",
        ),
        (NotImplementedError, lambda: wrapped[0](torch.randn(2, 8)), "fully_shard"),
        (TypeError, lambda: parallelize_module(torch.nn.Linear(8, 8), mesh, ColwiseParallel()), "weft.ops.Linear"),
        (ValueError, lambda: parallelize_module(parallel, mesh, RowwiseParallel()), "already tensor parallel"),
    ):
        try:
            call()
        except error as raised:
            assert text in str(raised), raised
        else:
            raise AssertionError(f"nothing raised: {text}")


if __name__ == "__main__":
    tensor_parallel.main(globals())
