"""One rank of test_failures.py: trains two tensor-parallel linears until an error occurs, and reports it.

    RANK=0 WORLD_SIZE=2 python failures.py FOLDER [--fault NAME]

Writes FOLDER/rank<r>.started before the first step, in which the ranks exchange memory, FOLDER/rank<r>.ready after it,
and FOLDER/rank<r>.json after the error: the error, its time, when its step began, and whether each `main_grad` matches
its flag. With `--fault` this rank runs a different collective instead of being killed.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from torchweft import ops

WIDTH, HIDDEN, ROWS = 64, 128, 32  # rows of each rank


def make_model(group: dist.ProcessGroup, accumulate: bool = True) -> ops.Sequential:
    torch.manual_seed(3)
    parallel = {
        "tensor_parallel_group": group,
        "sequence_parallel": True,
        "accumulate_into_main_grad": accumulate,
        "dtype": torch.bfloat16,
        "overlap": True,
        "bias": False,  # a plain collective sums its gradient, and its errors name no rank
    }
    return ops.Sequential(
        ops.Linear(WIDTH, HIDDEN, tensor_parallel_mode="column", **parallel),
        ops.GELU(),
        ops.Linear(HIDDEN, WIDTH, tensor_parallel_mode="row", **parallel),
    )


def weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.endswith("weight")]


def start(model: torch.nn.Module) -> None:
    """Resets `main_grad`, so that its value after a complete step is known to the bit."""
    for weight in weights(model):
        weight.main_grad = torch.full(weight.shape, 0.5)
        weight.grad_added_to_main_grad = False


def step(model: torch.nn.Module, rank: int, rows: int = ROWS, dtype: torch.dtype = torch.bfloat16) -> None:
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rank)).to(dtype).requires_grad_()
    y = model(x)
    y.backward(torch.ones_like(y))


def run_mismatch(fault: str, model: torch.nn.Module, rank: int, group: dist.ProcessGroup) -> None:
    """One step in which this rank does something different from the others."""
    match fault:
        case "rows":
            step(model, rank, rows=ROWS + 16)
        case "dtype":
            other = make_model(group).to(torch.float32)
            start(other)
            step(other, rank, dtype=torch.float32)
        case "order":
            x = torch.randn(ROWS * dist.get_world_size(group), HIDDEN // dist.get_world_size(group))
            model[2](x.to(torch.bfloat16))
        case "width":
            parallel = {"tensor_parallel_group": group, "sequence_parallel": True, "dtype": torch.bfloat16}
            wide = ops.Linear(2 * WIDTH, HIDDEN, tensor_parallel_mode="column", overlap=True, **parallel)
            wide(torch.randn(ROWS, 2 * WIDTH).to(torch.bfloat16))
        case _:
            raise ValueError(fault)


def main_grad_errors(model: torch.nn.Module, complete: list[torch.Tensor]) -> list[str]:
    """Weights whose main_grad does not match its flag."""
    wrong = []
    for i, (weight, after) in enumerate(zip(weights(model), complete, strict=True)):
        added = bool(weight.grad_added_to_main_grad)
        expected = after if added else torch.full_like(after, 0.5)
        if not torch.equal(weight.main_grad, expected):
            wrong.append(f"weight {i}: flag {added}, but main_grad has another value")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--fault")
    arguments = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder, report = arguments.folder, arguments.folder / f"rank{rank}.json"
    torch.set_num_threads(1)
    timeout = timedelta(seconds=float(os.environ["WEFT_TIMEOUT"]))
    model, complete, began = None, None, time.time()
    try:
        store = dist.FileStore(str(folder / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        model = make_model(dist.group.WORLD)
        start(model)
        torch.ones(1, requires_grad=True).backward(torch.ones(1))  # in its first one torch imports sympy, for a second
        (folder / f"rank{rank}.started").touch()
        began = time.time()
        step(model, rank)
        complete = [weight.main_grad.clone() for weight in weights(model)]
        (folder / f"rank{rank}.ready").touch()
        for number in range(1_000_000):
            start(model)
            began = time.time()
            if arguments.fault and number == 3:
                run_mismatch(arguments.fault, model, rank, dist.group.WORLD)
            else:
                step(model, rank)
        result = {"error": "", "kind": "none"}
    except Exception as error:
        result = {"error": str(error), "kind": type(error).__name__}
    result |= {"time": time.time(), "began": began}
    result["wrong"] = main_grad_errors(model, complete) if complete else []
    try:  # a failed group rejects further calls at once
        before = time.time()
        if complete:
            step(model, rank)
            result["again"] = "ran"
    except Exception as error:
        result["again"] = f"{time.time() - before:.2f} s: {error}"
    part = report.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.rename(report)
    os._exit(0)  # the group has failed: skip its shutdown


if __name__ == "__main__":
    main()
