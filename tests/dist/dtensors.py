"""One rank of test_dtensors.py: Parameters as DTensors. Started as tensor_parallel.py is.

Every rank trains the same block without parallelism, in float64, as the reference.
"""

from __future__ import annotations

import copy
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
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import torchweft
from torchweft import ops
from torchweft.parallel import ColwiseParallel, RowwiseParallel, distribute_parameters

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def make_block(mesh: DeviceMesh, state: dict[str, torch.Tensor]) -> ops.Sequential:
    """The block over `mesh`, with DTensors and the values of a full state dict."""
    model = distribute_parameters(block(mesh), mesh)
    assert {type(p) for p in model.parameters()} == {DTensor}
    model.load_state_dict(torchweft.checkpoint.shard_state_dict(state, model))
    return model


def train(model: torch.nn.Module, optimizer, steps: range = range(2), part: int = 0, parts: int = 1) -> None:
    """Steps on the same rows for all ranks, of which data-parallel rank `part` takes a part. Clips gradients."""
    for step in steps:
        torch.manual_seed(100 + step)
        x, dy = (draw(2 * ROWS, 24).to(next(model.parameters()).dtype) for _ in range(2))
        optimizer.zero_grad()
        model(x.chunk(parts)[part]).backward(dy.chunk(parts)[part] * (parts / 2))  # FSDP2 averages over its ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def reference(
    steps: int, make=adam, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Full state dict of the block before and after training in one process."""
    model, _ = whole_block()
    state = model.to(dtype).state_dict()
    before = {name: value.clone() for name, value in state.items()}
    train(model, make(model), range(steps))
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
    for name, value in torchweft.checkpoint.gather_state_dict(model).items():
        assert torch.equal(value, before[name]), name
    train(model, adam(model))
    assert isinstance(model[2].weight.grad, DTensor) and model[2].weight.grad.placements == model[2].weight.placements
    check(model, after, "eager")
    model = make_block(mesh, before)
    train(torch.compile(model, fullgraph=True, backend="aot_eager"), adam(model))
    check(model, after, "compiled")
    for make in (
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
        lambda m: torchweft.optim.FusedAdam([p for p in m.parameters() if p.requires_grad], lr=0.1),
    ):
        _, after = reference(2, make, torch.float32)
        model = make_block(mesh, before).float()
        versions = [p._version for p in model.parameters()]
        train(model, make(model))
        for name, value in full_values(model).items():
            close(value, after[name], f"fused optimizer: {name}", rtol=1e-4, atol=1e-4)  # float32
    assert all(p._version > version for p, version in zip(model.parameters(), versions, strict=True))  # FusedAdam


def copies() -> None:
    """Frozen, copied and converted modules keep their DTensors; Transformer Engine's keys are sharded, too."""
    mesh = world_mesh()
    before, _ = reference(0)
    model = make_block(mesh, before)
    model[2].weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    x = draw(4, 24)
    close(twin(x), model(x), "copy")
    model(x).sum().backward()
    assert model[2].weight.grad is None and isinstance(model[4].weight.grad, DTensor)
    assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in twin.float().parameters())
    close(twin(x.float()).double(), model(x), "float32", rtol=1e-4, atol=1e-4)
    state = torchweft.checkpoint.gather_state_dict(torchweft.checkpoint.set_te_keys(model))
    assert torch.equal(state["2.basic_ops.0.weight"], before["2.weight"])
    state = torchweft.checkpoint.distributed_state_dict(model)
    with torch.no_grad():
        model[2].weight.zero_()
    torchweft.checkpoint.load_distributed_state_dict(model, {name: value for name, value in state.items()})
    tied = ops.Sequential(ops.Linear(8, 8, **column(mesh)), ops.Linear(8, 8, **column(mesh)))
    tied[1].weight = tied[0].weight
    distribute_parameters(tied, mesh)
    assert tied[0].weight is tied[1].weight


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
            train(other, optimizer, range(2, 4))  # as if nothing had happened
            check(other, after, "continued")


