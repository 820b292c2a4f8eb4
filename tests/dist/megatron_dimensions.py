"""Cases of megatron_rank.py with data, context and expert parallelism. On one rank a case writes the loss and gradient
norm of each step, on more it compares with them."""

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron_cases import TOLERANCE, Trainer, compare

STEPS = 3
SHARDED = {
    "fuser": False,
    "accumulate": True,
    "shared": {"use_distributed_optimizer": True},
    "bf16": True,
    "params_dtype": torch.bfloat16,
}
OPTIMIZER_FORMATS = ("fully_reshardable", "dp_zero_gather_scatter", "dp_reshardable")


def same_steps(folder: Path, what: str, sequence: bool = False, tolerance: float = TOLERANCE, **options) -> None:
    """The first steps of a model have the losses and gradient norms of one rank."""
    one, file = dist.get_world_size() == 1, folder / f"{what}.pt"
    known = {"weights": {}, "steps": []} if one else torch.load(file)
    trainer = Trainer(sequence, whole=known["weights"], **{"fuser": False, "accumulate": True} | options)
    for number in range(STEPS):
        loss, norm = trainer.step(number)
        if one:
            known["steps"].append({"loss": loss, "norm": norm})
        compare({"loss": loss, "norm": norm}, known["steps"][number], f"{what} {number}", tolerance)
    if one:
        torch.save(known, file)


def context(folder: Path) -> None:
    for kind in ("p2p", "all_gather", "a2a"):
        half = {
            "bf16": True,
            "params_dtype": torch.bfloat16,
        }  # Transformer Engine has no context parallelism in float32
        same_steps(folder, f"context {kind}", tolerance=0.05, cp_comm_type=kind, **half)


def experts(folder: Path) -> None:
    options = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
    for fusion in (False, True):
        more = {"moe_token_dispatcher_type": "alltoall", "moe_permute_fusion": fusion}
        same_steps(folder, f"experts fusion={fusion}", **options, **more)


def fully_sharded(folder: Path) -> None:
    wrapper = {} if dist.get_world_size() == 1 else {"wrapper": TorchFullyShardedDataParallel}
    same_steps(folder, "fully sharded", accumulate=False, **wrapper)


def optimizer_formats(folder: Path) -> None:
    """A run that loads a checkpoint of the distributed optimizer, in each format, continues bit-equal."""
    same_steps(folder, "distributed optimizer", shared=SHARDED["shared"])
    ranks = dist.get_world_size()
    for name in OPTIMIZER_FORMATS:
        torch.manual_seed(1)
        trainer = Trainer(False, **SHARDED)
        trainer.step(0)
        trainer.save(folder / f"{name}{ranks}", optimizer_format=name)
        expected = [trainer.step(number) for number in (1, 2)]
        torch.save(expected, folder / f"{name}{ranks}.pt")
        loaded = Trainer(False, **SHARDED)
        loaded.load(folder / f"{name}{ranks}", optimizer_format=name)
        got = [loaded.step(number) for number in (1, 2)]
        print(f"{name}: {got}", flush=True)
        assert got == expected, (name, got, expected)


def optimizer_resharded(folder: Path) -> None:
    """One rank loads the checkpoints of two data-parallel ranks and continues with their losses."""
    for name in OPTIMIZER_FORMATS[:2]:
        trainer = Trainer(False, **SHARDED)
        trainer.load(folder / f"{name}2", optimizer_format=name)
        for number, (loss, norm) in zip((1, 2), torch.load(folder / f"{name}2.pt"), strict=True):
            got = trainer.step(number)
            print(f"{name}: loss off by {abs(got[0] / loss - 1):.1e}, norm by {abs(got[1] / norm - 1):.1e}", flush=True)
            assert abs(got[0] / loss - 1) < 1e-3 and abs(got[1] / norm - 1) < 1e-2, (got, loss, norm)


CASES = {
    "context": (context, ("context_parallel_size",)),
    "experts": (experts, ("expert_model_parallel_size",)),
    "fully_sharded": (fully_sharded, ()),
    "optimizer_formats": (optimizer_formats, ()),
    "optimizer_resharded": (optimizer_resharded, ()),
}
