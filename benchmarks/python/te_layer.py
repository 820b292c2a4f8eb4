"""A step of Transformer Engine's TransformerLayer on a simulated device over the same layer in plain torch on the CPU.

    PYTHONPATH=python:build/te python benchmarks/python/te_layer.py --dtype float32
    PYTHONPATH=python:build/te python benchmarks/python/te_layer.py --dtype float32 --quick    256 tokens only

Forward and backward, causal attention without dropout, width 1024, 16 heads. Both are given the same weights and must
give the same output. tools/claims.py compares with the bound.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from measure import Meter
from problems import exit_unless_close, main

import torchweft.te

torchweft.te.install()
import transformer_engine.pytorch as te  # noqa: E402

WIDTH, HEADS, HIDDEN = 1024, 16, 4096
AT_MOST = 1.0


class Problem(NamedTuple):
    tokens: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {str(self.dtype).removeprefix('torch.')}"


def plain_layer(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The layer in plain torch; x is [sequence, batch, width]."""
    qkv, proj, mlp = "self_attention.layernorm_qkv.", "self_attention.proj.", "layernorm_mlp."
    s, b, _ = x.shape
    h = F.layer_norm(x, (WIDTH,), p[f"{qkv}layer_norm_weight"], p[f"{qkv}layer_norm_bias"])
    mixed = F.linear(h, p[f"{qkv}weight"], p[f"{qkv}bias"]).view(s, b, HEADS, 3, WIDTH // HEADS)
    q, k, v = mixed.permute(3, 1, 2, 0, 4)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).reshape(s, b, WIDTH)
    x = x + F.linear(attended, p[f"{proj}weight"], p[f"{proj}bias"])
    h = F.layer_norm(x, (WIDTH,), p[f"{mlp}layer_norm_weight"], p[f"{mlp}layer_norm_bias"])
    h = F.gelu(F.linear(h, p[f"{mlp}fc1_weight"], p[f"{mlp}fc1_bias"]), approximate="tanh")
    return x + F.linear(h, p[f"{mlp}fc2_weight"], p[f"{mlp}fc2_bias"])


def measure(problem: Problem, meter: Meter) -> dict[str, object]:
    torch.manual_seed(0)
    layer = te.TransformerLayer(
        WIDTH, HIDDEN, HEADS, hidden_dropout=0, attention_dropout=0, fuse_qkv_params=True, params_dtype=problem.dtype
    )
    weights = {n: q.detach().cpu().clone().requires_grad_() for n, q in layer.named_parameters()}
    x = torch.randn(problem.tokens, 1, WIDTH, dtype=problem.dtype)
    inputs = {"te": x.cuda().requires_grad_(), "torch": x.clone().requires_grad_()}
    dy = {"te": torch.ones_like(inputs["te"]), "torch": torch.ones_like(x)}
    found = layer(inputs["te"]).detach().cpu()
    exit_unless_close(problem, "te", [found], [plain_layer(weights, inputs["torch"]).detach()])

    def with_te() -> None:
        layer.zero_grad()
        inputs["te"].grad = None
        layer(inputs["te"]).backward(dy["te"])

    def with_torch() -> None:
        for weight in (*weights.values(), inputs["torch"]):
            weight.grad = None
        plain_layer(weights, inputs["torch"]).backward(dy["torch"])

    meter.now = time.process_time  # type: ignore[method-assign]  # backward runs in the thread of the device
    taken = meter.measure({"te": with_te, "torch": with_torch}, control="torch")
    ratio = taken.figure(f"{problem}: te.TransformerLayer / plain torch, a step", "torch", AT_MOST)
    print(f"{ratio['name']} {ratio['value']:.2f} [{ratio['interval'][0]:.2f}, {ratio['interval'][1]:.2f}]", flush=True)
    return {
        "problem": str(problem), "threads": meter.threads, "times": {ratio["name"]: asdict(taken)}, "figures": [ratio],
    }  # fmt: skip


def problems(dtype: torch.dtype) -> list[Problem]:
    return [Problem(256, dtype), Problem(1024, dtype)]


if __name__ == "__main__":
    main(__doc__, problems, measure)
