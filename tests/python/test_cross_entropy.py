"""CrossEntropy against float64 and against `F.cross_entropy`: options, sizes, extreme logits, compilation, memory."""

from __future__ import annotations

import random

import plain
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import torchweft
from torchweft import _C, ops

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CLASSES = (1, 2, 7, 31, 33, 64, 1000, 2048, 2049, 6001, 50304)
REDUCTIONS = ("mean", "sum", "none")


def run(op, x: torch.Tensor, targets: torch.Tensor, call=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss and dx for an output gradient that is the same for every dtype."""
    leaf = x.detach().clone().requires_grad_()
    loss = call(op, leaf, targets) if call else op(leaf, targets)
    dy = torch.rand(loss.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (dx,) = torch.autograd.grad(loss, leaf, dy.to(loss.dtype))
    return loss.detach(), dx


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    assert actual.shape == exact.shape
    return (actual.double() - exact).abs().max().item() if exact.numel() else 0.0


def random_case(seed: int):
    rng, dtype = random.Random(seed), DTYPES[seed % 4]
    classes = rng.choice(CLASSES)
    lead = rng.choice(((1,), (5,), (2, 3), (40,), (3, 1, 2)) if classes < 5000 else ((1,), (4,), (2, 2)))
    generator = torch.Generator().manual_seed(seed)
    scale = rng.choice((0.1, 1.0, 5.0, 40.0, 1000.0))
    x = (torch.randn(*lead, classes, generator=generator, dtype=torch.float64) * scale).to(dtype)
    targets = torch.randint(classes, lead, generator=generator)
    ignore_index = rng.choice((-100, 0, -1, classes - 1))
    targets[torch.rand(lead, generator=generator) < rng.choice((0, 0, 0.3))] = ignore_index
    op = ops.CrossEntropy(
        ignore_index=ignore_index,
        label_smoothing=rng.choice((0, 0, 0.1, 1.0)),
        reduction=rng.choice(REDUCTIONS),
        z_loss=rng.choice((0, 0, 1e-4, 0.1)),
    )
    return op, x, targets.int() if rng.random() < 0.3 else targets


@pytest.mark.parametrize("seed", range(200))
def test_random_case_is_no_farther_from_float64_than_eager(seed):
    op, x, targets = random_case(seed)
    exact = run(op, x.double(), targets, plain.cross_entropy)
    eager = run(op, x, targets, plain.cross_entropy)
    actual = run(op, x, targets)
    assert actual[0].dtype == eager[0].dtype and actual[1].dtype == x.dtype
    if op.reduction == "mean" and (targets == op.ignore_index).all():
        assert actual[0].isnan() and actual[1].eq(0).all()
        return
    for got, right, as_torch in zip(actual, exact, eager, strict=True):
        # The gradients of low dtypes round once. In float32 two correct results differ by a few roundings. In float64
        # eager is the reference itself.
        few = {torch.float64: 1e4, torch.float32: 4}.get(got.dtype, 0.02)
        ulp = torch.finfo(got.dtype).eps * right.abs().max().item()
        assert error(got, right) <= 1.02 * error(as_torch, right) + few * ulp + 1e-15


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "options", ({}, {"label_smoothing": 0.2}, {"z_loss": 0.3}, {"label_smoothing": 1, "z_loss": 1})
)
def test_gradcheck(reduction, options):
    x = torch.randn(3, 4, 9, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(9, (3, 4))
    targets[1, 2] = -100
    op = ops.CrossEntropy(reduction=reduction, **options)
    assert torch.autograd.gradcheck(lambda t: op(t, targets), x, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("label_smoothing", (0, 0.1))
def test_all_rows_ignored_matches_torch(dtype, label_smoothing):
    x, targets = torch.randn(3, 5, dtype=dtype), torch.full((3,), -100)
    for reduction, loss in zip(REDUCTIONS, (torch.nan, 0.0, 0.0), strict=True):
        y, dx = run(ops.CrossEntropy(reduction=reduction, label_smoothing=label_smoothing), x, targets)
        assert torch.equal(y.nan_to_num(7.0), torch.full_like(y, loss).nan_to_num(7.0)) and dx.eq(0).all()


INF, NAN = float("inf"), float("nan")


def extreme_rows(dtype: torch.dtype, classes: int) -> torch.Tensor:
    """Rows of large, infinite and NaN logits; the last class is the target of every row. The special values are in the
    first, a middle or the last block of the kernel."""
    big = {torch.float16: 6e4, torch.float64: 1e308}.get(dtype, 3e38)
    rows = []
    for at in (0, classes // 2, classes - 1):
        for fill, value in (
            (0.0, big),
            (0.0, -big),
            (-big, big),
            (big, -big),
            (big, big),
            (-big, -big),
            (0.0, INF),
            (0.0, -INF),
            (-INF, 0.0),
            (-INF, big),
            (-INF, -INF),
            (INF, INF),
            (INF, -INF),
            (0.0, NAN),
            (-INF, NAN),
        ):
            row = torch.full((classes,), fill, dtype=torch.float64)
            row[at] = value
            rows.append(row)
    return torch.stack(rows).to(dtype)


@pytest.mark.parametrize("classes", (3, 17, 5000))
@pytest.mark.parametrize("label_smoothing", (0, 0.1))
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits_match_torch(dtype, label_smoothing, classes):
    x = extreme_rows(dtype, classes)
    targets = torch.full((len(x),), classes - 1)
    op = ops.CrossEntropy(reduction="none", label_smoothing=label_smoothing)
    actual, eager = run(op, x, targets), run(op, x, targets, plain.cross_entropy)
    exact = run(op, x.double(), targets, plain.cross_entropy)[0].to(actual[0].dtype)
    overflows = eager[0].isinf() & exact.isfinite()  # of eager's sum over the classes
    assert label_smoothing or not overflows.any()
    if dtype == torch.float64:  # no wider reference
        overflows = eager[0].isinf() & actual[0].isfinite()
        exact = actual[0]
    eager[0][overflows] = exact[overflows]
    tolerance = {"rtol": 1e-5 if dtype != torch.bfloat16 else 8e-3, "atol": 1e-6, "equal_nan": True}
    for got, expected in zip(actual, eager, strict=True):
        torch.testing.assert_close(got, expected, **tolerance)


def test_ignored_rows_are_not_read():
    x, targets = torch.randn(4, 9), torch.tensor([1, -100, 3, -100])
    x[1], x[3] = NAN, INF
    loss, dx = run(ops.CrossEntropy(reduction="none", label_smoothing=0.1, z_loss=0.1), x, targets)
    assert loss.isfinite().all() and dx.isfinite().all()
    assert loss[1] == loss[3] == 0 and dx[1].eq(0).all() and dx[3].eq(0).all()


def test_large_equal_logits_keep_full_precision():
    """One float32 logsumexp would lose log(V) at 1e8: backward needs the maximum and the sum."""
    x, targets = torch.full((2, 1000), 1e8), torch.tensor([0, 999])
    loss, dx = run(ops.CrossEntropy(reduction="sum"), x, targets)
    expected = F.cross_entropy(torch.zeros(2, 1000, dtype=torch.float64), targets, reduction="sum")
    torch.testing.assert_close(loss, expected.float())
    assert run(ops.CrossEntropy(reduction="sum"), torch.zeros(2, 1000), targets)[1].equal(dx)


@pytest.mark.parametrize("dtype", DTYPES)
def test_result_does_not_depend_on_number_of_threads(dtype):
    op, x, targets = ops.CrossEntropy(label_smoothing=0.1), torch.randn(64, 3001).to(dtype), torch.randint(3001, (64,))
    expected = run(op, x, targets)
    torch.set_num_threads(2)
    assert all(map(torch.equal, run(op, x, targets), expected))


def test_head_and_loss_in_one_sequential():
    model = torchweft.Sequential(ops.RMSNorm(16), ops.Linear(16, 50, bias=False), ops.CrossEntropy(z_loss=1e-3))
    model.double()
    x, targets = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True), torch.randint(50, (2, 7))
    loss = model(x, targets)
    inputs = (x, *model.parameters())
    hidden = F.rms_norm(x, (16,), model[0].weight, model[0].eps)
    expected = plain.cross_entropy(model[2], F.linear(hidden, model[1].weight), targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs))


@pytest.mark.parametrize("after", (ops.ConstantScale(2.0), ops.Identity(), ops.GELU()), ids=repr)
def test_next_op_sees_float32(after):
    x, targets = torch.randn(6, 9, dtype=torch.bfloat16, requires_grad=True), torch.randint(9, (6,))
    model = torchweft.Sequential(ops.CrossEntropy(reduction="none"), after)
    expected = plain.apply(after, plain.cross_entropy(model[0], x, targets))[0]
    y = model(x, targets)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x))


def test_saves_logits_and_two_numbers_per_row():
    saved = []
    x, targets = torch.randn(12, 33, requires_grad=True), torch.randint(33, (12,))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.CrossEntropy()(x, targets)
    sizes = sorted(tuple(t.shape) for t in saved)
    assert sizes == [(12,), (12, 2), (12, 33)]
    assert {t.data_ptr() for t in saved} >= {x.data_ptr(), targets.data_ptr()}  # no copies


@pytest.mark.parametrize("which", ("logits", "targets"))
def test_change_in_place_before_backward_raises(which):
    x, targets = torch.randn(4, 9, requires_grad=True), torch.randint(9, (4,))
    logits = x * 1
    loss = ops.CrossEntropy()(logits, targets)
    with torch.no_grad():
        (logits if which == "logits" else targets).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_fullgraph_compile_matches_eager(reduction):
    head = ops.Sequential(ops.Linear(8, 33), ops.CrossEntropy(reduction=reduction, label_smoothing=0.1, z_loss=0.01))
    compiled = torch.compile(head, backend="aot_eager", fullgraph=True, dynamic=True)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows in (5, 9, 2):
        x, targets = torch.randn(rows, 3, 8), torch.randint(33, (rows, 3))
        results = []
        for f in (head, compiled):
            leaf = x.clone().requires_grad_()
            loss = f(leaf, targets)
            results.append([loss, *torch.autograd.grad(loss.sum(), (leaf, *head.parameters()))])
        torch.testing.assert_close(*results)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs == 1


def test_export_keeps_number_of_rows_dynamic():
    head = ops.Sequential(ops.Linear(8, 33), ops.CrossEntropy(reduction="none")).requires_grad_(False)
    rows = torch.export.Dim("rows")
    example = torch.randn(4, 8), torch.randint(33, (4,))
    program = torch.export.export(head, example, dynamic_shapes=({0: rows}, ({0: rows},)))
    x, targets = torch.randn(11, 8), torch.randint(33, (11,))
    torch.testing.assert_close(program.module()(x, targets), head(x, targets))


def test_meta_and_fake_tensors_have_right_sizes():
    for reduction, shape in zip(REDUCTIONS, ((), (), (3, 4)), strict=True):
        op = ops.CrossEntropy(reduction=reduction)
        for low in (torch.bfloat16, torch.float64):
            x = torch.empty(3, 4, 9, device="meta", dtype=low, requires_grad=True)
            y = op(x, torch.empty(3, 4, device="meta", dtype=torch.int64))
            y.sum().backward()
            assert y.shape == shape and x.grad.shape == x.shape and x.grad.dtype == low
            assert y.dtype == (torch.float64 if low == torch.float64 else torch.float32)
        with FakeTensorMode():
            assert op(torch.empty(3, 4, 9), torch.zeros(3, 4, dtype=torch.int64)).shape == shape


def test_explain_names_kernel_and_saved_tensors():
    x, targets = torch.randn(4, 9, dtype=torch.float64, requires_grad=True), torch.randint(9, (4,))
    text = str(ops.CrossEntropy().explain(x, targets))
    assert "CrossEntropy" in text and "statistics" in text
    assert "not used for float64" in text or _C.machine_tier() == "ref"


def test_text_round_trips():
    op = ops.CrossEntropy(ignore_index=3, label_smoothing=0.25, reduction="none", z_loss=0.5)
    text = op._description().text
    assert 'reduction="none"' in text and "ignore_index=3" in text
    assert text in _C.normalize_text(text + " <-")


def test_targets_of_a_replaced_call_are_checked_in_backward():
    """The functional backward takes saved tensors from the caller: a bad class must not write outside the row."""
    x, targets = torch.randn(3, 5, requires_grad=True), torch.tensor([0, 1, 2])
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t + (1 << 40) if t.dtype == torch.int64 else t, lambda t: t
    ):
        loss = ops.CrossEntropy(reduction="sum")(x, targets)
    (dx,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(dx, x.detach().softmax(-1))  # no row owns its target
