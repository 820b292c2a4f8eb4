"""One rank of test_moe.py: compares the gradients of a grouped MLP in DDP and FSDP2 with those of one process.

RANK=0 WORLD_SIZE=2 python experts_rank.py FOLDER
"""

import os
import pathlib
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchweft import ops

GROUPS, WIDTH, SPLITS = 4, 8, (8, 0, 10, 2)


def make(single: bool) -> ops.Sequential:
    torch.manual_seed(3)
    options = {"single_grouped_weight": single, "single_grouped_bias": single}
    return ops.Sequential(
        ops.GroupedLinear(GROUPS, WIDTH, 2 * WIDTH, **options),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(GROUPS, WIDTH, WIDTH, scale_bias=True, **options),
    )


def loss(model: torch.nn.Module, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    rows, splits = sum(SPLITS), torch.tensor(SPLITS)
    x, probs = torch.randn(rows, WIDTH, generator=generator), torch.rand(rows, generator=generator)
    return model(x, splits, probs, splits, probs).square().mean()


def wrapped(kind: str, model: ops.Sequential) -> torch.nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "each layer in fsdp":
        fully_shard(model[0])
        fully_shard(model[2])
    return fully_shard(model)


def check(kind: str, single: bool, rank: int, ranks: int) -> None:
    alone, model = make(single), make(single)
    (sum(loss(alone, r) for r in range(ranks)) / ranks).backward()
    parallel = wrapped(kind, model)
    for _ in range(2):
        parallel.zero_grad()
        loss(parallel, rank).backward()
    for (name, p), other in zip(alone.named_parameters(), model.parameters(), strict=True):
        grad = other.grad.full_tensor() if isinstance(other.grad, DTensor) else other.grad
        torch.testing.assert_close(grad, p.grad, msg=lambda text, name=name: f"{kind}, {name}: {text}")


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    for kind in ("ddp", "fsdp", "each layer in fsdp"):
        for single in (False, True):
            check(kind, single, rank, ranks)
    dist.destroy_process_group()
