"""weft's own operations on a device: the kernels and the bits of the CPU, without a copy."""

import copy
import pathlib
import sys

import pytest
import torch
from torch import nn

import torchweft as weft
import torchweft.ops as ops

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))
from test_every_op import CASES  # noqa: E402

GPU = torch.device("cuda", 1)
WIDTH = 64


def mlp():
    return weft.Sequential(
        ops.RMSNorm(WIDTH), ops.Linear(WIDTH, 128), ops.GELU(), ops.Linear(128, WIDTH), ops.Dropout(0.0)
    )


def gated():
    linears = ops.Linear(WIDTH, 256, bias=False), ops.Linear(128, WIDTH)
    return weft.Sequential(ops.LayerNorm(WIDTH), linears[0], ops.SwiGLU(), linears[1])


def scaled():
    return weft.Sequential(ops.Linear(WIDTH, WIDTH), ops.ReLU(), ops.Bias(WIDTH), ops.ConstantScale(2.0))


MODELS = {"mlp": mlp, "gated": gated, "scaled": scaled}


def step(model, x, dy):
    x = x.detach().requires_grad_()
    y = model(x)
    y.backward(dy)
    return [y, x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("rows", [3, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_bits_of_the_cpu(make, dtype, rows):
    model = make().to(dtype)
    x, dy = torch.randn(rows, WIDTH, dtype=dtype), torch.randn(rows, WIDTH, dtype=dtype)
    expected = step(copy.deepcopy(model), x, dy)
    found = step(model.to(GPU), x.to(GPU), dy.to(GPU))
    for a, b in zip(expected, found, strict=True):
        assert b.device == GPU and torch.equal(a, b.cpu())


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_plan_of_the_cpu(make):
    model, x = make(), torch.randn(128, WIDTH)
    expected = str(weft.explain(model, x))
    assert str(weft.explain(model.to(GPU), x.to(GPU))).replace("cuda", "cpu") == expected


def test_hooks_and_main_grad():
    model = weft.Sequential(ops.Linear(WIDTH, WIDTH, accumulate_into_main_grad=True), ops.GELU()).to(GPU)
    weight = next(p for p in model.parameters() if p.dim() == 2)
    weight.main_grad = torch.ones_like(weight)
    for p in model.parameters():
        if p is not weight:
            p.main_grad = torch.zeros_like(p)
    seen = []
    x = torch.randn(8, WIDTH, device=GPU, requires_grad=True)
    y = model(x)
    y.register_hook(lambda g: seen.append(g.device))
    with torch.autograd.graph.save_on_cpu():
        model(x.detach().requires_grad_()).sum().backward()
    y.sum().backward()
    assert seen == [GPU] and x.grad.device == GPU and weight.main_grad.device == GPU
    assert not torch.equal(weight.main_grad, torch.ones_like(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_operation_has_the_bits_of_the_cpu(case, dtype):
    def run(place):
        op = case.build(dtype).to(place)
        inputs = [t.detach().to(place).requires_grad_(t.requires_grad) for t in case.inputs((3,), dtype)]
        torch.manual_seed(3)
        outputs = op(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [torch.full_like(y, 0.5) for y in outputs])
        return [*outputs, *(t.grad for t in [*inputs, *op.parameters()] if t.requires_grad)]

    for a, b in zip(run("cpu"), run(GPU), strict=True):
        assert b is None if a is None else torch.equal(a, b.cpu()) and b.device == GPU


def test_mixed_devices_are_refused():
    with pytest.raises(ValueError, match="the input is on cpu"):
        mlp().to(GPU)(torch.randn(3, WIDTH))


def test_weights_are_read_where_they_are():
    model = weft.Sequential(ops.Linear(WIDTH, WIDTH, bias=False)).to(GPU)
    x = torch.randn(4, WIDTH, device=GPU)
    first = model(x)
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert first.any() and not model(x).any()
    assert isinstance(model, nn.Module)
