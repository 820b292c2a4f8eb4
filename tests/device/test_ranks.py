"""Processes: "nccl" between two ranks under torchrun, and processes that this one starts."""

import multiprocessing
import pathlib

import pytest
import torch

FOLDER = pathlib.Path(__file__).parent


def test_two_ranks_under_torchrun(run_two_ranks):
    run_two_ranks("torchweft.device", pathlib.Path(__file__).parent / "ranks.py")


def doubled(index, queue):
    x = torch.full((2,), 3.0, device=f"cuda:{index}", requires_grad=True)
    (x * x).sum().backward()
    queue.put((torch.cuda.device_count(), x.grad.tolist()))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_have_the_devices(method):
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=doubled, args=(5, queue))
    process.start()
    process.join()
    assert process.exitcode == 0 and queue.get() == (8, [6, 6])


def test_workers_of_a_data_loader():
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, pin_memory=True):
        assert batch.is_pinned() and batch.cuda().device.index == 0
