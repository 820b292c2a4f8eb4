"""Weight gradients of grouped operations: every row of the table in test_wgrad.py, for GroupedLinear and for both
layers of a fused MLP, with one weight per group or a single grouped weight."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from experts import ROWS, layer, leaf, mlp, splits_of, truth, uniform
from test_wgrad import (
    FILL,
    INTO_MAIN_GRAD,
    Row,
    each_main_grad_row,
    each_row,
    ops_touching_weight_memory,
    peak_bytes,
    prepare,
    share_memory,
)
from test_wgrad import ROWS as TABLE
from test_wgrad import assert_near as assert_close

import torchweft
from torchweft import ops

WIDTH = 28  # the weight and x have different sizes
KINDS = ("grouped", "split", "mlp")  # the MLP has a ScaledSwiGLU, "srelu" a ScaledSReLU
DTYPES = ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16))
each_kind = pytest.mark.parametrize("kind", KINDS)
each_weight = pytest.mark.parametrize("single", (False, True), ids=("discrete", "single"))
each_dtypes = pytest.mark.parametrize("dtypes", DTYPES, ids=lambda pair: f"{pair[0]}-{pair[1]}".replace("torch.", ""))
ROW2, ROW5, ROW6, ROW7, ROW8, ROW9 = TABLE[1], *(INTO_MAIN_GRAD[i] for i in (2, 3, 4, 5, 6))


def build(kind: str, single: bool, dtype=torch.float32, width: int = WIDTH, **options) -> torch.nn.Module:
    options |= {"dtype": dtype, "single_grouped_weight": single}
    if kind in ("mlp", "srelu"):
        activation = "ScaledSwiGLU" if kind == "mlp" else "ScaledSReLU"
        return mlp(activation, k=width, hidden=width, n=width, **options)
    return layer(width, width, split_path=kind == "split", **options)


def layers(model) -> list[ops.GroupedLinear]:
    return [m for m in model.modules() if isinstance(m, ops.GroupedLinear)]


def weights_of(op) -> list[torch.nn.Parameter]:
    return [p for name, p in op.named_parameters() if "weight" in name]


def weights(model) -> list[torch.nn.Parameter]:
    return [w for op in layers(model) for w in weights_of(op)]


def inputs(model, dtype=torch.float32, width: int = WIDTH, rows: int = ROWS) -> list[torch.Tensor]:
    """Returns x and the extra inputs; two of the groups are empty."""
    splits = splits_of() if rows else splits_of([0] * len(splits_of()))
    x = leaf(rows, width, dtype=dtype)
    probs = leaf(rows, dtype=dtype)
    return [x, splits, probs, splits, probs] if isinstance(model, torchweft.Sequential) else [x, splits]


def model_for(row: Row, kind: str, single: bool, dtypes=DTYPES[1], width: int = WIDTH, **notes):
    model = build(
        kind, single, dtypes[0], width, accumulate_into_main_grad=row.accumulate, delay_wgrad_compute=row.delay
    )
    if row.accumulate:
        for weight in weights(model):
            prepare(weight, row, dtypes[1], **notes)
    return model


def backward(model, *micro_batches) -> None:
    for given in micro_batches:
        y = model(*given)
        y.backward(torch.ones_like(y))


def pop(model) -> None:
    for op in reversed(layers(model)):
        op.backward_dw()


def gradients(model, *micro_batches) -> list[torch.Tensor]:
    """Returns the weight gradients summed over all micro-batches, in float64."""
    total = [0] * len(weights(model))
    for given in micro_batches:
        x, *extras = given
        found = truth(model, torch.ones(x.shape[0], WIDTH), x, *extras)
        grads = [found[f"gradient of {name}"] for name, p in model.named_parameters() if "weight" in name]
        total = [a + b for a, b in zip(total, grads, strict=True)]
    return total


def grad_target(weight, row: Row) -> torch.Tensor:
    return weight.main_grad if row.accumulate else weight.grad


def start(row: Row) -> float:
    return FILL if row.accumulate and not row.overwrite else 0.0


def same_bits(a, b) -> bool:
    return torch.equal(a.nan_to_num(1.0), b.nan_to_num(1.0))


# ---- rows of the table ----------------------------------------------------------------------------------------------


@each_row
@pytest.mark.parametrize("kind", (*KINDS, "srelu"))
@each_weight
@each_dtypes
def test_every_row_of_wgrad_contract(row, kind, single, dtypes):
    model = model_for(row, kind, single, dtypes)
    given = inputs(model, dtypes[0])
    expected = gradients(model, given)
    before = [w.main_grad.clone() if row.accumulate else None for w in weights(model)]
    attributes = [set(w.__dict__) for w in weights(model)]
    seen = []
    for op in layers(model):
        op.register_wgrad_accumulation_and_reduce_hooks(lambda op=op: seen.append([w.grad for w in weights_of(op)]))

    backward(model, given)
    assert all(op.need_backward_dw() == row.delay and op.pending_backward_dw == row.delay for op in layers(model))
    for weight, old, names in zip(weights(model), before, attributes, strict=True):
        assert (weight.grad is not None) == (row.flag if row.accumulate else not row.delay)
        assert set(weight.__dict__) == names and getattr(weight, "grad_added_to_main_grad", True)
        assert not (row.delay and row.accumulate) or same_bits(weight.main_grad, old)
        assert not row.accumulate or not share_memory(weight.grad, weight.main_grad)

    for op in reversed(layers(model)):
        op.backward_dw()
        assert op.pending_backward_dw == 0
        op.backward_dw()  # nothing is pending: no effect
    assert len(seen) == (len(layers(model)) if row.delay else 0), "hooks run once for each layer"
    assert all((g is not None) == (row.flag or not row.accumulate) for grads in seen for g in grads)
    for weight, dw in zip(weights(model), expected, strict=True):
        assert_close(grad_target(weight, row), dw + start(row), dtypes[0])
        assert not row.accumulate or not share_memory(weight.grad, weight.main_grad)
    assert all(p.grad is not None for name, p in model.named_parameters() if "bias" in name)


@each_main_grad_row
@each_kind
@each_weight
@each_dtypes
def test_empty_group_keeps_or_zeroes_main_grad(row, kind, single, dtypes):
    model = model_for(row, kind, single, dtypes)
    backward(model, inputs(model, dtypes[0]))
    pop(model)
    for op in layers(model):
        parts = [part for w in weights_of(op) for part in (w.main_grad if single else [w.main_grad])]
        for part, rows in zip(parts, splits_of().tolist(), strict=True):
            if rows == 0:
                assert torch.equal(part, torch.full_like(part, start(row)))
            else:
                assert part.isfinite().all() and not torch.equal(part, torch.full_like(part, start(row)))


@each_main_grad_row
@each_kind
@each_weight
def test_zero_rows_keep_or_zero_main_grad(row, kind, single):
    model = model_for(row, kind, single)
    backward(model, inputs(model, rows=0))
    pop(model)
    assert all(torch.equal(w.main_grad, torch.full_like(w, start(row))) for w in weights(model))


@each_kind
@each_weight
@pytest.mark.parametrize("delay", (False, True), ids=("now", "delayed"))
@pytest.mark.parametrize("there", (False, True), ids=("no main_grad", "main_grad"))
def test_frozen_weights_need_no_main_grad(kind, single, delay, there):
    model = build(kind, single, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    model.requires_grad_(False)
    hooks = []
    for op in layers(model):
        op.register_wgrad_accumulation_and_reduce_hooks(lambda: hooks.append(1))
        for w in weights_of(op) if there else ():
            w.main_grad, w.grad_added_to_main_grad = torch.full_like(w, FILL), False
    given = inputs(model)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        y = model(*given)
    y.backward(torch.ones_like(y))
    x, *extras = given
    expected = truth(model, torch.ones(ROWS, WIDTH), x, *extras)
    assert_close(x.grad, expected["gradient of x"], torch.float32)
    assert x.data_ptr() not in saved
    for op in layers(model):
        assert op.pending_backward_dw == 0
        op.backward_dw()
        for w in weights_of(op):
            assert w.grad is None
            if there:
                assert torch.equal(w.main_grad, torch.full_like(w, FILL)) and w.grad_added_to_main_grad is False
    assert not hooks


@each_kind
@each_weight
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("delay", (False, True), ids=("now", "delayed"))
def test_overwrite_equals_autograd_bitwise(kind, single, dtype, delay):
    model = model_for(Row(6, True, delay, True, True), kind, single, (dtype, dtype))
    twin = build(kind, single, dtype)
    twin.load_state_dict(model.state_dict())
    given = inputs(model, dtype)
    backward(model, given)
    pop(model)
    backward(twin, given)
    for weight, other in zip(weights(model), weights(twin), strict=True):
        assert torch.equal(weight.main_grad, other.grad)


@each_kind
@each_weight
def test_float32_main_grad_gets_unrounded_gemm(kind, single):
    if kind == "mlp":
        pytest.skip("what comes between the layers is rounded")
    model = model_for(ROW5, kind, single, DTYPES[0])
    given, dy = inputs(model, torch.bfloat16), uniform(ROWS, WIDTH, dtype=torch.bfloat16)
    model(*given).backward(dy)
    found = truth(model, dy, *given)
    for name, w in model.named_parameters():
        if "weight" in name:
            exact = found[f"gradient of {name}"] + FILL
            assert (w.main_grad.double() - exact).abs().max() <= 2e-6 * exact.abs().max()


# ---- get_main_grad() ------------------------------------------------------------------------------------------------


@each_kind
@each_weight
@pytest.mark.parametrize("delay", (False, True), ids=("now", "delayed"))
@pytest.mark.parametrize("sharded", (True, False), ids=("sharded", "unsharded"))
def test_bucket_is_fetched_when_gradient_is_computed(kind, single, delay, sharded):
    """It may be different in each step."""
    model = build(kind, single, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    fetched, forward = [], [True]

    def fetch(w):
        def get():
            assert not forward[0], "nothing is fetched in forward"
            fetched.append(w)
            return torch.full_like(w, float("nan") if sharded else 0)

        return get

    reduced = [0] * len(weights(model))
    batches = [inputs(model), inputs(model)]
    for given in batches:
        for w in weights(model):
            w.grad_added_to_main_grad, w.__fsdp_param__, w.overwrite_main_grad = False, True, sharded
            w.get_main_grad, w.main_grad = fetch(w), None
        forward[0] = True
        y = model(*given)
        forward[0], before = False, len(fetched)
        y.backward(torch.ones_like(y))
        assert len(fetched) - before == (0 if delay else len(weights(model)))
        assert all(w.grad_added_to_main_grad and w.grad is not None for w in weights(model))
        if delay:  # un-sharded for the next forward
            for w in weights(model):
                w.grad_added_to_main_grad = False
        pop(model)
        assert all(w.grad_added_to_main_grad for w in weights(model))
        reduced = [total + w.main_grad.double() for total, w in zip(reduced, weights(model), strict=True)]
    assert len(fetched) == 2 * len(weights(model))
    for total, dw in zip(reduced, gradients(model, *batches), strict=True):
        assert_close(total, dw, torch.float32)


# ---- dummies --------------------------------------------------------------------------------------------------------


@each_kind
@each_weight
def test_equal_weights_share_one_dummy_grad(kind, single):
    model = model_for(ROW5, kind, single, zero_out=True)
    backward(model, inputs(model))
    by_shape = {}
    for w in weights(model):
        assert w.grad.shape == w.shape and w.grad.dtype == w.dtype and not w.grad.any()
        by_shape.setdefault(tuple(w.shape), set()).add(w.grad.data_ptr())
    assert all(len(pointers) == 1 for pointers in by_shape.values())


@each_kind
@each_weight
@pytest.mark.parametrize("delay", (False, True), ids=("now", "delayed"))
def test_weight_shared_with_plain_op_gets_both_gradients(kind, single, delay):
    model = model_for(Row(5, True, delay, True, False), kind, single, zero_out=True)
    given = inputs(model)
    shared = weights(model)[0]
    factor = torch.randn(shared.shape)
    y = model(*given)
    (y.sum() + (shared * factor).sum()).backward()
    pop(model)
    shared.main_grad.add_(shared.grad)  # the framework's hook: zero_out_wgrad is set
    assert_close(shared.main_grad, gradients(model, given)[0] + factor.double() + FILL, torch.float32)


@each_kind
@pytest.mark.parametrize("delay", (False, True), ids=("now", "delayed"))
def test_each_expert_has_own_flag(kind, delay):
    model = model_for(Row(3, True, delay, False, False), kind, single=False)
    for op in layers(model):
        for g, w in enumerate(weights_of(op)):
            if g % 2:
                w.grad_added_to_main_grad = False
            if g == 3:
                w.zero_out_wgrad = True
    given = inputs(model)
    backward(model, given)
    for op in layers(model):
        for g, w in enumerate(weights_of(op)):
            assert (w.grad is not None) == bool(g % 2)
            assert hasattr(w, "grad_added_to_main_grad") == bool(g % 2)
            assert g != 3 or not w.grad.any()
    pop(model)
    for w, dw in zip(weights(model), gradients(model, given), strict=True):
        assert_close(w.main_grad, dw + FILL, torch.float32)


@each_kind
@pytest.mark.parametrize("delay", (False, True), ids=("now", "delayed"))
def test_inconsistent_overwrite_flags_are_rejected(kind, delay):
    model = model_for(Row(5, True, delay, True, False), kind, single=False)
    for op in layers(model):
        weights_of(op)[2].overwrite_main_grad = True
    y = model(*inputs(model))
    with pytest.raises(RuntimeError, match="GroupedLinear: overwrite_main_grad differs"):
        y.sum().backward()
    assert all(w.grad_added_to_main_grad is False for w in weights(model))
    assert all(torch.equal(w.main_grad, torch.full_like(w, FILL)) for w in weights(model))


# ---- main_grad ------------------------------------------------------------------------------------------------------


def bad_main_grads(shape) -> dict[str, torch.Tensor | None]:
    *lead, n, k = shape
    return {
        "transposed": torch.full((*lead, k, n), FILL).transpose(-1, -2),
        "every other column": torch.full((*lead, n, 2 * k), FILL)[..., ::2],
        "too many": torch.full((*lead, n, k + 1), FILL),
        "too few": torch.full((n,), FILL),
        "integers": torch.zeros(shape, dtype=torch.int32),
        "none": None,
    }


@each_kind
@each_weight
@pytest.mark.parametrize("delay", (False, True), ids=("now", "delayed"))
@pytest.mark.parametrize("case", bad_main_grads((2, 3, 4)))
@pytest.mark.parametrize("which", (0, -1), ids=("first", "last"))
def test_invalid_main_grad_raises_without_side_effects(kind, single, delay, case, which):
    model = model_for(Row(5, True, delay, True, False), kind, single)
    op = layers(model)[which]
    bad = weights_of(op)[which]
    main_grad = bad.main_grad = bad_main_grads(bad.shape)[case]
    with pytest.raises(RuntimeError, match="GroupedLinear: .*main_grad") as caught:
        backward(model, inputs(model))
        pop(model)
    if case in ("transposed", "every other column"):
        text = str(caught.value)
        assert str(list(main_grad.shape)) in text and str(list(main_grad.stride())) in text
    assert bad.grad_added_to_main_grad is False or delay
    if main_grad is not None:
        assert main_grad.is_floating_point() is False or (main_grad == FILL).all()
    for w in weights_of(op):
        assert w is bad or torch.equal(w.main_grad, torch.full_like(w, FILL))


@each_kind
@each_weight
def test_missing_main_grad_raises_in_backward(kind, single):
    for delay in (False, True):
        model = model_for(Row(5, True, delay, True, False), kind, single)
        for w in weights(model):
            del w.main_grad
        with torch.no_grad():
            model(*inputs(model))
        y = model(*inputs(model))
        with pytest.raises(RuntimeError, match="GroupedLinear: .*no main_grad"):
            y.sum().backward()
        assert all(op.pending_backward_dw == 0 for op in layers(model))
        assert all(w.grad_added_to_main_grad is False for w in weights(model))


@each_kind
def test_flat_main_grad_works_for_packed_weight(kind):
    model = model_for(ROW5, kind, single=True)
    for w in weights(model):
        w.main_grad = torch.zeros(w.numel() + 3)[3:]
    given = inputs(model)
    backward(model, given)
    for w, dw in zip(weights(model), gradients(model, given), strict=True):
        assert_close(w.main_grad.view(w.shape), dw, torch.float32)


def test_main_grads_of_different_dtypes_are_rejected():
    model = model_for(ROW5, "grouped", single=False)
    model.weight4.main_grad = model.weight4.main_grad.double()
    with pytest.raises(RuntimeError, match="main_grads of one operation"):
        backward(model, inputs(model))


def test_experts_share_one_main_grad_bucket():
    """Overlapping views of one bucket would lose a gradient; frameworks use adjacent views."""
    model = model_for(ROW5, "grouped", single=False)
    bucket = torch.zeros(len(weights(model)) * WIDTH * WIDTH)
    for w, part in zip(weights(model), bucket.chunk(len(weights(model))), strict=True):
        w.main_grad = part.view(WIDTH, WIDTH)
    given = inputs(model)
    backward(model, given)
    for w, dw in zip(weights(model), gradients(model, given), strict=True):
        assert_close(w.main_grad, dw, torch.float32)
        assert share_memory(w.main_grad, bucket)


# ---- micro-batches --------------------------------------------------------------------------------------------------


@each_row
@each_kind
@each_weight
def test_micro_batches_accumulate_without_clearing_grad(row, kind, single):
    model = model_for(row, kind, single)
    batches = [inputs(model) for _ in range(3)]
    for given in batches:
        backward(model, given)
        pop(model)
    for w, dw in zip(weights(model), gradients(model, *(batches[-1:] if row.overwrite else batches)), strict=True):
        assert_close(grad_target(w, row), dw + start(row), torch.float32)


@each_kind
@each_weight
@pytest.mark.parametrize("row", (ROW2, ROW7, ROW9), ids=lambda row: f"row{row.number}")
@pytest.mark.parametrize("order", ("ffpp", "ffpfpp"))
def test_backward_and_backward_dw_may_interleave(kind, single, row, order):
    model = model_for(row, kind, single)
    batches = [inputs(model) for _ in range(order.count("f"))]
    waiting = iter(batches)
    for letter in order:
        if letter == "f":
            backward(model, next(waiting))
        else:
            pop(model)
    for w, dw in zip(weights(model), gradients(model, *batches), strict=True):
        assert_close(grad_target(w, row), dw + start(row), torch.float32)


@each_kind
@each_weight
def test_oldest_micro_batch_is_computed_first(kind, single):
    model = model_for(ROW8, kind, single)
    batches = [inputs(model), inputs(model)]
    backward(model, *batches)
    assert all(op.pending_backward_dw == 2 for op in layers(model))
    for given in batches:
        pop(model)
        for w, dw in zip(weights(model), gradients(model, given), strict=True):
            assert_close(w.main_grad, dw, torch.float32)


@each_kind
@each_weight
def test_delayed_gradient_adds_to_existing_grad(kind, single):
    model = model_for(ROW2, kind, single)
    for w in weights(model):
        w.grad = torch.full_like(w, 2)
    given = inputs(model)
    backward(model, given)
    assert all(torch.equal(w.grad, torch.full_like(w, 2)) for w in weights(model))
    pop(model)
    for w, dw in zip(weights(model), gradients(model, given), strict=True):
        assert_close(w.grad, dw + 2, torch.float32)


@each_weight
def test_delayed_gradients_of_experts_are_independent(single):
    """Each has its own .grad: clearing or scaling one does not affect the others."""
    model = model_for(ROW2, "grouped", single)
    given = inputs(model)
    backward(model, given)
    pop(model)
    expected = gradients(model, given)
    weights(model)[0].grad.mul_(3)
    for i, (w, dw) in enumerate(zip(weights(model), expected, strict=True)):
        assert_close(w.grad, dw * (3 if i == 0 else 1), torch.float32)


def test_delayed_gradient_holds_x_and_dy_until_computed():
    model = layer(WIDTH, WIDTH, delay_wgrad_compute=True, bias=False)
    x = uniform(ROWS, WIDTH, dtype=torch.float32)
    hidden, dy = x * 2, uniform(ROWS, WIDTH, dtype=torch.float32)
    references = [t.untyped_storage()._weak_ref() for t in (hidden, dy)]
    model(hidden, splits_of()).backward(dy)
    del hidden, dy
    gc.collect()
    assert not any(torch.UntypedStorage._expired(r) for r in references)
    model.backward_dw()
    assert all(torch.UntypedStorage._expired(r) for r in references)
    for r in references:
        torch.UntypedStorage._free_weak_ref(r)


@pytest.mark.parametrize("what", ("x", "dy", "splits"))
def test_changing_delayed_tensors_raises(what):
    model = layer(WIDTH, WIDTH, delay_wgrad_compute=True)
    given = {"x": uniform(ROWS, WIDTH, dtype=torch.float32), "splits": splits_of()}
    given["dy"] = uniform(ROWS, WIDTH, dtype=torch.float32)
    model(given["x"], given["splits"]).backward(given["dy"])
    given[what].zero_()
    with pytest.raises(RuntimeError, match="backward_dw"):
        model.backward_dw()


@each_kind
@each_weight
@each_main_grad_row
def test_weight_used_twice_gets_both_gradients(kind, single, row):
    model = model_for(row, kind, single)
    batches = [inputs(model), inputs(model)]
    sum(model(*given).sum() for given in batches).backward()
    assert all(op.pending_backward_dw == row.delay for op in layers(model))
    pop(model)
    for w, dw in zip(weights(model), gradients(model, *batches), strict=True):
        assert_close(w.main_grad, dw + start(row), torch.float32)


# ---- no pass over weight-sized memory -------------------------------------------------------------------------------


@each_main_grad_row
@each_kind
@each_weight
@pytest.mark.parametrize("dtypes", DTYPES[:2], ids=("bfloat16-float32", "float32-float32"))
def test_only_gemm_touches_weight_sized_memory(row, kind, single, dtypes):
    model = model_for(row, kind, single, dtypes)
    given = inputs(model, dtypes[0])
    backward(model, given)  # dummies exist
    pop(model)
    for w in weights(model):
        w.grad = None
    versions = [w.main_grad._version for w in weights(model)]
    y = model(*given)
    dy = torch.ones_like(y)

    def work():
        y.backward(dy)
        pop(model)

    cleared = ["zero_"] * splits_of().tolist().count(0) if row.overwrite else []  # of empty groups
    assert ops_touching_weight_memory(weights(model)[0], work) in ([], cleared)
    assert [w.main_grad._version for w in weights(model)] == [v + 1 for v in versions]


@each_weight
@pytest.mark.parametrize("row", (TABLE[0], ROW5, ROW6, ROW9), ids=lambda row: f"row{row.number}")
@pytest.mark.parametrize("kind", ("grouped", "split"))
def test_backward_allocates_no_weight_sized_memory(row, kind, single):
    width = 256
    model = model_for(row, kind, single, width=width)
    given = inputs(model, width=width)
    backward(model, given)
    pop(model)
    given[0].grad = None
    for p in model.parameters():
        p.grad = None
    y = model(*given)
    dy = torch.ones_like(y)

    def work():
        y.backward(dy)
        pop(model)

    weight_bytes = width * width * 4 * len(splits_of())
    assert (peak_bytes(work) < 0.5 * weight_bytes) == row.accumulate


@each_weight
@pytest.mark.parametrize("row", (ROW2, ROW7, ROW9), ids=lambda row: f"row{row.number}")
def test_delayed_gradient_allocates_no_weight_sized_memory(row, single):
    width = 256
    model = model_for(row, "grouped", single, width=width)
    given = inputs(model, width=width)
    backward(model, given)
    pop(model)
    given[0].grad = None
    for w in weights(model):
        w.grad = None
    y = model(*given)
    dy = torch.ones_like(y)
    assert peak_bytes(lambda: y.backward(dy)) < 0.5 * width * width * 4 * len(splits_of())


# ---- hooks, threads -------------------------------------------------------------------------------------------------


@each_weight
@pytest.mark.parametrize("flag", (False, True), ids=("no flag", "flag"))
def test_accumulator_hooks_fire_once_and_get_grad_only_with_flag(single, flag):
    model = model_for(Row(0, True, False, flag, False), "grouped", single)
    seen, kept = [], []
    for w in weights(model):
        accumulator = w.expand_as(w).grad_fn.next_functions[0][0]
        accumulator.register_hook(lambda outputs, inputs: seen.append(inputs[0] is not None))
        kept.append(accumulator)
    backward(model, inputs(model))
    assert seen == [flag] * len(kept)


class Buckets:
    """Overlapped data parallelism: a hook per parameter adds .grad to main_grad unless it was added, and clears it."""

    def __init__(self, model):
        self.ready, self.last, self.kept = [], False, []
        for p in model.parameters():
            p.grad_added_to_main_grad, p.main_grad = False, torch.zeros_like(p)
        for op in layers(model):
            for p in op.parameters():
                if getattr(p, "skip_backward_post_hook", False):
                    op.register_wgrad_accumulation_and_reduce_hooks(lambda p=p: self.hook(p))
                else:
                    accumulator = p.expand_as(p).grad_fn.next_functions[0][0]
                    accumulator.register_hook(lambda *_, p=p: self.hook(p))
                    self.kept.append(accumulator)

    def hook(self, p):
        assert p.grad is not None
        if not p.grad_added_to_main_grad or getattr(p, "zero_out_wgrad", False):
            p.main_grad.add_(p.grad)
        p.grad = None
        if self.last:
            self.ready.append(id(p))


@each_kind
@each_weight
@pytest.mark.parametrize("delay", (False, True), ids=("now", "delayed"))
def test_data_parallel_buckets_get_every_micro_batch_once(kind, single, delay):
    model = build(kind, single, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    buckets = Buckets(model)
    batches = [inputs(model) for _ in range(3)]
    for given in batches:
        buckets.last = given is batches[-1]
        backward(model, given)
        pop(model)
    for w, dw in zip(weights(model), gradients(model, *batches), strict=True):
        assert_close(w.main_grad, dw, torch.float32)
        assert w.grad is None
    assert sorted(buckets.ready) == sorted(id(p) for p in model.parameters())


@each_weight
def test_concurrent_backwards_lose_no_gradient(single):
    model = layer(4, 4, groups=2, bias=False, accumulate_into_main_grad=True, single_grouped_weight=single)
    for w in weights(model):
        w.main_grad = torch.zeros_like(w)
    x, splits = torch.ones(2, 4), splits_of((1, 1))

    def work():
        for _ in range(50):
            model(x, splits).sum().backward()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(torch.equal(w.main_grad, torch.full_like(w, 100)) for w in weights(model))


@each_kind
@each_weight
def test_requesting_only_dx_leaves_main_grad(kind, single):
    model = model_for(ROW5, kind, single)
    given = inputs(model)
    torch.autograd.grad(model(*given).sum(), given[0])
    assert all(torch.equal(w.main_grad, torch.full_like(w, FILL)) for w in weights(model))
    assert not any(w.grad_added_to_main_grad for w in weights(model))


DIFFERENT = [
    ({"accumulate_into_main_grad": True}, {}),
    ({}, {"accumulate_into_main_grad": True, "single_grouped_weight": True}),
    ({"delay_wgrad_compute": True, "single_grouped_weight": True}, {"accumulate_into_main_grad": True}),
    ({"accumulate_into_main_grad": True, "delay_wgrad_compute": True}, {"bias": False, "delay_wgrad_compute": True}),
    ({"split_path": True, "bias": False}, {"scale_bias": True, "single_grouped_bias": True}),
]


@pytest.mark.parametrize("first, last", DIFFERENT)
def test_layers_of_fused_mlp_may_have_different_options(first, last):
    model = torchweft.Sequential(layer(WIDTH, 2 * WIDTH, **first), ops.ScaledSwiGLU(), layer(WIDTH, WIDTH, **last))
    x, splits, probs, *_ = inputs(model)
    given = [x, splits, probs, splits, *[leaf(ROWS)] * (model[2].num_extra_inputs - 1)]
    assert [step["name"] for step in torchweft.explain(model, *given).data[0]["forward"]] == ["grouped_mlp"]
    for op in layers(model):
        for w in weights_of(op) if op.accumulate_into_main_grad else ():
            w.main_grad = torch.full_like(w, FILL)
    backward(model, given)
    for op in reversed(layers(model)):
        assert op.pending_backward_dw == op.delay_wgrad_compute
        op.backward_dw()
    exact = iter(gradients(model, given))
    for op in layers(model):
        for w in weights_of(op):
            accumulates = op.accumulate_into_main_grad
            assert_close(w.main_grad if accumulates else w.grad, next(exact) + FILL * accumulates, torch.float32)
            assert (w.grad is None) == accumulates


@each_kind
@each_weight
def test_option_set_later_applies_to_next_backward(kind, single):
    model = build(kind, single)
    given = inputs(model)
    backward(model, given)
    for op in layers(model):
        op.accumulate_into_main_grad = True
    for w in weights(model):
        w.grad, w.main_grad = None, torch.zeros_like(w)
    backward(model, given)
    for w, dw in zip(weights(model), gradients(model, given), strict=True):
        assert w.grad is None
        assert_close(w.main_grad, dw, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("delay", (False, True), ids=("now", "delayed"))
@each_weight
def test_gradient_of_single_group_has_weight_shape(kind, delay, single):
    model = build(kind, single, groups=1, delay_wgrad_compute=delay)
    x, scales, splits = leaf(ROWS, WIDTH), leaf(ROWS), splits_of([ROWS])
    model(*([x, splits, scales, splits, scales] if kind == "mlp" else [x, splits])).sum().backward()
    for op in layers(model) if delay else ():
        op.backward_dw()
    for weight in weights(model):
        assert weight.grad.shape == weight.shape