def fsdp_on_a_mesh() -> None:
    """FSDP2 on the other dimension of a 2 x 2 mesh trains as one process does; checkpoints load at every size."""
    mesh = mesh_of_four()
    before, after = reference(2)
    _, later = reference(3)
    with shared_folder() as folder:
        model = fully_shard(make_block(mesh["tp"], before), mesh=mesh["dp"])
        optimizer = adam(model)
        train(model, optimizer, range(2), mesh["dp"].get_local_rank(), 2)
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
            optimizer = adam(other)
            state, states = get_state_dict(other, optimizer)
            loaded = {"model": state, "optimizer": states}
            dcp.load(loaded, checkpoint_id=folder)
            set_state_dict(other, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
            for key, value in full_values(other).items():
                assert torch.equal(value, expected[key]), f"{name}: {key}"
            parts = (mesh["dp"].get_local_rank(), 2) if name == "2 x 2" else (0, 1)
            train(other, optimizer, range(2, 3), *parts)
            check(other, later, name)
    gathered = torchweft.checkpoint.gather_state_dict(model)
    assert all(torch.equal(gathered[key], value) for key, value in expected.items())
    full = get_model_state_dict(model, options=FULL)
    if dist.get_rank() == 0:
        assert all(torch.equal(full[key], value) for key, value in expected.items())


def column(group) -> dict:
    return {"tensor_parallel_mode": "column", "tensor_parallel_group": group}


def parallelized() -> None:
    """parallelize_module shards Linears of one process in place, with the values of rank 0."""
    mesh, rank, ranks = world_mesh(), dist.get_rank(), dist.get_world_size()
    truth, _ = whole_block()
    for sequence in (False, True):
        model, _ = whole_block()
        with torch.no_grad():
            for name in ("2.weight", "2.bias", "4.weight", "4.bias"):
                model.get_parameter(name).add_(rank)
        styles = {"2": ColwiseParallel(sequence_parallel=sequence), "4": RowwiseParallel(sequence_parallel=sequence)}
        parallelize_module(model, mesh, styles)
        x, dy = draw(8, 24), draw(8, 24)

        def mine(t, sequence=sequence):
            return t.chunk(ranks)[rank].clone() if sequence else t

        y = model(mine(x))
        close(y, mine(truth(x)), "y")
        y.backward(mine(dy))
        truth.zero_grad()
        truth(x).backward(dy)
        if sequence:
            dist.all_reduce(model[1].weight.grad)
        for name, param in model.named_parameters():
            grad = param.grad.full_tensor() if isinstance(param, DTensor) else param.grad
            close(grad, truth.get_parameter(name).grad, f"gradient of {name}")


def mistakes() -> None:
    mesh, group = world_mesh(), dist.group.WORLD
    row = {"tensor_parallel_mode": "row", "tensor_parallel_group": group}
    wrapped = fully_shard(ops.Sequential(ops.Linear(8, 8)), mesh=mesh)
    parallel, embedding = ops.Linear(8, 8, bias=False, **column(group)), torch.nn.Embedding(4, 8)
    embedding.weight = parallel.weight
    both = [ops.Linear(8, 8, bias=False, **column(group)), ops.Linear(8, 8, bias=False, **row)]
    both[1].weight = torch.nn.Parameter(torch.zeros(4, 8))
    both[0].weight = both[1].weight
    sharded = fully_shard(ops.Sequential(ops.Linear(8, 8, **column(group))), mesh=mesh)
    glu = ops.Sequential(ops.Linear(8, 16), ops.SwiGLU())
    parallelize_module(glu, mesh, {"0": ColwiseParallel()})
    accumulating = ops.Linear(8, 8, accumulate_into_main_grad=True)
    for error, call, text in (
        (NotImplementedError, lambda: distribute_parameters(ops.Linear(8, 8, **row), mesh), "replicated_bias=True"),
        (NotImplementedError, lambda: glu(torch.randn(2, 8)), "interleave_glu"),
        (
            NotImplementedError,
            lambda: distribute_parameters(ops.Linear(8, 8, accumulate_into_main_grad=True, **column(group)), mesh),
            "accumulate_into_main_grad",
        ),
        (NotImplementedError, lambda: parallelize_module(accumulating, mesh, ColwiseParallel()), "main_grad"),
        (NotImplementedError, lambda: wrapped[0](torch.randn(2, 8)), "fully_shard"),
        (NotImplementedError, lambda: distribute_parameters(ops.Sequential(parallel, embedding), mesh), "Embedding"),
        (NotImplementedError, lambda: distribute_parameters(ops.Sequential(*both), mesh), "Untie"),
        (ValueError, lambda: distribute_parameters(sharded, mesh), "before fully_shard"),
        (ValueError, lambda: distribute_parameters(ops.Sequential(ops.Linear(8, 8)), mesh), "no operation"),
        (TypeError, lambda: distribute_parameters(parallel, group), "DeviceMesh of one dimension"),
        (TypeError, lambda: parallelize_module(torch.nn.Linear(8, 8), mesh, ColwiseParallel()), "torch.nn.modules"),
        (ValueError, lambda: parallelize_module(parallel, mesh, RowwiseParallel()), "already tensor parallel"),
    ):
        try:
            call()
        except error as raised:
            assert text in str(raised), raised
        else:
            raise AssertionError(f"nothing raised: {text}")
    assert type(accumulating.weight) is torch.nn.Parameter and accumulating.tensor_parallel_mode is None


if __name__ == "__main__":
    tensor_parallel.main(globals())
