"""One rank of test_soak.py: trains a tensor- and sequence-parallel MLP with overlap and main_grad.

    RANK=0 WORLD_SIZE=2 python soak_rank.py FOLDER STEPS

Writes FOLDER/rank<r>.json: the bits of each loss and, for each step of the second half, the resident bytes and the
number of open file descriptors.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from torchweft import ops

WIDTH, HIDDEN, ROWS = 64, 128, 32  # rows of each rank


def make_model(group: dist.ProcessGroup) -> ops.Sequential:
    torch.manual_seed(11)
    parallel = {"tensor_parallel_group": group, "sequence_parallel": True, "bias": False}
    sink = {"accumulate_into_main_grad": True, "overlap": True}
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(WIDTH),
        ops.Linear(WIDTH, HIDDEN, tensor_parallel_mode="column", **parallel, **sink),
        ops.GELU(),
        ops.Linear(HIDDEN, WIDTH, tensor_parallel_mode="row", **parallel, **sink),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
        ops.Dropout(0.1),
        ops.Linear(WIDTH, HIDDEN, tensor_parallel_mode="column", **parallel),
        ops.SwiGLU(),
        ops.Linear(HIDDEN // 2, WIDTH, tensor_parallel_mode="row", **parallel),
    )


def train_step(model: ops.Sequential, optimizer: torch.optim.Optimizer, step: int, rank: int) -> float:
    generator = torch.Generator().manual_seed(2 * step + rank)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    optimizer.zero_grad()
    loss = (model(x) - x).square().mean()
    loss.backward()
    for p in model.parameters():
        if hasattr(p, "main_grad"):
            p.grad, p.main_grad = p.main_grad, torch.zeros_like(p)
        elif p.dim() == 1:  # the gradient of the norm covers only the rows of this rank
            dist.all_reduce(p.grad)
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item()


def resident() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    model = make_model(dist.group.WORLD)
    for layer in (model[2], model[4]):
        layer.weight.main_grad = torch.zeros_like(layer.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    losses, bytes_, descriptors = [], [], []
    for step in range(steps):
        losses.append(train_step(model, optimizer, step, rank).hex())
        if step + 1 < steps // 2:
            continue
        if step + 1 in (steps // 2, steps):
            gc.collect()
        bytes_.append(resident())
        descriptors.append(len(os.listdir("/proc/self/fd")))
    found = {"losses": losses, "resident": bytes_, "descriptors": descriptors}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
