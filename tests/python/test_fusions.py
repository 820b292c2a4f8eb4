"""Every built-in fusion: it matches, has the values and gradients of the unfused operations, and no side effects."""

from __future__ import annotations

import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import plain
import pytest
import torch
from tolerances import allowed_in_a_pipeline, distance

import torchweft
from torchweft import _C, fusion, ops

WIDTH, HIDDEN, OUT = 7, 10, 5  # odd where they may be
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROWS = (17,)  # enough for every rule; some do not fuse few rows
LEADS = [ROWS, (4, 5), (3,), (1,), (0,), (2, 0), ()]
BUILTIN = dict(_C.all_rules())
UNARY, GATED = [*plain.UNARY], [*plain.GATES, "SiTUGLU", "ClampedSwiGLU"]


def linear(n: int = HIDDEN, k: int = WIDTH):
    return lambda dtype: ops.BasicLinear(k, n, dtype=dtype)


def bias(n: int = HIDDEN):
    def make(dtype):
        op = ops.Bias(n, dtype=dtype)
        torch.nn.init.uniform_(op.bias, -1, 1)
        return op

    return make


def norm(kind: str, **options):
    options = {"eps": 0.1, "zero_centered_gamma": kind == "RMSNorm"} | options
    return lambda dtype: getattr(ops, kind)(WIDTH, dtype=dtype, **options)


def fork(to_caller: bool = True, **options):
    return lambda _: ops.MakeExtraOutput(**options).set_extra_output_channel(0, "branch", output_to_caller=to_caller)


def join(channel: str | None = None, **options):
    return lambda _: ops.AddExtraInput(**options).set_extra_input_channel(0, channel)


def experts(n: int, k: int, **options):
    def make(dtype):
        op = ops.GroupedLinear(3, k, n, dtype=dtype, **options)
        for name, p in op.named_parameters():
            if "bias" in name:
                torch.nn.init.uniform_(p, -1, 1)
        return op

    return make


def op(name: str, *arguments, **options):
    return lambda _: getattr(ops, name)(*arguments, **options)


@dataclass
class Case:
    """A pipeline that one rule fuses completely."""

    rule: str
    makers: tuple[Callable, ...]
    width: int = WIDTH  # of x

    def build(self, dtype: torch.dtype) -> ops.Sequential:
        return ops.Sequential(*(make(dtype) for make in self.makers)).to(dtype)

    def __str__(self) -> str:
        return self.rule


def block(activation: str, *, kind: str = "RMSNorm", biases: bool = True, ends=(), norm=norm, **options) -> tuple:
    """norm, linear, activation, linear with biases, between the first and the last of `ends`."""
    half = HIDDEN // 2 if activation in GATED else HIDDEN
    middle = [norm(kind), linear(), bias(), op(activation, **options), linear(WIDTH, half), bias(WIDTH)]
    if not biases:
        middle = [middle[0], middle[1], middle[3], middle[4]]
    return (*ends[:1], *middle, *ends[1:])


