"""Tensor and sequence parallelism: two ranks with half of the weights and rows each train a block like one process."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import torchweft
from torchweft import ops

WIDTH, ROWS, RANKS = 16, 32, 2


def block(mode: dict[str, str | None], **parallel) -> ops.Sequential:
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False),
        ops.Linear(WIDTH, 4 * WIDTH, tensor_parallel_mode=mode["up"], **parallel),
        ops.GELU(),
        ops.Linear(4 * WIDTH, WIDTH, tensor_parallel_mode=mode["down"], replicated_bias=True, **parallel),
        ops.AddExtraInput().set_extra_input_channel(0, "x"),
    )


def train(model: ops.Sequential, x: torch.Tensor, target: torch.Tensor) -> ops.Sequential:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - target).square().sum() / ROWS
        loss.backward()
        optimizer.step()
    return model


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    alone = block({"up": None, "down": None})
    model = block({"up": "column", "down": "row"}, sequence_parallel=True)
    model.load_state_dict(torchweft.checkpoint.shard_state_dict(alone.state_dict(), model))

    x, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    train(alone, x, target)
    train(model, x.chunk(RANKS)[rank], target.chunk(RANKS)[rank])
    full = torchweft.checkpoint.gather_state_dict(model)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(full[name], value)
    if rank == 0:
        print("weight on one rank", list(model.get_parameter("1.weight").shape), "of", list(full["1.weight"].shape))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder,), nprocs=RANKS)
