"""One of the ranks of test_ranks.py: collectives of "nccl", DDP and FSDP2, compared with Gloo on the CPU.

torchrun --nproc-per-node 2 -m torchweft.device tests/device/ranks.py
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed._composable.fsdp import MixedPrecisionPolicy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GPU = torch.device("cuda", RANK)


def values(*shape, dtype=torch.float32):
    return (torch.arange(torch.Size(shape).numel()).view(shape) + 10 * RANK).to(dtype)


def on_both(program):
    """The results of a program of collectives on the CPU and on the device are equal."""
    expected, found = program(torch.device("cpu")), program(GPU)
    for a, b in zip(expected, found, strict=True):
        assert b.device == GPU and a.dtype == b.dtype and torch.equal(a, b.cpu()), (program.__name__, a, b)


def all_reduce(place):
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            t = values(3, dtype=dtype).to(place)
            dist.all_reduce(t, op)
            yield t


def gathers(place):
    t = values(2, 3).to(place)
    out = t.new_empty(2 * RANKS, 3)
    dist.all_gather_into_tensor(out, t)
    yield out
    parts = [torch.empty_like(t) for _ in range(RANKS)]
    dist.all_gather(parts, t)
    yield from parts
    parts = [torch.empty_like(t) for _ in range(RANKS)] if RANK == 1 else None
    dist.gather(t, parts, dst=1)
    yield from parts or []
    part = torch.empty_like(t)
    dist.scatter(part, [t * i for i in range(RANKS)] if RANK == 0 else None, src=0)
    yield part


def reduce_scatters(place):
    t = values(2 * RANKS, 3).to(place)
    out = t.new_empty(2, 3)
    dist.reduce_scatter_tensor(out, t)
    yield out
    dist.reduce_scatter(out, list(t.clone().chunk(RANKS)))
    yield out
    dist.reduce(t, dst=1)
    yield t if RANK == 1 else out


def broadcasts(place):
    t = values(4).to(place)
    dist.broadcast(t, src=1)
    yield t


def all_to_all(place):
    t = values(2 * RANKS, 2).to(place)
    out = torch.empty_like(t)
    dist.all_to_all_single(out, t)
    yield out
    sizes = [[1, 3], [2, 2]][RANK]
    received = [[1, 2], [3, 2]][RANK]
    out = t.new_empty(sum(received), 2)
    dist.all_to_all_single(out, t, received, sizes)
    yield out
    parts = [t.new_empty(2, 2) for _ in range(RANKS)]
    dist.all_to_all(parts, list(t.chunk(RANKS)))
    yield from parts


def point_to_point(place):
    t, out = values(3).to(place), torch.empty(3, device=place)
    if RANK == 0:
        dist.send(t, 1)
        dist.recv(out, 1)
    else:
        dist.recv(out, 0)
        dist.send(t, 0)
    yield out
    other = 1 - RANK
    again = torch.empty_like(t)
    operations = [dist.P2POp(dist.isend, t, other), dist.P2POp(dist.irecv, again, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
        if place == GPU:
            work.wait()  # as Transformer Engine's context parallelism does; Gloo's work would hang
    yield again


def coalesced(place):
    a, b = values(3).to(place), values(2).to(place)
    outs = [t.new_empty(RANKS * t.numel()) for t in (a, b)]
    if place == GPU:  # Gloo has no coalescing
        with dist._coalescing_manager(device=place, async_ops=True) as manager:
            dist.all_reduce(a)
            dist.all_reduce(b)
        manager.wait()
        with dist._coalescing_manager(device=place):
            for out, t in zip(outs, (a, b), strict=True):
                dist.all_gather_into_tensor(out, t)
    else:
        for out, t in zip(outs, (a, b), strict=True):
            dist.all_reduce(t)
            dist.all_gather_into_tensor(out, t)
    yield from (a, b, *outs)


def asynchronous(place):
    t = values(1 << 16).to(place)
    work = dist.all_reduce(t, async_op=True)
    work.wait()
    assert work.is_completed()
    yield t
    parts = [torch.empty_like(t) for _ in range(RANKS)]
    future = dist.all_gather(parts, t.clone(), async_op=True).get_future()  # nothing else keeps the input
    future.wait()
    yield from parts


def only_nccl():
    t = values(4).to(GPU)
    dist.all_reduce(t, ReduceOp.AVG)
    assert torch.equal(t.cpu(), torch.arange(4.0) + 5)
    codes = values(4, dtype=torch.float8_e4m3fn).to(GPU)  # Gloo has no such dtype
    out = torch.empty(8, dtype=codes.dtype, device=GPU)
    dist.all_gather_into_tensor(out, codes)
    assert torch.equal(out.chunk(2)[RANK].float(), codes.float())
    rows = codes.view(2, 2)
    moved = torch.empty_like(rows)
    dist.all_to_all_single(moved, rows)
    assert torch.equal(moved[RANK].float(), rows[RANK].float())
    dist.barrier()
    dist.barrier(device_ids=[RANK])
    objects = [None] * RANKS
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": i} for i in range(RANKS)]
    group = dist.new_group([0, 1], backend="nccl")
    t = values(2).to(GPU)
    dist.all_reduce(t, group=group)
    assert torch.equal(t.cpu(), 2 * torch.arange(2.0) + 10) and dist.get_backend(group) == "nccl"
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        assert "No backend type associated with device type cpu" in str(error)
    else:
        raise AssertionError("nccl reduced a tensor of the CPU")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8))


def trained(m, place, **options):
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        torch.manual_seed(step * RANKS + RANK)
        x = torch.randn(4, 8).to(place)
        loss = (m(x).float() - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach() for p in m.parameters()]


def ddp():
    losses, parameters = trained(DistributedDataParallel(model()), "cpu")
    found, others = trained(DistributedDataParallel(model().to(GPU), device_ids=[RANK]), GPU)
    assert found == losses
    for a, b in zip(parameters, others, strict=True):
        assert b.device == GPU and torch.equal(a, b.cpu())
    hooked = DistributedDataParallel(model().to(GPU), gradient_as_bucket_view=True, static_graph=True)
    assert trained(hooked, GPU)[0] == losses


def fsdp(kind):
    mesh = init_device_mesh(kind, (RANKS,))
    m = model().to(GPU if kind == "cuda" else "cpu")
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in (m[0], m[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(m, mesh=mesh, mp_policy=policy)
    losses, parameters = trained(m, GPU if kind == "cuda" else "cpu")
    return losses, [p.full_tensor().cpu() for p in parameters]


def fsdp2():
    (losses, parameters), (found, others) = fsdp("cpu"), fsdp("cuda")
    torch.testing.assert_close(found, losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(others, parameters, rtol=1e-6, atol=1e-7)


def main():
    torch.cuda.set_device(GPU)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=GPU)
    assert dist.is_nccl_available()
    for program in (
        all_reduce, gathers, reduce_scatters, broadcasts, all_to_all, point_to_point, coalesced, asynchronous
    ):  # fmt: skip
        on_both(lambda place, program=program: list(program(place)))
    only_nccl()
    ddp()
    fsdp2()
    dist.destroy_process_group()
    time.sleep(0.5 * RANK)  # rank 0 is first: it must not read the address that rank 1 had in the group before
    dist.init_process_group("nccl")
    t = torch.ones(2, device=GPU)
    dist.all_reduce(t)
    assert t.tolist() == [RANKS] * 2 and dist.get_backend() == "nccl"
    dist.destroy_process_group()
    print(f"rank {RANK}: ok", flush=True)


if __name__ == "__main__":
    main()
