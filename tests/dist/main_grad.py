"""One rank of test_main_grad.py: wraps modules for data parallelism and records warnings about `main_grad`.

    RANK=0 WORLD_SIZE=2 python main_grad.py FOLDER SITUATION…

Rank 0 writes FOLDER/SITUATION.pt: the texts of warnings, and of an error if one was raised.
"""

from __future__ import annotations

import os
import pathlib
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchweft
from torchweft import ops

WIDTH = 8


def nested(**options) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), ops.Sequential(ops.GELU(), ops.Linear(WIDTH, WIDTH, **options))
    )


def frozen(module: torch.nn.Module) -> torch.nn.Module:
    module[1][1].weight.requires_grad_(False)
    return module


def ignored(module: torch.nn.Module, name: str) -> torch.nn.Module:
    module._ddp_params_and_buffers_to_ignore = [name]
    return module


def switched(on: bool) -> torch.nn.Module:
    module = ops.Linear(WIDTH, WIDTH, accumulate_into_main_grad=not on)
    module.accumulate_into_main_grad = on
    return module


ON = {"accumulate_into_main_grad": True}
WARNED = {  # situation: (module, names in the warning)
    "linear": (lambda: ops.Linear(WIDTH, WIDTH, **ON), ["weight"]),
    "basic linear": (lambda: ops.BasicLinear(WIDTH, WIDTH, **ON), ["weight"]),
    "nested": (lambda: nested(**ON), ["1.1.weight"]),
    "grouped": (lambda: ops.GroupedLinear(2, WIDTH, WIDTH, **ON), ["weight0", "weight1"]),
    "switched on": (lambda: switched(True), ["weight"]),
    "others ignored": (lambda: ignored(nested(**ON), "0.weight"), ["1.1.weight"]),
}
SILENT = {
    "off": nested,
    "frozen": lambda: frozen(nested(**ON)),
    "ignored": lambda: ignored(nested(**ON), "1.1.weight"),
    "switched off": lambda: switched(False),
    "delayed": lambda: ops.Linear(WIDTH, WIDTH, delay_wgrad_compute=True),
}


def fsdp(module: torch.nn.Module) -> None:
    module.weight.main_grad = torch.zeros(WIDTH, WIDTH)
    fully_shard(module)(torch.ones(4, WIDTH)).sum().backward()


def run(situation: str) -> None:
    if situation == "fsdp":
        fsdp(ops.Linear(WIDTH, WIDTH, **ON))
    elif situation in SILENT:
        DistributedDataParallel(SILENT[situation]())
    else:
        DistributedDataParallel(WARNED[situation][0]())


def main() -> None:
    folder, *situations = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    for situation in situations:
        error = ""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                run(situation)
            except RuntimeError as raised:  # on both ranks
                error = str(raised)
        messages = [(str(w.message), w.filename) for w in seen if w.category is torchweft.MainGradNotReducedWarning]
        if rank == 0:
            torch.save({"messages": messages, "error": error}, pathlib.Path(folder) / f"{situation}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
