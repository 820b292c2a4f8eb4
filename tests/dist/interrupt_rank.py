"""One rank of test_interrupt.py: rank 0 waits for rank 1, which never arrives, until it is interrupted.

    RANK=0 WORLD_SIZE=2 python interrupt_rank.py FOLDER WHERE

WHERE: forward, backward, rendezvous or signal. Writes FOLDER/rank0.waiting before the wait, and FOLDER/rank0.raised
with the type of the exception that ended it.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from torchweft import ops


def main() -> None:
    folder, where = pathlib.Path(sys.argv[1]), sys.argv[2]
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's processes ignore the signal
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    linear = ops.Linear(
        16,
        16,
        tensor_parallel_mode="column",
        tensor_parallel_group=dist.group.WORLD,
        sequence_parallel=True,
        overlap=True,
    )
    tensor = symm_mem.empty(16, device="cpu")
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD) if where == "signal" else None
    x = torch.randn(4, 16, requires_grad=True)
    if where in ("forward", "backward"):
        y = linear(x)
    if rank == 1:
        time.sleep(120)
    try:
        (folder / "rank0.waiting").touch()
        if where == "backward":
            y.sum().backward()
        elif where == "signal":
            handle.wait_signal(1, channel=0)
        else:
            linear(x)
        kind = "nothing"
    except BaseException as error:
        kind = f"{type(error).__name__}: {error}"
    (folder / "rank0.raised").write_text(kind)
    os._exit(0)  # the group has failed: skip its shutdown


if __name__ == "__main__":
    main()
