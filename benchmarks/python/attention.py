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

from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from measure import Meter
from problems import exit_unless_close, main, print_speedups

from torchweft import ops

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
    exit_unless_close(p, "weft", one.weft(), one.sdpa())
    found = meter.measure({"weft": one.weft, "SDPA": one.sdpa}, control="SDPA")
    print_speedups(p, found)
    bound = SPEEDUPS[p[:3]] if p.dtype == torch.bfloat16 else None
    figures = [found.inverse(f"{p}, {meter.threads} threads: SDPA / weft", "SDPA", bound)]
    return {"problem": str(p), "threads": meter.threads, **asdict(found), "figures": figures}


if __name__ == "__main__":
    main(__doc__, lambda dtype: [Problem(*shape, dtype) for shape in SPEEDUPS], measure)
