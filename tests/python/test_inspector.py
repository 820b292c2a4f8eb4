"""QuantizationInspector and gemm_error: their figures against those of plain torch."""

from __future__ import annotations

import json
import math
import threading
import warnings

import pytest
import torch

import torchweft
from torchweft import ops, recipe
from torchweft.quantization import (
    QuantizationInspector,
    Quantizer,
    ReducedAccumulator,
    gemm,
    gemm_error,
)

RECIPES = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}


def model():
    torch.manual_seed(0)
    return torchweft.Sequential(ops.Linear(64, 96), ops.GELU(), ops.Linear(96, 32)).bfloat16()


def run(net, made, x=None):
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).bfloat16() if x is None else x
    net.zero_grad()
    torch.manual_seed(2)  # of stochastic rounding
    with torchweft.autocast(recipe=made):
        y = net(x)
    y.square().sum().backward()
    return [y.detach(), *(param.grad for param in net.parameters())]


def rows_of(inspector):
    return {(row.linear, row.tensor): row for row in inspector.statistics()}


@pytest.mark.parametrize("name", RECIPES)
def test_results_do_not_change(name):
    net = model()
    expected = run(net, RECIPES[name])
    net = model()
    with QuantizationInspector(net):
        observed = run(net, RECIPES[name])
    for value, wanted in zip(observed, expected, strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.parametrize("name", RECIPES)
def test_every_tensor_is_reported(name):
    net = model()
    with QuantizationInspector(net) as inspector:
        for _ in range(2):
            run(net, RECIPES[name])
    rows = rows_of(inspector)
    tensors = {"input", "weight", "grad_output", "grad_weight"}
    assert set(rows) == {(linear, tensor) for linear in "02" for tensor in tensors} | {("2", "grad_input")}
    for row in rows.values():
        assert row.calls == 2 and row.snr_db > (5 if name == "nvfp4" else 20 if name != "delayed" else 0), row
        assert 0.9 < row.cosine <= 1 + 1e-12
        assert math.isnan(row.underflow) == row.tensor.startswith("grad_") * (row.tensor != "grad_output")
    assert len(inspector.data()) == len(rows) and str(inspector).count("\n") == len(rows)


def test_figures_are_those_of_plain_torch():
    net, made = model(), recipe.Float8CurrentScaling()
    x = (torch.randn(48, 64) * torch.logspace(-6, 0, 64)).bfloat16()
    with QuantizationInspector(net) as inspector:
        run(net, made, x)
    row = rows_of(inspector)["0", "input"]
    q = Quantizer("current").quantize(x)
    values, codes = q.dequantize(dtype=torch.float32), q.codes()
    assert torch.equal(codes, q.rowwise_data.view(torch.float8_e4m3fn).float()) and q.format == "e4m3"
    assert row.amax == x.abs().max() and row.scale_min == pytest.approx(q.rowwise_scales.item(), rel=1e-6)
    assert row.underflow == ((codes == 0) & (x != 0)).double().mean().item() > 0
    assert row.subnormal == ((codes != 0) & (codes.abs() < 2**-6)).double().mean().item() > 0
    assert row.saturated == 0
    noise = (x.float() - values).norm() / x.float().norm()
    assert row.snr_db == pytest.approx(-20 * math.log10(noise), rel=1e-6)
    assert row.cosine == pytest.approx(torch.cosine_similarity(x.float().flatten(), values.flatten(), 0).item(), 1e-6)


def test_gradients_are_compared_with_unquantized_gemms():
    linear = ops.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    x = torch.randn(48, 64, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(48, 32, dtype=torch.bfloat16)
    with QuantizationInspector(linear) as inspector:
        with torchweft.autocast(recipe=recipe.MXFP8BlockScaling()):
            y = linear(x)
        y.backward(dy)
    mxfp8 = Quantizer("mxfp8")
    q_x, q_w, q_dy = (mxfp8.quantize(t.detach(), columnwise=True) for t in (x, linear.weight, dy))
    dx = gemm(q_dy, q_w, b_columnwise=True, dtype=torch.float32)
    dw = gemm(q_dy, q_x, a_columnwise=True, b_columnwise=True, dtype=torch.float32)
    exact = dy.float() @ linear.weight.detach().float(), dy.float().T @ x.detach().float()
    for tensor, found, wanted in zip(("grad_input", "grad_weight"), (dx, dw), exact, strict=True):
        row = rows_of(inspector)["weight", tensor]
        assert row.cosine == pytest.approx(torch.cosine_similarity(found.flatten(), wanted.flatten(), 0).item(), 1e-6)


def test_saturated_values_of_delayed_scaling():
    linear = ops.Linear(32, 16, bias=False, dtype=torch.bfloat16)
    x = torch.full([16, 32], 1000.0, dtype=torch.bfloat16)
    x[:, :8] = 1
    with QuantizationInspector() as inspector, torchweft.autocast(recipe=recipe.DelayedScaling()), torch.no_grad():
        linear(x)
    assert rows_of(inspector)["linear 0", "input"].saturated == 0.75


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override_has_no_gradients_to_report(override):
    net = model()
    with QuantizationInspector(net) as inspector:
        run(net, recipe.Float8CurrentScaling(backward_override=override))
        assert not inspector._calls
    assert {tensor for _, tensor in rows_of(inspector)} == {"input", "weight"}


@pytest.mark.parametrize("value", [1.0, math.nan])
@pytest.mark.parametrize("kind", ["checkpoint", "hooks"])
def test_checkpointing_and_hooks_report_each_call_once(kind, value):
    net, made = model(), RECIPES["mxfp8"]

    def call(x):
        with torchweft.autocast(recipe=made):
            return net(x)

    def wrapped(x):
        if kind == "checkpoint":
            return torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            return call(x)

    with QuantizationInspector(net) as inspector, QuantizationInspector(net) as plain:
        for _ in range(3):
            x = torch.randn(48, 64, dtype=torch.bfloat16)
            x[0, 0] = value
            wrapped(x.requires_grad_()).sum().backward()
        assert not inspector._calls and not plain._calls
    assert {row.calls for row in inspector.statistics()} == {3} and len(inspector.statistics()) == 10


def test_direct_and_checkpointed_calls_of_one_linear():
    linear = ops.Linear(64, 64, bias=False, dtype=torch.bfloat16)

    def call(x):
        with torchweft.autocast(recipe=RECIPES["mxfp8"]):
            return linear(x)

    x, other = (torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    with QuantizationInspector(linear) as inspector:
        y = call(x) + torch.utils.checkpoint.checkpoint(call, other, use_reentrant=False)
        y.sum().backward()
        assert not inspector._calls
    assert {row.calls for row in inspector.statistics()} == {2}


def test_nested_inspectors_and_threads():
    net = model()
    with QuantizationInspector(net) as outer:
        with QuantizationInspector(net) as inner:
            run(net, RECIPES["current"])
        thread = threading.Thread(target=run, args=(net, RECIPES["current"]))
        thread.start()
        thread.join()
    run(net, RECIPES["current"])
    assert {row.calls for row in inner.statistics()} == {1} and {row.calls for row in outer.statistics()} == {2}


def damaged(x, kind):
    x = x.clone()
    if kind == "zero rows":
        return x[:0]
    if kind == "zeros":
        return x.zero_()
    x[0, 0] = {"NaN": math.nan, "infinity": math.inf, "minus infinity": -math.inf}[kind]
    return x if kind != "NaN" else x.index_fill_(0, torch.tensor([1]), math.nan)


@pytest.mark.parametrize("kind", ["NaN", "infinity", "minus infinity", "zero rows", "zeros"])
@pytest.mark.parametrize("name", RECIPES)
def test_statistics_survive_any_input(name, kind):
    net = model()
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with QuantizationInspector(net) as inspector:
        run(net, RECIPES[name], 100 * x)
        before = rows_of(inspector)
        for _ in range(2):
            run(net, RECIPES[name], damaged(x, kind))
        assert not inspector._calls
    rows = rows_of(inspector)
    for key, row in rows.items():
        assert row.calls == 3 and row.amax >= before[key].amax or key[1] in ("grad_input", "grad_weight"), row
        assert math.isfinite(row.snr_db) and math.isfinite(row.cosine), row
        assert 0 <= row.nonfinite < 1 and (row.nonfinite > 0 or key != ("0", "input") or kind.startswith("zero")), row
    assert rows["0", "input"].amax == (100 * x).abs().max()
    assert ("0 input: " in str(inspector)) == (rows["0", "input"].nonfinite > 0)
    json.dumps(inspector.data(), allow_nan=False)


def test_only_nonfinite_values():
    linear = ops.Linear(32, 16, dtype=torch.bfloat16)
    with QuantizationInspector(linear) as inspector, torchweft.autocast(recipe=RECIPES["mxfp8"]), torch.no_grad():
        linear(torch.full([16, 32], math.nan, dtype=torch.bfloat16))
    row = rows_of(inspector)["weight", "input"]
    assert row.nonfinite == 1 and all(map(math.isnan, (row.amax, row.underflow, row.scale_max, row.snr_db, row.cosine)))
    assert "100 % of its values" in str(inspector)


def test_an_inspector_may_be_entered_again():
    net = model()
    inspector = QuantizationInspector(net)
    with inspector:
        x = torch.randn(48, 64, dtype=torch.bfloat16)
        with torchweft.autocast(recipe=RECIPES["mxfp8"]):
            y = net(x)
        with inspector:
            pass
        y.sum().backward()
    assert {row.calls for row in inspector.statistics()} == {1} and "grad_weight" in str(inspector)


def test_nothing_quantized_is_said():
    with QuantizationInspector() as inspector:
        model()(torch.randn(4, 64).bfloat16())
    assert not inspector.statistics() and "torchweft.autocast" in str(inspector)
    with pytest.raises(ValueError, match="no linear was quantized"):
        inspector.save("nothing.png")


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    net = model()
    with QuantizationInspector(net) as inspector:
        run(net, RECIPES["nvfp4"])
        with torch.no_grad():
            net[2].weight.zero_()  # an exact tensor
        run(net, RECIPES["nvfp4"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inspector.save(tmp_path / "picture.png")
    json.dumps(inspector.data(), allow_nan=False)
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_an_error_of_the_inspector_reaches_the_caller(monkeypatch):
    net = model()
    with QuantizationInspector(net) as inspector:
        monkeypatch.setattr(inspector, "_forward", lambda *event: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(net, RECIPES["current"])


# ---- errors of one GEMM ---------------------------------------------------------------------------------------------


def test_error_is_split():
    torch.manual_seed(0)
    x, w, current = torch.randn(32, 1024), torch.randn(24, 1024), Quantizer("current")
    error = gemm_error(x, w, current)
    exact = x.double() @ w.double().T
    q = [current.quantize(t).dequantize(dtype=torch.float32).double() for t in (x, w)]
    assert error.operands == pytest.approx(((q[0] @ q[1].T - exact).norm() / exact.norm()).item(), 1e-6)
    assert error.accumulation < 1e-6 and error.total == pytest.approx(error.operands, 1e-3)


@pytest.mark.parametrize("scaling", ["current", "block", "mxfp8"])
def test_reduced_accumulators_add_errors(scaling):
    torch.manual_seed(0)
    x, w = torch.rand(16, 2048), torch.rand(16, 2048)  # positive: truncation accumulates
    errors = [
        gemm_error(x, w, Quantizer(scaling), accumulator=made).accumulation
        for made in (None, ReducedAccumulator(promote_every=128), ReducedAccumulator())
    ]
    assert errors[0] < 1e-6 and 10 * errors[0] < errors[1] < errors[2] < 0.05


def test_zero_matrices():
    error = gemm_error(torch.zeros(4, 32), torch.ones(4, 32), Quantizer("current"))
    assert (error.operands, error.accumulation, error.total) == (0, 0, 0)


def test_wide_accumulator_is_exact():
    x, w = torch.randn(8, 256), torch.randn(8, 256)
    error = gemm_error(x, w, Quantizer("current"), accumulator=ReducedAccumulator(fraction_bits=50))
    assert error.accumulation < 1e-12


def test_truncation_of_one_step():
    """2^13 + 1 needs 14 bits: kept with 13 fraction bits, lost with 12."""
    a, b = torch.tensor([[2.0**13, 1.0]]).double(), torch.ones(1, 2).double()
    assert ReducedAccumulator(fraction_bits=13).gemm(a, b).item() == 2**13 + 1
    assert ReducedAccumulator(fraction_bits=12).gemm(a, b).item() == 2**13
    with pytest.raises(ValueError, match="multiple of products"):
        ReducedAccumulator(promote_every=100)
    with pytest.raises(ValueError, match="fraction_bits"):
        ReducedAccumulator(fraction_bits=0)
