"""The fusion of a linear with the loss of its outputs: values, gradients, what is saved, why it is rejected."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torchweft
from torchweft import ops

CLASSES = 5003  # not a multiple of a block
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def head(features: int = 24, classes: int = CLASSES, dtype: torch.dtype = torch.float32, **options) -> ops.Sequential:
    linear = {k: options.pop(k) for k in list(options) if k in ("accumulate_into_main_grad", "delay_wgrad_compute")}
    return ops.Sequential(
        ops.BasicLinear(features, classes, dtype=dtype, **linear), ops.CrossEntropy(label_smoothing=0.1, **options)
    )


def inputs(rows: int, dtype: torch.dtype, features: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, features, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(CLASSES, (rows,), generator=generator)
    targets[1::5] = -100
    return x, targets


def gradients(loss: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    dy = torch.linspace(0.5, 1.5, loss.numel(), dtype=torch.float64).reshape(loss.shape)
    return list(torch.autograd.grad(loss, tensors, dy.to(loss.dtype)))


def rules(model: ops.Sequential, *call: torch.Tensor) -> str:
    return str(model.explain(*call))


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", (1, 7, 700))
def test_no_farther_from_float64_than_eager(rows, dtype, reduction):
    model, (x, targets) = head(dtype=dtype, reduction=reduction), inputs(rows, dtype)
    weight = model[0].weight

    def plain(x, w):
        logits = x @ w.t()
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, targets, label_smoothing=0.1, reduction=reduction)

    x64, w64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = plain(x64, w64)
    exact = [exact, *gradients(exact, [x64, w64])]
    eager = plain(x, weight)
    eager = [eager, *gradients(eager, [x, weight])]
    assert "linear_cross_entropy" in rules(model, x, targets)
    actual = model(x, targets)
    actual = [actual, *gradients(actual, [x, weight])]
    for ours, theirs, true in zip(actual, eager, exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == true.shape
        # float64 has no wider reference: sums in another order differ by several roundings.
        rounding = torch.finfo(ours.dtype).eps * (64 if dtype == torch.float64 else 0.5)
        bound = 1.02 * (theirs.double() - true).abs().max() + rounding * true.abs().max()
        assert (ours.double() - true).abs().max() <= bound


@pytest.mark.parametrize("name", ("x", "weight"))
def test_one_gradient_alone(name):
    model, (x, targets) = head(dtype=torch.float64), inputs(300, torch.float64)
    tensor = x if name == "x" else model[0].weight
    (alone,) = gradients(model(x, targets), [tensor])
    with torchweft.fusion.without_rules():
        (unfused,) = gradients(model(x, targets), [tensor])
    torch.testing.assert_close(alone, unfused)


@pytest.mark.parametrize("overwrite", (False, True))
def test_main_grad(overwrite):
    model, (x, targets) = head(accumulate_into_main_grad=True, dtype=torch.bfloat16), inputs(300, torch.bfloat16)
    weight = model[0].weight
    weight.main_grad = torch.ones(weight.shape)
    weight.overwrite_main_grad = overwrite
    model(x, targets).backward()
    assert weight.grad is None
    w = weight.detach().double().requires_grad_()
    loss = F.cross_entropy(x.detach().double() @ w.t(), targets, label_smoothing=0.1)
    (dw,) = torch.autograd.grad(loss, w)
    assert (weight.main_grad.double() - dw - float(not overwrite)).abs().max() <= 2**-8 * dw.abs().max() + 1e-7


def test_logits_are_not_saved():
    model, (x, targets) = head(), inputs(700, torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        model(x, targets)
    assert max(saved) == model[0].weight.numel() < 700 * CLASSES


def test_change_of_targets_before_backward_raises():
    model, (x, targets) = head(), inputs(7, torch.float32)
    loss = model(x, targets)
    targets[0] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_leading_dimensions_and_no_rows():
    model = head(dtype=torch.float64, reduction="none")
    x, targets = inputs(6, torch.float64)
    loss = model(x.reshape(2, 3, 24), targets.reshape(2, 3))
    assert loss.shape == (2, 3)
    torch.testing.assert_close(loss.flatten(), model(x, targets))
    empty = model(x[:0], targets[:0])
    assert empty.shape == (0,)
    empty.sum().backward()
    assert model[0].weight.grad.abs().max() == 0


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: head(classes=100), "100 classes, fewer than 4096"),
        (lambda: head(delay_wgrad_compute=True), "delay_wgrad_compute is on"),
        (lambda: head().requires_grad_(False), "the weight needs no gradient"),
    ],
)
def test_rejection_has_a_reason(model, reason):
    x, targets = inputs(7, torch.float32)
    text = rules(model(), x, targets.clamp(max=99))
    assert "linear_cross_entropy" in text and reason in text, text


def test_inference_of_frozen_weights_is_fused():
    model, (x, targets) = head().requires_grad_(False), inputs(7, torch.float32)
    with torch.no_grad():
        expected = F.cross_entropy(x @ model[0].weight.t(), targets, label_smoothing=0.1)
        torch.testing.assert_close(model(x, targets), expected)
        assert "the weight needs no gradient" not in rules(model, x, targets)


def test_autocast_and_compile_match():
    model, (x, targets) = head(), inputs(40, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        eager = model(x, targets)
        compiled = torch.compile(model, fullgraph=True)(x, targets)
    torch.testing.assert_close(eager, compiled)
    for ours, theirs in zip(*(gradients(y, [x, model[0].weight]) for y in (eager, compiled)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-5)
