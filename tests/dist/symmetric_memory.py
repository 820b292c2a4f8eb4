"""One rank of test_symmetric_memory.py: torch's symmetric memory on CPU tensors.

    RANK=0 WORLD_SIZE=3 python symmetric_memory.py FOLDER

Writes FOLDER/rank<r>.json: for each situation "ok" or the traceback.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._C._distributed_c10d import _SymmetricMemory

import torchweft  # noqa: F401  registers the allocator

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TIMEOUT = 3.0


def raised(act, *words: str) -> None:
    """Checks that `act` raises an error that contains all the words."""
    try:
        act()
    except Exception as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"no {missing} in: {error}"
        return
    raise AssertionError(f"nothing was raised, expected {words}")


def make(*size: int, group=None, **kwargs):
    tensor = symm_mem.empty(*size, device="cpu", **kwargs)
    return tensor, symm_mem.rendezvous(tensor, group or dist.group.WORLD)


def mapped() -> tuple[int, int]:
    """Number of shared-memory mappings and of file descriptors of this process."""
    maps = pathlib.Path("/proc/self/maps").read_text()
    return maps.count("memfd:weft"), len(os.listdir("/proc/self/fd"))


def groups_on_one_store_stay_apart() -> None:
    store = dist.FileStore(sys.argv[1] + "/groups", WORLD)
    names = [f"weft_{name}_{WORLD}" for name in ("a", "b")]
    for name in names:
        _SymmetricMemory.set_group_info(name, RANK, WORLD, store)
    tensors = [symm_mem.empty(8, device="cpu").fill_(100 * number + RANK) for number in (0, 1)]
    handles = [_SymmetricMemory.rendezvous(*pair) for pair in zip(tensors, names, strict=True)]
    for number, handle in enumerate(handles):
        handle.barrier(0)
        for peer in range(WORLD):
            assert (handle.get_buffer(peer, (8,), torch.float32) == 100 * number + peer).all(), number


def every_rank_reads_every_buffer() -> None:
    tensor, handle = make(4, 8, dtype=torch.bfloat16)
    assert (handle.rank, handle.world_size, handle.device.type) == (RANK, WORLD, "cpu")
    assert handle.buffer_size == 64
    assert symm_mem.is_symm_mem_tensor(tensor)
    assert symm_mem.get_backend("cpu") == "weft"
    tensor.fill_(RANK + 1)
    handle.barrier()
    for peer in range(WORLD):
        assert (handle.get_buffer(peer, (4, 8), torch.bfloat16) == peer + 1).all()
        assert (handle.get_buffer(peer, (8,), torch.bfloat16, storage_offset=24) == peer + 1).all()
    assert symm_mem.rendezvous(tensor, dist.group.WORLD).buffer_ptrs == handle.buffer_ptrs
    handle.barrier()


def rank_writes_memory_of_peers() -> None:
    tensor, handle = make(WORLD, 3)
    for step in range(200):
        for peer in range(WORLD):
            handle.get_buffer(peer, (WORLD, 3), torch.float32)[RANK] = 100 * step + RANK
        handle.barrier(channel=step % 3)
        assert tensor[:, 0].tolist() == [100 * step + r for r in range(WORLD)], step
        handle.barrier(channel=step % 3)


def signals_arrive_once_and_in_order() -> None:
    tensor, handle = make(1)
    right, left = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    for step in range(200):
        handle.get_buffer(right, (1,), torch.float32).fill_(step)
        handle.put_signal(right, channel=1)
        handle.wait_signal(left, channel=1)
        assert tensor.item() == step
        handle.barrier()
    assert handle.get_signal_pad(RANK).view(torch.int32).sum() == 0


def subgroup_has_its_own_memory() -> None:
    group = dist.new_group([0, WORLD - 1], timeout=timedelta(seconds=TIMEOUT))
    if RANK not in (0, WORLD - 1):
        return
    tensor, handle = make(2, group=group)
    tensor.fill_(RANK)
    handle.barrier()
    assert (handle.rank, handle.world_size) == (min(RANK, 1), 2)
    assert handle.get_buffer(1, (2,), torch.float32).tolist() == [WORLD - 1] * 2
    handle.barrier()


def tensor_releases_memory_and_descriptors() -> None:
    before = mapped()
    for _ in range(5):
        tensor, handle = make(1000)
        handle.barrier()
        del tensor, handle
    dist.barrier()
    assert mapped() == before, (mapped(), before)


def size_mismatch_raises_on_every_rank() -> None:
    raised(lambda: make(4096 if RANK == 1 else 64), "size mismatch: it has ", " bytes, this rank has ")


def invalid_channel_rank_or_tensor_raises() -> None:
    tensor, handle = make(4)
    raised(lambda: handle.put_signal(0, channel=10**6), "Channel 1000000")
    raised(lambda: handle.wait_signal(WORLD), f"Rank {WORLD} ")
    raised(lambda: handle.get_buffer(0, (100,), torch.float32), "exceeds the allocated size")
    raised(lambda: symm_mem.rendezvous(torch.empty(3), dist.group.WORLD), "_symmetric_memory.empty")
    raised(lambda: symm_mem.empty(1 << 42, device="cpu"), "bytes of shared memory")
    handle.barrier()


def timeout_fails_every_rank() -> None:
    _, handle = make(4)
    began = time.monotonic()
    if RANK == 0:
        raised(
            lambda: handle.wait_signal(1, channel=2, timeout_ms=300), "Rank 0 waited 3", "rank 1 (pid ", "wait_signal"
        )
        assert time.monotonic() - began < 1.3
    else:
        raised(lambda: handle.barrier(), "Rank 0 waited 3", "wait_signal, channel 2")
        assert time.monotonic() - began < 1.5
    raised(lambda: handle.put_signal(0), "Rank 0 waited 3")  # the error is sticky


def default_timeout_is_that_of_the_group() -> None:
    _, handle = make(4)
    began = time.monotonic()
    if RANK == 0:
        raised(lambda: handle.barrier(), "Rank 0 waited", "in barrier")
        assert TIMEOUT - 0.5 < time.monotonic() - began < TIMEOUT + 1
    else:
        time.sleep(TIMEOUT + 0.5)
    dist.barrier()


def exited_rank_is_noticed_at_once() -> None:
    """Runs last: rank 1 exits."""
    _, handle = make(4)
    if RANK == 1:
        os._exit(0)
    began = time.monotonic()
    raised(lambda: handle.wait_signal(1), "rank 1 (pid ", "process has exited")
    assert time.monotonic() - began < 1


SITUATIONS = [
    groups_on_one_store_stay_apart,
    every_rank_reads_every_buffer,
    rank_writes_memory_of_peers,
    signals_arrive_once_and_in_order,
    subgroup_has_its_own_memory,
    tensor_releases_memory_and_descriptors,
    size_mismatch_raises_on_every_rank,
    invalid_channel_rank_or_tensor_raises,
    timeout_fails_every_rank,
    default_timeout_is_that_of_the_group,
    exited_rank_is_noticed_at_once,
]


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=RANK,
        world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT),
    )
    results = {}
    for situation in SITUATIONS:
        if situation is exited_rank_is_noticed_at_once and RANK == 1:
            results[situation.__name__] = "ok"
            (folder / f"rank{RANK}.json").write_text(json.dumps(results))
        try:
            situation()
            results[situation.__name__] = "ok"
        except Exception:
            results[situation.__name__] = traceback.format_exc()
    (folder / f"rank{RANK}.json").write_text(json.dumps(results))
    os._exit(0)  # destroying the group needs rank 1


if __name__ == "__main__":
    main()
