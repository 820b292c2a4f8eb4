"""One rank of test_data_parallel.py: trains a model with DDP or FSDP2, once per given situation.

    RANK=0 WORLD_SIZE=2 python data_parallel.py FOLDER SITUATION…

Rank 0 writes FOLDER/SITUATION.pt: gradients and parameters, or the traceback.
"""

from __future__ import annotations

import os
import pathlib
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchweft import ops

WIDTH, HEADS, SEQUENCES, TOKENS, STEPS = 16, 2, 8, 5, 3


def make_model() -> ops.Sequential:
    """A transformer layer, with the residuals passed by channels."""
    torch.manual_seed(7)
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "attention", output_to_caller=False),
        ops.RMSNorm(WIDTH),
        # No bias: that of the keys has gradient 0, and AdamW would turn its rounding errors into updates.
        ops.Linear(WIDTH, 3 * WIDTH, bias=False),
        ops.DotProductAttention(HEADS, WIDTH // HEADS, qkv_format="bshd", qkv_layout="group_interleaved"),
        ops.Linear(WIDTH, WIDTH),
        ops.AddExtraInput().set_extra_input_channel(0, "attention"),
        ops.MakeExtraOutput().set_extra_output_channel(0, "mlp", output_to_caller=False),
        ops.RMSNorm(WIDTH),
        ops.Linear(WIDTH, 2 * WIDTH),
        ops.GELU(),
        ops.Linear(2 * WIDTH, WIDTH),
        ops.AddExtraInput().set_extra_input_channel(0, "mlp"),
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences of all ranks, and their targets."""
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, SEQUENCES, TOKENS, WIDTH, generator=generator)
    return x, target


def make_optimizer(situation: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if "adamw" in situation:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def wrap(situation: str, model: ops.Sequential) -> torch.nn.Module:
    match situation.removesuffix("-adamw"):
        case "ddp-checkpointed":
            return DistributedDataParallel(checkpoint_wrapper(model))
        case "fsdp-checkpointed":
            return fully_shard(checkpoint_wrapper(model))
        case "ddp-block":
            return DistributedDataParallel(model)
        case "ddp-op":
            model[2] = DistributedDataParallel(model[2])
            return model
        case "fsdp-block":
            return fully_shard(model)
        case "fsdp-op":
            fully_shard(model[2])
            return fully_shard(model)
        case "fsdp-only-op":
            fully_shard(model[2])
            return model
        case "fsdp-bf16":
            return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    raise ValueError(situation)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def average_unwrapped(model: torch.nn.Module) -> None:
    """Averages the gradients that no wrapper averages, as a user would."""
    covered = [m for m in model.modules() if isinstance(m, DistributedDataParallel | FSDPModule)]
    ids = {id(p) for m in covered for p in m.parameters()}
    for param in model.parameters():
        if id(param) not in ids and not isinstance(param, DTensor):
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0, world: int = 1) -> dict:
    """Gradients of the first step, parameters after the last step, and the full state dict, by name."""
    grads, dtypes = {}, set()
    for step in range(STEPS):
        x, target = (t.chunk(world)[rank] for t in batch(step))
        optimizer.zero_grad()
        y = model(x)
        dtypes.add(str(y.dtype))
        (y - target).square().mean().backward()
        if world > 1:
            average_unwrapped(model)
        if step == 0:
            grads = {plain_name(name): whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
    params = {plain_name(name): whole(p) for name, p in model.named_parameters()}
    return {"grads": grads, "params": params, "dtypes": dtypes, "state": full_state(model)}


def full_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict gathered by torch's helpers; checks that it loads again."""
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    set_model_state_dict(model, {name: value.clone() for name, value in state.items()}, options=options)
    return {name: value.detach().clone() for name, value in state.items()}


def plain_name(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("module.", "")


def run_situations(make: Callable[[str], tuple[torch.nn.Module, torch.optim.Optimizer]]) -> None:
    """Main function of a rank: trains `make(situation)` for each situation of the command line."""
    folder, *situations = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    for situation in situations:
        try:
            result = train(*make(situation), rank, world)
        except Exception:  # both ranks fail in the same place, so the next situation starts in step
            result = traceback.format_exc()
        if rank == 0:
            torch.save(result, pathlib.Path(folder) / f"{situation}.pt")
        dist.barrier()
    dist.destroy_process_group()


def on_ranks(folder: pathlib.Path, situation: str) -> dict:
    """The result that rank 0 wrote."""
    result = torch.load(folder / f"{situation}.pt")
    assert isinstance(result, dict), result
    return result


def wrapped(situation: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = wrap(situation, make_model())
    return model, make_optimizer(situation, model)


if __name__ == "__main__":
    run_situations(wrapped)
