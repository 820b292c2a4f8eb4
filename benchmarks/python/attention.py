"""Causal self-attention, forward and backward: weft's DotProductAttention on a packed QKV activation, and torch's
scaled_dot_product_attention on views of it.

    python benchmarks/python/attention.py               12 heads; batch, tokens and head_dim of SPEEDUPS; bf16
    python benchmarks/python/attention.py --quick       the smallest
    python benchmarks/python/attention.py --threads 2 --dtype float32
    python benchmarks/python/attention.py --json FILE   also as JSON

Both sides run interleaved in one process (measure.py); tools/claims.py compares with the bounds, which are those of the
AMX kernel. Exits with 1 if results are wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from measure import Meter

from weft import ops

HEADS = 12
SPEEDUPS = {(2, 512, 64): 6, (1, 2048, 64): 4.2, (1, 2048, 128): 2.9, (1, 4096, 128): 2.7}  # SDPA / weft, bf16


class Problem(NamedTuple):
    batch: int
    tokens: int
    head_dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.tokens} tokens, head_dim {self.head_dim}, {str(self.dtype)[6:]}"


class Pass:
    """A forward and backward pass of each side on the same activation."""

    def __init__(self, p: Problem) -> None:
        torch.manual_seed(0)
        width = HEADS * p.head_dim
        self.qkv = torch.randn(p.batch, p.tokens, 3 * width).to(p.dtype).requires_grad_()
        self.dy = torch.randn(p.batch, p.tokens, width).to(p.dtype)
        self.op = ops.DotProductAttention(HEADS, p.head_dim, qkv_format="bshd", qkv_layout="concatenated")

    def run(self, forward: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        self.qkv.grad = None
        y = forward()
        y.backward(self.dy)
        return [y.detach(), self.qkv.grad]

    def weft(self) -> list[torch.Tensor]:
        return self.run(lambda: self.op(self.qkv))

    def sdpa(self) -> list[torch.Tensor]:
        def forward() -> torch.Tensor:
            q, k, v = self.qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

        return self.run(forward)


def measure(p: Problem, meter: Meter) -> dict[str, object]:
    one = Pass(p)
    for mine, other in zip(one.weft(), one.sdpa(), strict=True):
        error = (torch.linalg.vector_norm((mine - other).float()) / torch.linalg.vector_norm(other.float())).item()
        if not error < 0.02:
            sys.exit(f"{p}: weft and SDPA differ by {error:.3f}; nothing was timed")
    found = meter.measure({"weft": one.weft, "sdpa": one.sdpa}, control="sdpa")
    ratio, (low, high) = found.versus["sdpa"].ratio, found.versus["sdpa"].interval
    print(f"{p}: weft {found.ms:.1f} ms, SDPA / weft {1 / ratio:.2f}", end="")
    print(f" [{1 / high:.2f}, {1 / low:.2f}]  kept {found.kept} of {found.rounds}", flush=True)
    bound = SPEEDUPS[p[:3]] if p.dtype == torch.bfloat16 else None
    figures = [found.inverse(f"{p}, {meter.threads} threads: SDPA / weft", "sdpa", bound)]
    return {"problem": str(p), "threads": meter.threads, **asdict(found), "figures": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one problem")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write the rows to this file")
    a = parser.parse_args()
    problems = [Problem(*shape, getattr(torch, a.dtype)) for shape in SPEEDUPS]
    meter = Meter(a.threads, a.rounds, 3 * a.rounds)
    rows = [measure(p, meter) for p in (problems[:1] if a.quick else problems)]
    if a.json:
        with open(a.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
