"""Trains two transformer blocks with tensor and sequence parallelism, and on one process, from the same checkpoint.

    python benchmarks/python/train_parallel.py                      300 steps on two ranks
    python benchmarks/python/train_parallel.py --quick              20 steps
    python benchmarks/python/train_parallel.py --plot FILE --json FILE

Ranks are processes on this machine. Attention is torch's, between a column-parallel qkv and a row-parallel projection;
norms, linears, activation and residuals are weft's. Exits with 1 unless the loss curves and the final weights are equal
within the tolerance of the dtype.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import torchweft
from torchweft import ops

VOCABULARY, WIDTH, HEADS, LAYERS, TOKENS, BATCH = 32, 64, 4, 2, 32, 4
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}  # of losses, and of weights relative to the largest


def linear(inputs: int, outputs: int, mode: str, group: Any) -> ops.Linear:
    if group is None:
        return ops.Linear(inputs, outputs)
    parallel = {"tensor_parallel_mode": mode, "tensor_parallel_group": group, "sequence_parallel": True}
    return ops.Linear(inputs, outputs, replicated_bias=mode == "row", **parallel)


class Block(torch.nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.qkv = ops.Sequential(ops.RMSNorm(WIDTH), linear(WIDTH, 3 * WIDTH, "column", group))
        self.projection = ops.Sequential(linear(WIDTH, WIDTH, "row", group), ops.AddExtraInput())
        self.mlp = ops.Sequential(
            ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False),
            ops.RMSNorm(WIDTH),
            linear(WIDTH, 4 * WIDTH, "column", group),
            ops.GELU(),
            linear(4 * WIDTH, WIDTH, "row", group),
            ops.AddExtraInput().set_extra_input_channel(0, "x"),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is [tokens of this rank, batch, width]. Attention covers all tokens for this rank's heads."""
        q, k, v = (t.unflatten(-1, (-1, WIDTH // HEADS)).permute(1, 2, 0, 3) for t in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mlp(self.projection(attended.permute(2, 0, 1, 3).flatten(2), x))


class Model(torch.nn.Module):
    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.Sequential(*[Block(group) for _ in range(LAYERS)])
        self.head = ops.Sequential(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, VOCABULARY))
        self.stacked = {f"blocks.{i}.qkv.1": 3 for i in range(LAYERS)}

    def sequence_parallel_parameters(self) -> list[torch.nn.Parameter]:
        """Returns the replicated parameters whose gradients cover only this rank's tokens."""
        norms = [module.weight for module in self.blocks.modules() if isinstance(module, ops.RMSNorm)]
        return [*self.embedding.parameters(), *self.head.parameters(), *norms]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random walks [tokens, batch] in which each token has two successors, one more likely, and the targets."""
    successors = torch.randperm(2 * VOCABULARY, generator=torch.Generator().manual_seed(0)).view(VOCABULARY, 2) // 2
    generator = torch.Generator().manual_seed(1 + step)
    walk = [torch.randint(VOCABULARY, (BATCH,), generator=generator)]
    for _ in range(TOKENS):
        rare = (torch.rand(BATCH, generator=generator, dtype=torch.float32) < 0.2).long()
        walk.append(successors[walk[-1], rare])
    tokens = torch.stack(walk)
    return tokens[:-1], tokens[1:]


def train(model: Model, steps: int, group: dist.ProcessGroup | None) -> list[float]:
    """Trains the model; returns the loss of each step."""
    ranks, rank = (group.size(), group.rank()) if group is not None else (1, 0)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, eps=1e-5
    )  # a large eps keeps gradients that are only noise small
    losses = []
    for step in range(steps):
        tokens, targets = (t.chunk(ranks)[rank] for t in batch(step))
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (TOKENS * BATCH)
        loss.backward()
        total = loss.detach().clone()
        if group is not None:
            for param in model.sequence_parallel_parameters():
                dist.all_reduce(param.grad, group=group)
            dist.all_reduce(total, group=group)
        optimizer.step()
        losses.append(total.item())
    return losses


def train_on_rank(folder: Path, steps: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    model = Model(dist.group.WORLD)
    model.load_state_dict(torchweft.checkpoint.shard_state_dict(torch.load(folder / "start.pt"), model, model.stacked))
    losses = train(model, steps, dist.group.WORLD)
    full = torchweft.checkpoint.gather_state_dict(model, model.stacked)
    if rank == 0:
        torch.save({"losses": losses, "state": full}, folder / "parallel.pt")
    dist.destroy_process_group()


def train_in_parallel(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    ranks = []
    command = [sys.executable, __file__, "--rank-of", str(folder), "--steps", str(arguments.steps)]
    try:
        for rank in range(arguments.ranks):
            words = {"RANK": str(rank), "WORLD_SIZE": str(arguments.ranks), "OMP_NUM_THREADS": "1"}
            ranks.append(
                subprocess.Popen([*command, "--dtype", arguments.dtype], env={**os.environ, **words}, text=True)
            )
        if any(rank.wait(timeout=1200) for rank in ranks):
            raise RuntimeError("a rank failed; see its output above")
    finally:
        for rank in ranks:
            rank.kill()
    return torch.load(folder / "parallel.pt")


def draw(one: list[float], parallel: list[float], ranks: int, file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "weft"})
    import matplotlib.pyplot as plt

    figure, (curves, difference) = plt.subplots(1, 2, figsize=(10, 3.6))
    curves.plot(one, color="#d98c3f", linewidth=4, alpha=0.6, label="one process")
    curves.plot(parallel, color="#3f7fbf", linewidth=1, label=f"{ranks} ranks, sequence parallel")
    curves.set(xlabel="step", ylabel="loss")
    curves.legend()
    difference.plot([abs(a - b) for a, b in zip(one, parallel, strict=True)], color="#333333", linewidth=1)
    difference.set(xlabel="step", ylabel="difference of the losses", yscale="log")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
    print(file)


def compare(one: dict[str, Any], parallel: dict[str, Any]) -> dict[str, float]:
    losses = max(abs(a - b) for a, b in zip(one["losses"], parallel["losses"], strict=True))
    weights = 0.0
    for name, value in one["state"].items():
        if value.numel():
            weights = max(weights, ((parallel["state"][name] - value).abs().max() / value.abs().max()).item())
    return {"losses differ by": losses, "weights differ by": weights}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--quick", action="store_true", help="20 steps")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the curves as SVG")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps = 20
    dtype = getattr(torch, arguments.dtype)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(1)
    if arguments.rank_of:
        train_on_rank(arguments.rank_of, arguments.steps)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = Model()
        torch.save(model.state_dict(), Path(folder) / "start.pt")
        parallel = train_in_parallel(Path(folder), arguments)
        one = {"losses": train(model, arguments.steps, None), "state": model.state_dict()}
    found = compare(one, parallel)
    equal = found["losses differ by"] <= TOLERANCE[dtype] and found["weights differ by"] <= 10 * TOLERANCE[dtype]
    result = {"steps": arguments.steps, "ranks": arguments.ranks, "dtype": arguments.dtype, **found, "equal": equal}
    print(
        f"loss {one['losses'][0]:.4f} -> {one['losses'][-1]:.4f}; "
        + ", ".join(f"{k} {v:.1e}" for k, v in found.items())
    )
    if arguments.plot:
        draw(one["losses"], parallel["losses"], arguments.ranks, arguments.plot)
    if arguments.json:
        curves = {"one process": one["losses"], "parallel": parallel["losses"]}
        arguments.json.write_text(json.dumps(result | {"losses": curves}, indent=1) + "\n")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
