"""Statistics and limits of the memory of a device."""

import gc

import pytest
import torch
from torch import nn

MB = 1 << 20


@pytest.fixture(autouse=True)
def restored():
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_tensors_are_counted():
    before = torch.cuda.memory_allocated()
    x = torch.empty(MB, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4 * MB
    view = x[10:]
    small = torch.empty(3, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4 * MB + 512, "blocks have multiples of 512 bytes"
    assert torch.cuda.memory_allocated(1) == 0 and torch.accelerator.memory_allocated() == torch.cuda.memory_allocated()
    del x, small
    assert torch.cuda.memory_allocated() - before == 4 * MB, "a view keeps its storage"
    del view
    assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() - before == 4 * MB + 512
    assert torch.cuda.memory_reserved() >= 4 * MB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < 4 * MB


def test_an_output_of_a_kernel_is_counted():
    x = torch.ones(MB, device="cuda")
    before = torch.cuda.memory_allocated()
    y = x + 1
    assert torch.cuda.memory_allocated() - before == 4 * MB
    y.add_(1)
    x.copy_(y)
    assert torch.cuda.memory_allocated() - before == 4 * MB
    y.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == before
    y.untyped_storage().resize_(8 * MB)
    assert torch.cuda.memory_allocated() - before == 8 * MB


def test_peak_of_a_training_step():
    d, rows = 256, 512
    layers = nn.Sequential(*(nn.Linear(d, d, bias=False) for _ in range(4))).cuda()
    optimizer = torch.optim.Adam(layers.parameters(), foreach=False, fused=True)
    x = torch.randn(rows, d, device="cuda")
    layers(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    weight, activation = 4 * d * d, 4 * rows * d
    assert torch.cuda.memory_allocated() == pytest.approx(4 * weight * 3 + activation, abs=64 * 1024)
    torch.cuda.reset_peak_memory_stats()
    layers(x).sum().backward()
    peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() + 4 * weight
    assert 4 * activation < peak < 4 * activation + 4 * weight + 4 * activation


def test_checkpointing_lowers_the_peak():
    from torch.utils.checkpoint import checkpoint

    def peak(run):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run().sum().backward()
        return torch.cuda.max_memory_allocated() - before

    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()).cuda() for _ in range(4)]
    x = torch.randn(4096, 64, device="cuda", requires_grad=True)

    def run(call):
        y = x
        for block in blocks:
            y = call(block, y)
        return y

    assert peak(lambda: run(lambda b, y: checkpoint(b, y, use_reentrant=False))) < 0.7 * peak(
        lambda: run(lambda b, y: b(y))
    )


def test_limit_raises_out_of_memory():
    torch.cuda.set_per_process_memory_fraction(16 * MB / torch.cuda.get_device_properties(0).total_memory)
    kept = torch.empty(2 * MB, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory. Tried to allocate 12 MiB"):
        torch.empty(3 * MB, device="cuda")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        kept.repeat(3)
    gc.collect()
    assert torch.cuda.memory_allocated() < 9 * MB, "a failed allocation was counted"
    assert torch.cuda.memory_stats()["num_ooms"] >= 2
    assert torch.empty(3 * MB, device="cuda:1").device.index == 1
    del kept
    assert torch.empty(3 * MB, device="cuda").numel() == 3 * MB


def test_a_plan_for_80_gb_needs_no_memory():
    """Untouched memory costs nothing: the machine of this test has less."""
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 102400 MiB"):
        torch.empty(100 << 30, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[1] == 80 << 30


def test_statistics_have_the_names_of_torch():
    stats = torch.cuda.memory_stats()
    for name in (
        "allocated_bytes.all.peak",
        "reserved_bytes.all.current",
        "allocation.small_pool.freed",
        "num_ooms",
        "active_bytes.large_pool.peak",
        "requested_bytes.all.allocated",
    ):
        assert name in stats
    assert "CUDA OOMs" in torch.cuda.memory_summary()
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocated_bytes.all.allocated"] == 0
    assert torch.cuda.memory_snapshot() == []