CASES = [
    *(Case("linear_bias_activation", (linear(), bias(), op(name))) for name in [*UNARY, *GATED]),
    Case("linear_bias_activation", (linear(), op("SwiGLU"))),
    *(Case("linear_bias_add", (linear(OUT), bias(OUT), join(in_place=p))) for p in (True, False)),
    Case("linear_bias_add", (linear(OUT), join(in_place=True))),
    *(Case("linear_scale_add", (linear(OUT), op("ConstantScale", -2.5), join(in_place=p))) for p in (True, False)),
    Case("linear_bias", (linear(OUT), bias(OUT))),
    *(Case("dropout_add", (op("Dropout", 0.25), join(in_place=p))) for p in (True, False)),
    *(Case("linear_add", (fork(in_place=p), linear(OUT))) for p in (True, False)),
    Case("linear_scale", (linear(OUT), op("ConstantScale", -2.5))),
    *(Case("activation_bias", (bias(HIDDEN), op(name)), HIDDEN) for name in [*UNARY, *GATED]),
    Case("activation_bias", (bias(HIDDEN + 2), op("SwiGLU", glu_interleave_size=2)), HIDDEN + 2),
    *(Case("add_rms_norm", (fork(in_place=p), norm("RMSNorm"))) for p in (True, False)),
    *(Case("add_layer_norm", (fork(in_place=p), norm("LayerNorm"))) for p in (True, False)),
    *(Case("activation_linear", (bias(), op(name), linear(OUT, HIDDEN)), HIDDEN) for name in UNARY),
    *(Case("activation_linear", (bias(), op(name), linear(OUT, HIDDEN // 2)), HIDDEN) for name in GATED),
    Case("linear_bias_activation", (linear(), bias(), op("GELU", "none"))),
    Case("activation_bias", (bias(HIDDEN), op("GELU", "none")), HIDDEN),
    Case("activation_linear", (bias(), op("GELU", "none"), linear(OUT, HIDDEN)), HIDDEN),
    Case("mlp_block", block("GELU", approximate="none")),
    Case("add_layer_norm", (fork(), norm("LayerNorm", bias=False))),
    Case("norm_linear", (norm("LayerNorm", bias=False), linear(), bias())),
    Case("mlp_block", block("GELU", kind="LayerNorm", norm=partial(norm, bias=False))),
    Case("activation_linear", (op("GELU"), linear(OUT, HIDDEN)), HIDDEN),
    *(Case("norm_linear", (norm(kind), linear(), bias())) for kind in ("RMSNorm", "LayerNorm")),
    Case("norm_linear", (fork(), norm("RMSNorm"), linear(), bias(), op("GELU"))),
    Case("norm_linear", (norm("LayerNorm"), linear(), op("SwiGLU"))),
    *(Case("mlp_block", block(name)) for name in [*UNARY, *GATED]),
    *(Case("mlp_block", block("SwiGLU", kind=kind, biases=False)) for kind in ("RMSNorm", "LayerNorm")),
    *(
        Case("mlp_block", block("GELU", kind=kind, ends=(fork(public, in_place=p), join("branch", in_place=p))))
        for kind in ("RMSNorm", "LayerNorm")
        for public in (True, False)
        for p in (True, False)
    ),
    Case("mlp_block", block("GELU", biases=False, ends=(fork(), join(in_place=True)))),
    Case("mlp_block", block("ReLU", ends=(fork(),))),
    Case("mlp_block", (*block("SiLU"), join(in_place=True))),
    *(
        Case("grouped_mlp", (experts(HIDDEN, WIDTH), op(name), experts(OUT, HIDDEN // half, scale_bias=True)))
        for name, half in (("ScaledSwiGLU", 2), ("ScaledClampedQGeGLU", 2), ("ScaledSiTUGLU", 2), ("ScaledSReLU", 1))
    ),
    Case("grouped_mlp", (experts(HIDDEN, WIDTH), op("ScaledTanhSReLU", 1.5), experts(OUT, HIDDEN))),
    Case(
        "grouped_mlp",
        (
            experts(HIDDEN, WIDTH, single_grouped_weight=True, bias=False),
            op("ScaledSwiGLU"),
            experts(OUT, HIDDEN // 2, single_grouped_weight=True, bias=False),
        ),
    ),
]
IDS = [f"{case.rule}-{i}" for i, case in enumerate(CASES)]
each_case = pytest.mark.parametrize("case", CASES, ids=IDS)
# One case per rule, where all variants would test the same.
ONE_EACH = list({(c.rule, len(c.makers)): c for c in CASES}.values())
one_of_each = pytest.mark.parametrize("case", ONE_EACH, ids=[f"{c.rule}-{len(c.makers)}" for c in ONE_EACH])


@contextmanager
def only(*names: str):
    with fusion.without_rules(), fusion.with_rules(*names):
        yield


# ---- running -------------------------------------------------------------------------------------------------------


@dataclass
class CallInputs:
    """Tensors of a call in float64: x, extra inputs and gradients of the outputs."""

    x: torch.Tensor
    extras: list[torch.Tensor]
    grads: list[torch.Tensor]


def by_plain_torch(seq: ops.Sequential, x, extras, of=lambda p: p) -> list[torch.Tensor]:
    """Computes the outputs of a Sequential, operation by operation."""
    extras, channels, returned = list(extras), {}, []
    for module in seq:
        names, targets = module._bindings()
        inputs = [channels[name] if name else extras.pop(0) for name in names]
        x, more = plain.apply(module, x, *inputs, of=of)
        for (name, to_caller), tensor in zip(targets, more, strict=True):
            channels[name] = tensor
            if to_caller:
                returned.append(tensor)
    return [x, *returned]


def make_inputs(seq: ops.Sequential, case: Case, lead: tuple[int, ...]) -> CallInputs:
    def uniform(*sizes: int) -> torch.Tensor:
        return torch.rand(sizes, dtype=torch.float64) * 2 - 1

    def extra(module, slot: int) -> torch.Tensor:
        """Makes an extra input: split sizes, one value per row, or a tensor like the last output."""
        if module._description().is_index(slot):
            return plain.some_splits(module.num_groups, math.prod(lead))
        return torch.zeros(()) if isinstance(module, ops.AddExtraInput) else uniform(*lead)

    x = uniform(*lead, case.width)
    extras = [extra(m, i) for m in seq for i, name in enumerate(m._bindings()[0]) if name is None]
    torch.manual_seed(5)
    probe = by_plain_torch(seq, x, extras, of=lambda p: p.detach().double())
    waits = any(isinstance(m, ops.AddExtraInput) for m in seq)
    extras = [uniform(*probe[0].shape) for _ in extras] if waits else extras
    return CallInputs(x, extras, [uniform(*y.shape) for y in probe])


def leaves(g: CallInputs, dtype: torch.dtype) -> list[torch.Tensor]:
    return [t.to(dtype, copy=True).requires_grad_() if t.is_floating_point() else t for t in (g.x, *g.extras)]


def floats(tensors) -> list[torch.Tensor]:
    """Returns the tensors that can have a gradient."""
    return [t for t in tensors if t.is_floating_point()]


def results(seq: ops.Sequential, g: CallInputs, dtype: torch.dtype, call=None) -> list[torch.Tensor]:
    """Returns outputs and the gradients of x, extra inputs and parameters."""
    x, *extras = leaves(g, dtype)
    torch.manual_seed(5)
    outputs = (call or seq)(x, *(e * 1 for e in extras))  # e * 1: a temporary, so it may be overwritten
    outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    inputs = [x, *floats(extras), *seq.parameters()]
    return [*outputs, *torch.autograd.grad(outputs, inputs, [d.to(dtype) for d in g.grads])]


def truth(seq: ops.Sequential, g: CallInputs, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Returns the same by plain torch, in float64 or rounded as eager torch rounds."""
    params = {p: p.detach().to(dtype).requires_grad_() for p in seq.parameters()}
    x, *extras = leaves(g, dtype)
    torch.manual_seed(5)
    outputs = by_plain_torch(seq, x, extras, of=lambda p: params[p])
    inputs = [x, *floats(extras), *params.values()]
    return [*outputs, *torch.autograd.grad(outputs, inputs, [d.to(dtype) for d in g.grads])]


def scales(seq: ops.Sequential, g: CallInputs) -> list[float]:
    """Returns the scale of the error of each result: its largest value. A parameter gradient is a sum over rows whose
    terms may cancel while their independent rounding errors do not, so an element counts as at least √(Σ_rows term²),
    which for a single row is the element itself."""
    params = {p: p.detach().double().requires_grad_() for p in seq.parameters()}
    x, *extras = leaves(g, torch.float64)
    torch.manual_seed(5)
    outputs = by_plain_torch(seq, x, extras, of=lambda p: params[p])
    count = x[..., 0].numel()
    only_row = torch.eye(count, dtype=torch.float64).reshape(count, *x.shape[:-1], 1)
    terms = torch.autograd.grad(
        outputs, [x, *floats(extras), *params.values()], [only_row * d for d in g.grads], is_grads_batched=True
    )
    return [
        *(y.abs().max().item() for y in outputs),
        *(torch.maximum(t.sum(0).abs(), t.norm(dim=0)).max().item() for t in terms),
    ]


def check(seq: ops.Sequential, g: CallInputs, actual: list, dtype: torch.dtype, peer: list | None = None) -> None:
    """Compares results with float64. In low precision the error may be twice that of `peer` (default: eager torch in
    the same dtype), whose dtypes the results must have."""
    exact, peer = truth(seq, g), peer or truth(seq, g, dtype)
    by = scales(seq, g) if g.x.numel() else [1.0] * len(exact)

    def error(k: int, results: list) -> float:
        return distance(results[k], exact[k]) / (by[k] or 1.0)

    allowed = allowed_in_a_pipeline(dtype, max(error(k, peer) for k in range(len(peer))))
    for k, (a, p) in enumerate(zip(actual, peer, strict=True)):
        assert a.dtype == p.dtype and a.shape == p.shape
        assert error(k, actual) <= allowed, f"result {k}: {error(k, actual)} > {allowed}"


def rounded(g: CallInputs, dtype: torch.dtype) -> CallInputs:
    """Rounds values to `dtype`, so that only the computation differs."""

    def to(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype).double() if t.is_floating_point() else t

    return CallInputs(to(g.x), [to(t) for t in g.extras], [to(t) for t in g.grads])


# ---- matching --------------------------------------------------------------------------------------------------------


def test_every_rule_has_case():
    over_ranks = {name for name in BUILTIN if name.startswith("overlapped_")}  # tests/dist/test_overlap.py
    with_targets = {"linear_cross_entropy"}  # test_linear_cross_entropy.py
    assert {case.rule for case in CASES} == set(BUILTIN) - over_ranks - with_targets


@each_case
def test_rule_fuses_its_whole_pipeline(case):
    seq = case.build(torch.float32)
    g = make_inputs(seq, case, ROWS)
    with only(case.rule):
        data = seq.explain(*leaves(g, torch.float32)).data[0]
    assert data["rejected"] == []
    for name in ("forward", "backward"):
        if BUILTIN[case.rule] in (name, "joint"):
            assert [(step["name"], step["count"]) for step in data[name]] == [(case.rule, len(case.makers))]


# ---- values and gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@each_case
def test_values_and_gradients_agree_with_plain_torch(case, dtype):
    seq = case.build(dtype)
    for lead in LEADS:
        g = rounded(make_inputs(seq, case, lead), dtype)
        with only(case.rule):
            check(seq, g, results(seq, g, dtype), dtype)


@each_case
def test_values_and_gradients_agree_with_unfused_plan(case):
    seq = case.build(torch.float64)
    g = make_inputs(seq, case, (4, 5))
    with fusion.without_rules():
        unfused = results(seq, g, torch.float64)
    with only(case.rule):
        torch.testing.assert_close(results(seq, g, torch.float64), unfused, rtol=1e-12, atol=1e-12)


@one_of_each
def test_rule_runs_unfused_below_min_rows(case):
    """Below `min_rows` results equal the unfused plan bitwise; from there on the fusion saves at least one rounding."""
    seq = case.build(torch.bfloat16)
    x, *extras = leaves(make_inputs(seq, case, ROWS), torch.bfloat16)
    with only(case.rule):
        data = seq.explain(x, *extras).data[0]
    least = max(step["min_rows"] for step in (*data["forward"], *data["backward"]))
    if least == 0:
        pytest.skip("takes any number of rows")
    for count, parts in ((least - 1, True), (least, False)):
        g = make_inputs(seq, case, (count,))
        with fusion.without_rules():
            unfused = results(seq, g, torch.bfloat16)
        with only(case.rule):
            fused = results(seq, g, torch.bfloat16)
        assert all(map(torch.equal, fused, unfused)) == parts


PASSES = {
    "forward": ("forward",),
    "backward": ("backward",),
    "forward and backward": ("forward", "backward"),
    "all": ("forward", "backward", "joint"),
}


@pytest.mark.parametrize("passes", PASSES)
@each_case
def test_any_backward_plan_fits_any_forward_plan(case, passes):
    """A forward rule saves what the unfused backward reads; a backward rule reads what the unfused forward saved."""
    seq = case.build(torch.float64)
    g = make_inputs(seq, case, ROWS)
    with only(*(name for name, of in BUILTIN.items() if of in PASSES[passes])):
        check(seq, g, results(seq, g, torch.float64), torch.float64)


def subsets(count: int) -> list[list[bool]]:
    """Yields each rule alone, and all but one."""
    alone = [[i == k for i in range(count)] for k in range(count)]
    return [*alone, *([not flag for flag in flags] for flags in alone)]


@one_of_each
def test_frozen_tensors_get_no_grad_and_change_no_other(case):
    seq = case.build(torch.float64)
    g = make_inputs(seq, case, ROWS)
    exact = truth(seq, g)
    x, *extras = leaves(g, torch.float64)
    inputs = [x, *floats(extras), *seq.parameters()]
    expected_grads = exact[len(g.grads) :]
    with only(case.rule):
        for flags in subsets(len(inputs)):
            if not any(flags):
                continue
            for tensor, flag in zip(inputs, flags, strict=True):
                tensor.requires_grad_(flag)
            torch.manual_seed(5)
            outputs = seq(x, *extras)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            kept = [(y, d) for y, d in zip(outputs, g.grads, strict=True) if y.requires_grad]
            some = [t for t, flag in zip(inputs, flags, strict=True) if flag]
            grads = torch.autograd.grad([y for y, _ in kept], some, [d for _, d in kept])
            expected = [t for t, flag in zip(expected_grads, flags, strict=True) if flag]
            torch.testing.assert_close(list(grads), expected, rtol=1e-9, atol=1e-9)


@one_of_each
def test_gradients_requested_one_by_one_are_correct(case):
    seq = case.build(torch.float64)
    g = make_inputs(seq, case, ROWS)
    exact = truth(seq, g)[len(g.grads) :]
    x, *extras = leaves(g, torch.float64)
    with only(case.rule):
        torch.manual_seed(5)
        outputs = seq(x, *extras)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for tensor, expected in zip([x, *floats(extras), *seq.parameters()], exact, strict=True):
            (grad,) = torch.autograd.grad(outputs, tensor, g.grads, retain_graph=True)
            torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-9)


@one_of_each
def test_gradient_of_one_output_is_correct(case):
    seq = case.build(torch.float64)
    g = make_inputs(seq, case, ROWS)
    x, *extras = leaves(g, torch.float64)
    y, *more = by_plain_torch(seq, x, extras)
    if not more:
        pytest.skip("one output")
    with only(case.rule):
        for k, expected in enumerate((y, *more)):
            output = seq(x, *extras)[k]
            inputs = [x, *floats(extras), *seq.parameters()]
            torch.testing.assert_close(
                torch.autograd.grad(output, inputs, g.grads[k], allow_unused=True, materialize_grads=True),
                torch.autograd.grad(expected, inputs, g.grads[k], True, allow_unused=True, materialize_grads=True),
                rtol=1e-9,
                atol=1e-9,
            )


@one_of_each
def test_values_are_same_without_grad(case):
    seq = case.build(torch.float32)
    g = make_inputs(seq, case, ROWS)
    x, *extras = (t.detach() for t in leaves(g, torch.float32))
    with only(case.rule):
        torch.manual_seed(5)
        recorded = seq(x, *extras)
        with torch.no_grad():
            torch.manual_seed(5)
            torch.testing.assert_close(seq(x, *extras), recorded, rtol=0, atol=0)


@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16])
@one_of_each
def test_autocast_matches_unfused_plan(case, residual):
    seq = case.build(torch.float32)
    g = rounded(make_inputs(seq, case, ROWS), torch.bfloat16)

    def call():
        x, *extras = leaves(g, residual)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.manual_seed(5)
            outputs = seq(x, *extras)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        grads = [d.to(y.dtype) for d, y in zip(g.grads, outputs, strict=True)]
        return [*outputs, *torch.autograd.grad(outputs, [x, *floats(extras), *seq.parameters()], grads)]

    with fusion.without_rules():
        unfused = call()
    check(seq, g, call(), torch.bfloat16, peer=unfused)


def test_mixed_dtypes_are_rejected_with_reason():
    seq = ops.Sequential(ops.BasicLinear(4, 4, dtype=torch.bfloat16), ops.Bias(4), ops.GELU())
    rejected = seq.explain(torch.randn(2, 4, dtype=torch.bfloat16)).data[0]["rejected"]
    assert ("linear_bias_activation", "BasicLinear computes in bfloat16 and Bias computes in float32") in [
        (r["rule"], r["reason"]) for r in rejected
    ]


def test_interleaved_glu_is_not_fused_into_gemm():
    seq = ops.Sequential(ops.Linear(WIDTH, 8), ops.SwiGLU(glu_interleave_size=2), ops.Linear(4, 3))
    data = seq.explain(torch.randn(2, WIDTH)).data[0]
    assert {r["rule"] for r in data["rejected"]} == {"linear_bias_activation", "activation_linear"}
    assert data["backward"][1]["name"] == "activation_bias"


# ---- memory ----------------------------------------------------------------------------------------------------------


@each_case
def test_caller_tensors_are_not_changed(case):
    seq = case.build(torch.float64)
    g = make_inputs(seq, case, ROWS)
    x, *extras = leaves(g, torch.float64)
    held = [x, *extras, *g.grads, *seq.parameters()]
    copies = [t.detach().clone() for t in held]
    outputs = seq(x, *extras)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    before = [y.detach().clone() for y in outputs]
    torch.autograd.backward(outputs, g.grads)
    for tensor, copy in zip([*held, *outputs], [*copies, *before], strict=True):
        torch.testing.assert_close(tensor.detach(), copy, rtol=0, atol=0)


def large_allocations(call: Callable, size: int) -> int:
    """Counts the allocations of at least `size` bytes in a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    return sum(event.name() == "[memory]" and event.nbytes() >= size for event in events)


@pytest.mark.parametrize("in_place", [True, False])
def test_linear_add_accumulates_into_residual_gradient_if_permitted(in_place):
    seq = ops.Sequential(ops.MakeExtraOutput(in_place=in_place), ops.BasicLinear(64, 4))
    x = torch.randn(256, 64, requires_grad=True)
    y, residual = seq(x)
    outputs, grads = [y, residual * 2], [torch.ones_like(y), torch.ones_like(residual)]
    count = large_allocations(lambda: torch.autograd.grad(outputs, x, grads, retain_graph=True), x.nbytes)
    assert count == (1 if in_place else 2), "the residual gradient, and dx unless it is written there"
    torch.testing.assert_close(torch.autograd.grad(outputs, x, grads)[0], torch.ones(256, 4) @ seq[1].weight + 2)


@pytest.mark.parametrize("delayed", (False, True))
@pytest.mark.parametrize("front", ("plain", "fork", "norm"))
@pytest.mark.parametrize("activation", ("GELU", "SwiGLU", "QGELU"))
def test_forwarded_packed_gradient_gives_same_weight_gradient(activation, front, delayed):
    """From 512 rows on, the activation's backward packs its gradient for the weight-gradient GEMM before it."""
    h, f, rows = 64, 96, 544
    up = 2 * f if activation == "SwiGLU" else f
    first = ops.BasicLinear(h, up, dtype=torch.bfloat16, delay_wgrad_compute=delayed)
    front_op = {"plain": (), "fork": (fork()(None),), "norm": (ops.RMSNorm(h, dtype=torch.bfloat16),)}[front]
    seq = ops.Sequential(
        *front_op,
        first,
        ops.Bias(up, dtype=torch.bfloat16),
        getattr(ops, activation)(),
        ops.BasicLinear(f, h, dtype=torch.bfloat16),
    )
    x = torch.randn(4, rows // 4, h).bfloat16().requires_grad_()
    dy = torch.randn(4, rows // 4, h).bfloat16()

    def gradients():
        seq.zero_grad()
        x.grad = None
        y = seq(x)
        (y[0] if front == "fork" else y).backward(dy)
        if delayed:
            first.backward_dw()
        return [x.grad.clone(), *(p.grad.clone() for p in seq.parameters())]

    fused = gradients()
    with fusion.without_rules("activation_linear", "mlp_block", "activation_bias"):
        apart = gradients()
    for a, b in zip(fused, apart, strict=True):
        assert (a - b).double().norm() < 0.01 * b.double().norm()


def test_linear_add_keeps_residual_gradient_with_other_readers():
    seq = ops.Sequential(ops.MakeExtraOutput(in_place=True), ops.BasicLinear(8, 4))
    x = torch.randn(16, 8, requires_grad=True)
    y, residual = seq(x)
    seen = []
    residual.register_hook(seen.append)
    torch.autograd.grad([y, residual], x, [torch.ones_like(y), torch.full_like(residual, 3)])
    torch.testing.assert_close(seen[0], torch.full((16, 8), 3.0))


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("width", (WIDTH, 256))
def test_block_saves_norm_input_statistics_and_pre_activation(kind, width):
    """A narrow block also saves the inputs of its GEMMs, because recomputing them would take longer than the GEMMs."""
    wide = width == 256
    seq = ops.Sequential(
        fork(False)(None),
        getattr(ops, kind)(width),
        ops.Linear(width, width),
        ops.GELU(),
        ops.Linear(width, width),
        join("branch")(None),
    )
    saved = seq.explain(torch.randn(6, width, requires_grad=True)).data[0]["saved"]
    statistics = ["rstd"] if kind == "RMSNorm" else ["mean", "rstd"]
    assert [line["op"] for line in saved] == [1] * (1 + len(statistics)) + ([4] if wide else [2, 4, 5])
    assert [line["name"] for line in saved[: 1 + len(statistics)]] == ["input", *statistics]
    kept = []
    x = torch.randn(6, width, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        seq(x)
    parameters = {p.data_ptr() for p in seq.parameters()} | {x.data_ptr()}
    values = sum(t.numel() * t.element_size() for t in kept if t.data_ptr() not in parameters)
    assert values == sum(line["bytes"] for line in saved) == 4 * 6 * (width * (1 if wide else 3) + len(statistics))


# ---- rules by name ---------------------------------------------------------------------------------------------------


def test_rule_off_by_default_can_be_enabled():
    seq, x = ops.Sequential(ops.RMSNorm(4), ops.Linear(4, 4)), torch.randn(2, 4)
    assert len(seq.explain(x).data[0]["saved"]) == 3
    with fusion.with_rules("norm_linear"):
        data = seq.explain(x).data[0]
        assert data["forward"][0]["name"] == "norm_linear" and len(data["saved"]) == 2
    assert "norm_linear" not in dict(_C.rules()) and len(seq.explain(x).data[0]["saved"]) == 3


def test_rules_can_be_disabled_temporarily():
    seq, x = ops.Sequential(ops.Linear(4, 4), ops.GELU()), torch.randn(2, 4)

    def forward() -> list[str]:
        return [step["name"] for step in seq.explain(x).data[0]["forward"]]

    assert forward() == ["linear_bias_activation"]
    with fusion.without_rules("linear_bias_activation"):
        assert forward() == ["linear_bias", "GELU"]
        with fusion.without_rules():
            assert forward() == ["BasicLinear", "Bias", "GELU"]
        assert forward() == ["linear_bias", "GELU"]
    assert forward() == ["linear_bias_activation"]
    with pytest.raises(ValueError, match="Unknown fusion rule 'linear_glue'"), fusion.without_rules("linear_glue"):
        pass


# ---- tiers -----------------------------------------------------------------------------------------------------------

TIERS = ["amx", "avx512", "avx2", "ref"]


@pytest.mark.parametrize("tier", ["ref", *(pytest.param(t, marks=pytest.mark.slow) for t in TIERS[:-1])])
def test_values_hold_in_every_tier(tier):
    """Each tier in a new process, because a process selects its tier once. This one has the best tier."""
    if "WEFT_TIER" in os.environ:
        pytest.skip("this process has its tier already")
    if TIERS.index(tier) < TIERS.index(_C.machine_tier()):
        pytest.skip(f"the best this CPU has is {_C.machine_tier()}")
    selected = "agree_with_plain_torch and not float64"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", selected, __file__],
        env={**os.environ, "WEFT_TIER": tier, "PYTHONPATH": str(pathlib.Path(torchweft.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
