"""Activations with `cache_quantized_input` save their input in FP8; backward computes with the values of the codes."""

from __future__ import annotations

import pytest
import torch

from torchweft import ops
from torchweft.quantization import Quantizer

NAMES = "GELU SiLU ReLU SReLU QGELU GLU GEGLU QGEGLU ReGLU SReGLU SwiGLU SiTUGLU ClampedSwiGLU".split()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values_of_codes(x: torch.Tensor) -> torch.Tensor:
    rows = x.detach().reshape(-1, x.shape[-1] if x.dim() else 1)
    return Quantizer("current").quantize(rows).dequantize(dtype=x.dtype).view(x.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_that_of_the_codes(name, dtype):
    op, exact = getattr(ops, name)(cache_quantized_input=True), getattr(ops, name)()
    x = torch.randn(5, 3, 16).to(dtype).requires_grad_()
    y = op(x)
    dy = torch.randn_like(y)
    assert torch.equal(y, exact(x))
    rounded = values_of_codes(x).requires_grad_()
    (expected,) = torch.autograd.grad(exact(rounded), rounded, dy)
    (got,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(got, expected)
    (unrounded,) = torch.autograd.grad(exact(x), x, dy)
    assert name in ("ReLU", "ReGLU") or not torch.equal(got, unrounded)


@pytest.mark.parametrize("shape", [(), (0, 8), (3, 0), (1,)])
def test_any_shape(shape):
    x = torch.randn(shape, requires_grad=True)
    y = ops.GELU(cache_quantized_input=True)(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == x.shape


def test_saves_a_byte_per_value():
    x, saved = torch.randn(64, 256, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.GELU(cache_quantized_input=True)(x)
    assert [t.dtype for t in saved] == [torch.uint8] and saved[0].numel() <= x.numel() + 128


def test_fusions_leave_it_alone_and_say_why():
    def block(cached: bool) -> ops.Sequential:
        torch.manual_seed(0)
        return ops.Sequential(
            ops.RMSNorm(16), ops.Linear(16, 32), ops.SwiGLU(cache_quantized_input=cached), ops.Linear(16, 16)
        )

    x, cached = torch.randn(32, 16, requires_grad=True), block(True)
    text = cached.explain(x).text
    assert "mlp_block" in text and "cache_quantized_input: the activation saves its input in FP8" in text
    plan = cached.explain(x).data[0]
    assert all("SwiGLU" in {s["name"] for s in plan[which]} for which in ("forward", "backward"))
    torch.testing.assert_close(cached(x), block(False)(x))
    cached(x).sum().backward()


def test_compiled_call_equals_eager():
    op = ops.Sequential(ops.Linear(16, 16), ops.GELU(cache_quantized_input=True))
    x = torch.randn(8, 16, requires_grad=True)
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True, dynamic=True)
    for run in (op, compiled):
        x.grad = None
        run(x).square().sum().backward()
        grads = [x.grad, op[0].weight.grad.clone()]
        op.zero_grad()
        if run is op:
            expected = grads
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)
