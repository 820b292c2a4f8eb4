"""Modules of the installed, unmodified `transformer_engine` against plain torch in float64, forward and backward.

pytest -p torchweft.te.pytest_plugin tests/te
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from transformer_engine.common import recipe

WIDTH, HIDDEN, HEADS = 64, 128, 4
Parameters = dict[str, torch.Tensor]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.cpu().double()
    return ((found.detach().cpu().double() - expected).norm() / expected.norm()).item()


def layer_norm(p: Parameters, x: torch.Tensor, prefix: str = "") -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], p[f"{prefix}layer_norm_weight"], p[f"{prefix}layer_norm_bias"])


def mlp(p: Parameters, x: torch.Tensor, prefix: str = "") -> torch.Tensor:
    h = F.linear(layer_norm(p, x, prefix), p[f"{prefix}fc1_weight"], p[f"{prefix}fc1_bias"])
    return F.linear(F.gelu(h, approximate="tanh"), p[f"{prefix}fc2_weight"], p[f"{prefix}fc2_bias"])


def attention(p: Parameters, x: torch.Tensor) -> torch.Tensor:
    s, b, _ = x.shape
    part = "self_attention.layernorm_qkv."
    qkv = F.linear(layer_norm(p, x, part), p[f"{part}weight"], p[f"{part}bias"]).view(s, b, HEADS, 3, WIDTH // HEADS)
    q, k, v = (t.permute(1, 2, 0, 3) for t in qkv.unbind(3))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).reshape(s, b, WIDTH)
    return F.linear(y, p["self_attention.proj.weight"], p["self_attention.proj.bias"])


def transformer_layer(p: Parameters, x: torch.Tensor) -> torch.Tensor:
    x = x + attention(p, x)
    return x + mlp(p, x, "layernorm_mlp.")


def sequential(p: Parameters, x: torch.Tensor) -> torch.Tensor:
    h = F.linear(F.rms_norm(x, (WIDTH,), p["0.weight"], 1e-5), p["1.weight"], p["1.bias"])
    a, b = h.chunk(2, -1)
    return F.linear(F.silu(a) * b, p["3.weight"], p["3.bias"])


SPLITS = [32, 0, 32]


def grouped(p: Parameters, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([F.linear(t, p[f"weight{i}"], p[f"bias{i}"]) for i, t in enumerate(x.split(SPLITS))])


def make_layer(dtype: torch.dtype) -> torch.nn.Module:
    return te.TransformerLayer(
        WIDTH, HIDDEN, HEADS, hidden_dropout=0, attention_dropout=0, fuse_qkv_params=True, params_dtype=dtype
    )


def make_sequential(dtype: torch.dtype) -> torch.nn.Module:
    ops = te.ops
    return ops.Sequential(
        ops.RMSNorm(WIDTH, dtype=dtype),
        ops.Linear(WIDTH, HIDDEN, dtype=dtype),
        ops.SwiGLU(),
        ops.Linear(HIDDEN // 2, WIDTH, dtype=dtype),
    )


# name → (makes the module, the same in plain torch, sizes of its input, arguments after it)
MODULES: dict[str, tuple[Callable, Callable, tuple[int, ...], tuple]] = {
    "Linear": (
        lambda dtype: te.Linear(WIDTH, 96, params_dtype=dtype),
        lambda p, x: F.linear(x, p["weight"], p["bias"]),
        (32, WIDTH),
        (),
    ),
    "LayerNormLinear": (
        lambda dtype: te.LayerNormLinear(WIDTH, 96, params_dtype=dtype),
        lambda p, x: F.linear(layer_norm(p, x), p["weight"], p["bias"]),
        (32, WIDTH),
        (),
    ),
    "LayerNormMLP": (lambda dtype: te.LayerNormMLP(WIDTH, HIDDEN, params_dtype=dtype), mlp, (32, WIDTH), ()),
    "TransformerLayer": (make_layer, transformer_layer, (32, 2, WIDTH), ()),
    "ops.Sequential": (make_sequential, sequential, (32, WIDTH), ()),
    "GroupedLinear": (
        lambda dtype: te.GroupedLinear(3, WIDTH, 96, params_dtype=dtype),
        grouped,
        (64, WIDTH),
        (SPLITS,),
    ),
}
RECIPES = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}


def errors(name: str, dtype: torch.dtype, chosen: recipe.Recipe | None = None) -> dict[str, float]:
    """The relative errors of the output and of every gradient against float64."""
    make, plain, sizes, arguments = MODULES[name]
    torch.manual_seed(0)
    module = make(dtype)
    x = torch.randn(sizes, device="cuda", dtype=dtype, requires_grad=True)
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        y = module(x, *arguments)
    dy = torch.randn_like(y)
    y.backward(dy)
    parameters = {n: p.detach().cpu().double().requires_grad_() for n, p in module.named_parameters()}
    copy = x.detach().cpu().double().requires_grad_()
    expected = plain(parameters, copy)
    expected.backward(dy.cpu().double())
    assert y.is_cuda and x.grad.is_cuda
    found = {"y": relative(y, expected), "x": relative(x.grad, copy.grad)}
    for n, p in module.named_parameters():
        assert p.grad is not None, f"{name}: {n} has no gradient"
        found[n] = relative(p.grad, parameters[n].grad)
    return found


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_module_is_that_of_plain_torch(name, dtype):
    limit = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    found = errors(name, dtype)
    assert max(found.values()) < limit, found


@pytest.mark.parametrize("chosen", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_quantized_module_is_near_plain_torch(name, chosen):
    found = errors(name, torch.bfloat16, RECIPES[chosen])
    limit = 0.45 if chosen == "nvfp4" else 0.12
    assert max(found.values()) < limit, found
    assert found["y"] > 2e-3, "nothing was quantized"
