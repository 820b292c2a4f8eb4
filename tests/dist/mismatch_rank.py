"""One rank of test_mismatch.py: for each case the ranks run many equal collectives, then different ones.

    RANK=0 WORLD_SIZE=2 python mismatch_rank.py FOLDER CASE...

A case is "A|B": the operation of rank 0 and that of all other ranks, each "operation:dtype:rowsxcolumns". Each case
uses a new group. Writes FOLDER/rank<r>.json: for each case the type and the text of the exception.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from torchweft import ops

IN_STEP = 120  # collectives before the mismatch


def run(what: str, group: dist.ProcessGroup) -> None:
    name, dtype, sizes = what.split(":")
    rows, columns = map(int, sizes.split("x"))
    operation = {"gather": ops.AllGather, "scatter": ops.ReduceScatter, "sum": ops.AllReduce}[name](group)
    operation(torch.ones(rows, columns, dtype=getattr(torch, dtype)))


def overlapped(what: str, group: dist.ProcessGroup) -> None:
    name, dtype, sizes = what.split(":")
    rows, columns = map(int, sizes.split("x"))
    parallel = {"tensor_parallel_group": group, "sequence_parallel": True, "overlap": True}
    size = dist.get_world_size(group)
    mode, given = ("column", columns) if name == "gather" else ("row", columns * size)
    linear = ops.Linear(given, columns * size, tensor_parallel_mode=mode, dtype=getattr(torch, dtype), **parallel)
    linear(torch.ones(rows, columns, dtype=getattr(torch, dtype)))


def wait_for(store: dist.Store, what: str, size: int) -> None:
    """Waits until every rank has called this."""
    store.add(what, 1)
    deadline = time.monotonic() + 60
    while store.add(what, 0) < size:
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.001)


def main() -> None:
    folder, cases = pathlib.Path(sys.argv[1]), sys.argv[2:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    act = run if os.environ["WEFT_TRANSPORT"] == "plain" else overlapped
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=5))
    found = []
    for number, case in enumerate(cases):
        group = dist.new_group()
        for _ in range(IN_STEP if act is run else 3):
            act("gather:float32:4x4", group)
        wait_for(
            store, f"in step {number}", size
        )  # or a mismatch of two ranks could fail the last equal step of a third
        try:
            act(case.split("|")[min(rank, 1)], group)
            found.append(["none", ""])
        except Exception as error:
            found.append([type(error).__name__, str(error)])
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    wait_for(store, "done", size)  # a rank that exits closes memory that others may still read
    os._exit(0)


if __name__ == "__main__":
    main()
