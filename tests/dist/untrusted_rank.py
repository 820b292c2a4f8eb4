"""One rank of test_ucx.py on its own host, where UCX is not trusted: prints `explain` of a linear.

RANK=0 WORLD_SIZE=2 python untrusted_rank.py FOLDER
"""

from __future__ import annotations

import os
import pathlib
import sys

import torch
import torch.distributed as dist

import torchweft
from torchweft import ops

store = dist.FileStore(sys.argv[1] + "/store", 2)
dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
parallel = {"tensor_parallel_mode": "column", "tensor_parallel_group": dist.group.WORLD, "sequence_parallel": True}
block = ops.Sequential(ops.Linear(16, 16, overlap=True, **parallel))
x = torch.randn(4, 16)
block(x)
print(torchweft.explain(block, x).text)
print("UCX is loaded" if "libucp" in pathlib.Path("/proc/self/maps").read_text() else "UCX is not loaded")
dist.barrier()
