"""One rank of test_attacker.py: trains the same small model again and again, each time in a new group.

    RANK=0 WORLD_SIZE=2 python attacked_rank.py FOLDER

Each group needs a new rendezvous, and a growing number of rows causes further ones, so sockets open and close all the
time. Writes FOLDER/rank<r>.ready after the first training, stops when FOLDER/end exists, and writes
FOLDER/rank<r>.json: the final loss of each training.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from torchweft import ops

WIDTH, STEPS = 32, 10


def train(group: dist.ProcessGroup, rank: int) -> float:
    torch.manual_seed(rank)
    parallel = {"tensor_parallel_group": group, "sequence_parallel": True, "overlap": True}
    model = ops.Sequential(
        ops.Linear(WIDTH, 2 * WIDTH, tensor_parallel_mode="column", **parallel),
        ops.GELU(),
        ops.Linear(2 * WIDTH, WIDTH, tensor_parallel_mode="row", **parallel),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x = torch.randn(32 * 4 ** (step // 2), WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    folder, rank, size = pathlib.Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    losses = []
    over = torch.zeros(1)
    while not over.item():
        group = dist.new_group()
        losses.append(train(group, rank))
        dist.destroy_process_group(group)
        (folder / f"rank{rank}.ready").touch()
        over.fill_(float((folder / "end").exists()))
        dist.broadcast(over, 0)
    (folder / f"rank{rank}.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
