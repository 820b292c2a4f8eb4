"""One rank of test_moe.py: trains the mixture of experts of examples/python/moe.py.

    RANK=0 WORLD_SIZE=2 python moe_rank.py FOLDER STEPS

Each rank writes FOLDER/RANK.pt: losses and expert loads of all steps, and its final parameters.
"""

import os
import pathlib
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/python"))

import moe  # noqa: E402

if __name__ == "__main__":
    folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    model, losses, loads = moe.train(steps)
    torch.save({"losses": losses, "loads": torch.stack(loads), **model.state_dict()}, folder / f"{rank}.pt")
    dist.destroy_process_group()
