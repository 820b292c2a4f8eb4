"""Weight gradients: every combination of the options, and what frameworks rely on.

A row of the table says which of these are set: accumulate_into_main_grad (A), delay_wgrad_compute (D),
grad_added_to_main_grad of the weight (F), overwrite_main_grad (O).
"""

import copy
import gc
import io
import threading
from typing import NamedTuple

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torchweft
from torchweft import ops

WIDTH, TOKENS, FILL = 24, 19, 0.5  # tokens: enough for every rule


class Row(NamedTuple):
    number: int
    accumulate: bool
    delay: bool
    flag: bool
    overwrite: bool


ROWS = [Row(1, False, False, False, False), Row(2, False, True, False, False)] + [
    Row(3 + 4 * delay + 2 * flag + overwrite, True, bool(delay), bool(flag), bool(overwrite))
    for delay in (0, 1)
    for flag in (0, 1)
    for overwrite in (0, 1)
]
INTO_MAIN_GRAD = [row for row in ROWS if row.accumulate]
PIPELINES = ("linear", "linear_add", "linear_scale", "block")
DTYPES = ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16))

each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: f"row{row.number}")
each_main_grad_row = pytest.mark.parametrize("row", INTO_MAIN_GRAD, ids=lambda row: f"row{row.number}")
each_pipeline = pytest.mark.parametrize("pipeline", PIPELINES)
each_dtypes = pytest.mark.parametrize("dtypes", DTYPES, ids=lambda pair: f"{pair[0]}-{pair[1]}".replace("torch.", ""))


def build(pipeline: str, dtype: torch.dtype, width: int = WIDTH, **options) -> torch.nn.Module:
    def linear(bias=False):
        return ops.Linear(width, width, bias=bias, dtype=dtype, **options)

    if pipeline == "linear":
        return linear(bias=True)
    if pipeline == "linear_add":
        return ops.Sequential(ops.MakeExtraOutput(in_place=True), linear())
    if pipeline == "linear_scale":
        return ops.Sequential(linear(), ops.ConstantScale(0.75))
    return ops.Sequential(
        ops.MakeExtraOutput(in_place=True).set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(width, dtype=dtype),
        linear(bias=True),
        ops.GELU(),
        linear(),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


def linears(module: torch.nn.Module) -> list[ops.Linear]:
    return [m for m in module.modules() if isinstance(m, ops.Linear)]


def weights(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [linear.weight for linear in linears(module)]


def prepare(weight, row: Row, dtype=torch.float32, zero_out=False) -> None:
    """Sets up the weights as a framework does before a backward."""
    weight.main_grad = torch.full(weight.shape, float("nan") if row.overwrite else FILL, dtype=dtype)
    if row.overwrite:
        weight.overwrite_main_grad = True
    if zero_out:
        weight.zero_out_wgrad = True
    if row.flag:
        weight.grad_added_to_main_grad = False


def model_and_twin(row: Row, pipeline: str, dtypes=DTYPES[1], width: int = WIDTH, **notes):
    """Returns a prepared model for the row, and its twin without options."""
    twin = build(pipeline, dtypes[0], width)
    model = build(pipeline, dtypes[0], width, accumulate_into_main_grad=row.accumulate, delay_wgrad_compute=row.delay)
    model.load_state_dict(twin.state_dict())
    if row.accumulate:
        for weight in weights(model):
            prepare(weight, row, dtypes[1], **notes)
    return model, twin


def rows(dtype=torch.float32, width: int = WIDTH, tokens: int = TOKENS):
    return torch.randn(tokens, width).to(dtype).requires_grad_()


def loss_of(model, x):
    outputs = model(x)
    y, *extras = outputs if isinstance(outputs, tuple) else (outputs,)
    return y.float().square().sum() + sum(extra.float().sum() for extra in extras)


def step(model, *inputs):
    """Runs backward, and backward_dw if needed, for each input."""
    for x in inputs:
        loss_of(model, x).backward()
        for linear in reversed(linears(model)):
            if linear.need_backward_dw():
                linear.backward_dw()


def gradients(twin, *inputs) -> list[torch.Tensor]:
    step(twin, *inputs)
    return [weight.grad.double() for weight in weights(twin)]


def assert_near(actual, expected, dtype) -> None:
    bound = 0.03 if torch.bfloat16 in (dtype, actual.dtype) else 2e-5
    error = (actual.double() - expected).abs().max()
    assert error <= bound * expected.abs().max(), f"off by {error}, largest value {expected.abs().max()}"


def share_memory(a, b) -> bool:
    return a is not None and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


# ---- rows of the table ----------------------------------------------------------------------------------------------


@each_row
@each_pipeline
@each_dtypes
def test_every_row_of_wgrad_contract(row, pipeline, dtypes):
    model, twin = model_and_twin(row, pipeline, dtypes)
    x = rows(dtypes[0])
    expected = gradients(twin, x)
    before = [weight.main_grad.clone() if row.accumulate else None for weight in weights(model)]
    attributes = [set(weight.__dict__) for weight in weights(model)]
    seen = []
    for linear in linears(model):
        linear.register_wgrad_accumulation_and_reduce_hooks(lambda w=linear.weight: seen.append(w.grad))

    loss_of(model, x).backward()
    for linear, start, names in zip(linears(model), before, attributes, strict=True):
        weight = linear.weight
        assert linear.need_backward_dw() == row.delay and linear.pending_backward_dw == row.delay
        assert (weight.grad is not None) == (row.flag if row.accumulate else not row.delay)
        assert set(weight.__dict__) == names
        assert getattr(weight, "grad_added_to_main_grad", True)
        if row.delay and row.accumulate:
            assert torch.equal(weight.main_grad.nan_to_num(1.0), start.nan_to_num(1.0))
        if row.accumulate:
            assert not share_memory(weight.grad, weight.main_grad)

    for linear in reversed(linears(model)):
        linear.backward_dw()
        assert linear.pending_backward_dw == 0
        linear.backward_dw()  # nothing is pending: no effect
    assert len(seen) == (len(expected) if row.delay else 0)
    assert all((grad is not None) == (row.flag or not row.accumulate) for grad in seen)
    for weight, dw in zip(weights(model), expected, strict=True):
        grad_target = weight.main_grad if row.accumulate else weight.grad
        assert_near(grad_target, dw + FILL if row.accumulate and not row.overwrite else dw, dtypes[0])
        assert not row.accumulate or not share_memory(weight.grad, weight.main_grad)
    torch.testing.assert_close(
        [p.grad for n, p in model.named_parameters() if "bias" in n],
        [p.grad for n, p in twin.named_parameters() if "bias" in n],
    )


@each_pipeline
@pytest.mark.parametrize("delay", (False, True), ids=("now", "delayed"))
@pytest.mark.parametrize("there", (False, True), ids=("no_main_grad", "main_grad"))
def test_frozen_weight_needs_no_main_grad(pipeline, delay, there):
    model = build(pipeline, torch.float32, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    twin = build(pipeline, torch.float32)
    twin.load_state_dict(model.state_dict())
    for weight, other in zip(weights(model), weights(twin), strict=True):
        weight.requires_grad_(False)
        other.requires_grad_(False)
        if there:
            weight.main_grad, weight.grad_added_to_main_grad = torch.full_like(weight, FILL), False
    hooks, x, saved = [], rows(), []
    other = x.detach().clone().requires_grad_()
    for linear in linears(model):
        linear.register_wgrad_accumulation_and_reduce_hooks(lambda: hooks.append(1))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        loss = loss_of(model, x)
    loss.backward()
    loss_of(twin, other).backward()
    torch.testing.assert_close(x.grad, other.grad)
    assert pipeline in ("block",) or x.data_ptr() not in saved
    for linear in linears(model):
        assert linear.pending_backward_dw == 0
        linear.backward_dw()
        assert linear.weight.grad is None
        if there:
            assert torch.equal(linear.weight.main_grad, torch.full_like(linear.weight, FILL))
            assert linear.weight.grad_added_to_main_grad is False
    assert not hooks


def test_main_grad_is_ignored_without_options():
    model, twin = model_and_twin(ROWS[0], "linear")
    prepare(model.weight, Row(5, True, False, True, False))
    x = rows()
    gradients(twin, x)
    step(model, x)
    assert torch.equal(model.weight.main_grad, torch.full_like(model.weight, FILL))
    assert model.weight.grad_added_to_main_grad is False and torch.equal(model.weight.grad, twin.weight.grad)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("delay", (False, True), ids=("now", "delayed"))
def test_overwrite_equals_autograd_bitwise(dtype, delay):
    model, twin = model_and_twin(Row(6, True, delay, True, True), "linear", (dtype, dtype))
    x = rows(dtype)
    gradients(twin, x)
    step(model, x)
    assert torch.equal(model.weight.main_grad, twin.weight.grad)


@pytest.mark.parametrize("tokens", (1, 300, 1000))
def test_float32_main_grad_gets_unrounded_gemm(tokens):
    model, _ = model_and_twin(INTO_MAIN_GRAD[0], "linear", DTYPES[0])
    x, dy = rows(torch.bfloat16, tokens=tokens), rows(torch.bfloat16, tokens=tokens).detach()
    model(x).backward(dy)
    exact = FILL + dy.double().t() @ x.detach().double()
    assert (model.weight.main_grad.double() - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_zero_rows_keep_or_zero_main_grad():
    for row in (r for r in INTO_MAIN_GRAD if not r.delay):
        for dtypes in DTYPES:
            model, _ = model_and_twin(row, "linear", dtypes)
            step(model, rows(dtypes[0], tokens=0))
            expected = torch.full_like(model.weight.main_grad, 0 if row.overwrite else FILL)
            assert torch.equal(model.weight.main_grad, expected)


# ---- dummies --------------------------------------------------------------------------------------------------------


def test_equal_weights_share_one_dummy_of_same_layout():
    grads = []
    for zero_out in (False, True):
        model, _ = model_and_twin(INTO_MAIN_GRAD[2], "block", zero_out=zero_out)
        step(model, rows())
        grads += [weight.grad for weight in weights(model)]
    assert len({grad.data_ptr() for grad in grads}) == 1
    grads[0].fill_(3)
    step(model, rows())  # zero_out_wgrad: zeroed at every request, then autograd adds it to the existing .grad
    assert not grads[-1].any()
    transposed = ops.BasicLinear(4, 3, accumulate_into_main_grad=True)
    transposed.weight = torch.nn.Parameter(torch.randn(4, 3).t())
    prepare(transposed.weight, INTO_MAIN_GRAD[2])
    transposed(rows(width=4)).sum().backward()
    assert transposed.weight.grad.stride() == transposed.weight.stride()


@pytest.mark.parametrize("delay", (False, True), ids=("now", "delayed"))
def test_weight_shared_with_plain_op_gets_both_gradients(delay):
    model, _ = model_and_twin(Row(5, True, delay, True, False), "linear", zero_out=True)
    x, plain = rows(), model.weight.detach().clone().requires_grad_()
    loss = model(x).square().sum() + (x @ model.weight).sum()
    loss.backward()
    ((x @ plain.t() + model.bias).square().sum() + (x @ plain).sum()).backward()
    model.backward_dw()
    model.weight.main_grad.add_(model.weight.grad)  # the framework's hook: zero_out_wgrad is set
    assert_near(model.weight.main_grad, plain.grad.double() + FILL, torch.float32)


# ---- no pass over weight-sized memory -------------------------------------------------------------------------------

PASSES = {"aten::" + name for name in ("add_", "add", "copy_", "clone", "_to_copy", "zero_", "fill_")}


def ops_touching_weight_memory(weight, work) -> list[str]:
    """Returns the names of the ATen operations on tensors of the weight's size."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        work()
    found = []
    for event in profile.events():
        sizes = [shape for shape in event.input_shapes if shape]
        if event.name in PASSES and any(torch.Size(s).numel() == weight.numel() for s in sizes):
            found.append(event.name.removeprefix("aten::"))
    return found


@each_main_grad_row
@each_pipeline
@each_dtypes
def test_only_gemm_touches_weight_sized_memory(row, pipeline, dtypes):
    model, _ = model_and_twin(row, pipeline, dtypes)
    x = rows(dtypes[0])
    step(model, x)  # dummies exist
    versions = []
    for weight in weights(model):
        weight.grad = None
        versions.append(weight.main_grad._version)
    loss = loss_of(model, x)

    def work():
        loss.backward()
        for linear in linears(model):
            linear.backward_dw()

    assert ops_touching_weight_memory(weights(model)[0], work) == []
    assert [w.main_grad._version for w in weights(model)] == [v + 1 for v in versions]


@each_main_grad_row
def test_uncleared_grad_only_adds_dummies(row):
    model, _ = model_and_twin(row, "linear")
    step(model, rows())  # dummies exist: creating one zeroes weight-sized memory
    start = torch.full_like(model.weight, 2)
    model.weight.grad = start.clone()
    loss = loss_of(model, rows())
    found = ops_touching_weight_memory(model.weight, loss.backward)
    assert found == (["add_"] if row.flag else [])
    assert row.flag or torch.equal(model.weight.grad, start)


def test_zeroed_dummy_costs_one_fill():
    model, _ = model_and_twin(INTO_MAIN_GRAD[2], "linear", zero_out=True)
    step(model, rows())
    model.weight.grad = None
    assert set(ops_touching_weight_memory(model.weight, loss_of(model, rows()).backward)) == {"fill_"}


def peak_bytes(work) -> int:
    """Returns the peak number of allocated bytes above those at the start."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, record_shapes=True
    ) as profile:
        work()
    found = []

    def visit(event):
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
        for child in event.children:
            visit(child)

    for event in profile.profiler.kineto_results.experimental_event_tree():
        visit(event)
    held = peak = 0
    for _, size in sorted(found, key=lambda pair: pair[0]):
        held += size
        peak = max(peak, held)
    assert found
    return peak


@pytest.mark.parametrize("row", (ROWS[0], *INTO_MAIN_GRAD), ids=lambda row: f"row{row.number}")
@pytest.mark.parametrize(
    "pipeline, dtype",
    [("linear", torch.bfloat16), ("linear_scale", torch.bfloat16)]
    + [(pipeline, torch.float32) for pipeline in ("linear", "linear_add", "linear_scale")],
)
def test_backward_allocates_no_weight_sized_memory(row, pipeline, dtype):
    width, tokens = 512, 16
    model, _ = model_and_twin(row, pipeline, (dtype, torch.float32), width)
    x = rows(dtype, width, tokens)
    x.requires_grad_(dtype == torch.float32)  # in bfloat16 the input-gradient GEMM packs the weight
    step(model, x)
    x.grad = None
    for p in model.parameters():
        p.grad = None
    loss = loss_of(model, x)

    def work():
        loss.backward()
        for linear in linears(model):
            linear.backward_dw()

    weight_bytes = width * width * dtype.itemsize
    assert (peak_bytes(work) < 0.5 * weight_bytes) == row.accumulate


# ---- micro-batches --------------------------------------------------------------------------------------------------


@each_row
@each_pipeline
@pytest.mark.parametrize("tokens", (3, TOKENS))
def test_micro_batches_accumulate_without_clearing_grad(row, pipeline, tokens):
    model, twin = model_and_twin(row, pipeline)
    inputs = [rows(tokens=tokens) for _ in range(3)]
    step(model, *inputs)
    expected = gradients(twin, *(inputs[-1:] if row.overwrite else inputs))
    for weight, dw in zip(weights(model), expected, strict=True):
        grad_target = weight.main_grad if row.accumulate else weight.grad
        assert_near(grad_target, dw + FILL if row.accumulate and not row.overwrite else dw, torch.float32)


def test_dummy_grad_is_not_counted_twice():
    model, twin = model_and_twin(INTO_MAIN_GRAD[2], "linear")
    x = rows()
    model.weight.main_grad.zero_()
    step(model, x, x)
    (dw,) = gradients(twin, x)
    assert torch.equal(model.weight.main_grad.double(), 2 * dw)


@pytest.mark.parametrize("order", ("ffpp", "fpfp", "ffpfpp"))
@pytest.mark.parametrize("row", (ROWS[1], INTO_MAIN_GRAD[4], INTO_MAIN_GRAD[6]), ids=lambda row: f"row{row.number}")
def test_backward_and_backward_dw_may_interleave(row, order):
    model, twin = model_and_twin(row, "linear")
    inputs = [rows() for _ in range(order.count("f"))]
    given = iter(inputs)
    for letter in order:
        if letter == "f":
            loss_of(model, next(given)).backward()
        else:
            model.backward_dw()
    (dw,) = gradients(twin, *inputs)
    assert_near(model.weight.main_grad if row.accumulate else model.weight.grad, dw + FILL * row.accumulate, dw.dtype)


def test_oldest_gradient_is_computed_first():
    model, twin = model_and_twin(INTO_MAIN_GRAD[5], "linear")
    first, second = rows(), rows()
    loss_of(model, first).backward()
    loss_of(model, second).backward()
    assert model.pending_backward_dw == 2
    for x in (first, second):
        model.backward_dw()
        twin.weight.grad = None
        (dw,) = gradients(twin, x)
        assert torch.equal(model.weight.main_grad.double(), dw)


def test_delayed_gradient_adds_to_existing_grad():
    model, twin = model_and_twin(ROWS[1], "linear")
    model.weight.grad = torch.full_like(model.weight, 2)
    x = rows()
    loss_of(model, x).backward()
    assert torch.equal(model.weight.grad, torch.full_like(model.weight, 2))
    model.backward_dw()
    (dw,) = gradients(twin, x)
    assert_near(model.weight.grad, dw + 2, torch.float32)


def test_delayed_gradient_ignores_later_autocast():
    model, twin = model_and_twin(ROWS[1], "linear")
    x = rows()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, x)
        other = loss_of(twin, x)
    loss.backward()
    other.backward()
    with torch.autocast("cpu", torch.bfloat16):
        model.backward_dw()
    assert model.weight.grad.dtype == torch.float32 and torch.equal(model.weight.grad, twin.weight.grad)


def test_delayed_gradient_holds_x_and_dy_until_computed():
    model = ops.Linear(WIDTH, WIDTH, delay_wgrad_compute=True)
    x = rows().detach()
    hidden = x * 2
    keep = hidden.untyped_storage()._weak_ref()
    dy = torch.randn(TOKENS, WIDTH)
    keep_dy = dy.untyped_storage()._weak_ref()
    values = x.clone()
    model(hidden).backward(dy)
    del hidden, dy
    gc.collect()
    assert not torch.UntypedStorage._expired(keep) and not torch.UntypedStorage._expired(keep_dy)
    model.backward_dw()
    assert torch.UntypedStorage._expired(keep) and torch.UntypedStorage._expired(keep_dy)
    assert torch.equal(x, values)
    for reference in (keep, keep_dy):
        torch.UntypedStorage._free_weak_ref(reference)


def test_delayed_gradient_allocates_no_weight_sized_memory():
    width = 512
    for row in (ROWS[1], *(r for r in INTO_MAIN_GRAD if r.delay)):
        model, _ = model_and_twin(row, "linear", width=width)
        step(model, rows(width=width))
        model.weight.grad = None
        loss = loss_of(model, rows(width=width))
        assert peak_bytes(loss.backward) < width * width * 2


@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize("shape", ((TOKENS, WIDTH), (2, TOKENS, WIDTH)), ids=("2-D", "3-D"))
def test_delayed_gradient_survives_other_uses_of_its_tensors(shape, in_place):
    """Other leaves get the same dy, and autograd adds to their .grad in place."""
    grads = []
    for delay in (True, False):
        torch.manual_seed(0)
        linear = ops.Linear(WIDTH, WIDTH, delay_wgrad_compute=delay)
        extra, residual = (torch.randn(shape).requires_grad_() for _ in range(2))
        model = ops.Sequential(ops.MakeExtraOutput(in_place=in_place), linear, ops.AddExtraInput(in_place=in_place))
        for _ in range(3):
            x = torch.randn(shape).requires_grad_()
            y, branch = model(x, extra)
            (y + residual + branch).backward(torch.randn(shape))
        for _ in range(3):
            linear.backward_dw()
        grads.append((linear.weight.grad, extra.grad, residual.grad))
    torch.testing.assert_close(grads[0], grads[1])


def test_changing_input_before_delayed_gradient_raises():
    model = ops.Linear(WIDTH, WIDTH, delay_wgrad_compute=True)
    x = torch.randn(2, TOKENS, WIDTH)
    model(x).sum().backward()
    x.zero_()
    with pytest.raises(RuntimeError, match="backward_dw"):
        model.backward_dw()


# ---- frameworks -----------------------------------------------------------------------------------------------------


class DataParallel:
    """Gradient buckets with overlapped reduction, as in Megatron's DDP."""

    def __init__(self, model, dtype):
        self.ready, self.last, self.hooks = [], False, []
        for name, p in model.named_parameters():
            p.grad_added_to_main_grad = False
            p.main_grad = torch.zeros(p.shape, dtype=dtype)
            owner = [m for m in linears(model) if m.weight is p and getattr(p, "skip_backward_post_hook", False)]
            hook = self.hook(name, p)
            if owner:
                owner[0].register_wgrad_accumulation_and_reduce_hooks(hook)
            else:
                accumulator = p.expand_as(p).grad_fn.next_functions[0][0]
                accumulator.register_hook(lambda *unused, hook=hook: hook())
                self.hooks.append(accumulator)

    def hook(self, name, p):
        def run():
            assert p.grad is not None, name
            if not p.grad_added_to_main_grad or getattr(p, "zero_out_wgrad", False):
                p.main_grad.add_(p.grad)
            p.grad = None
            if self.last:
                self.ready.append(name)

        return run


@each_pipeline
@each_dtypes
@pytest.mark.parametrize("delay", (False, True), ids=("now", "delayed"))
def test_data_parallel_buckets_get_every_micro_batch_once(pipeline, dtypes, delay):
    model, twin = model_and_twin(Row(0, True, delay, True, False), pipeline, dtypes)
    parallel = DataParallel(model, dtypes[1])
    inputs = [rows(dtypes[0]) for _ in range(3)]
    for x in inputs:
        parallel.last = x is inputs[-1]
        step(model, x)
    expected = dict(twin.named_parameters())
    gradients(twin, *inputs)
    for name, p in model.named_parameters():
        assert_near(p.main_grad, expected[name].grad.double(), dtypes[0])
        assert p.grad is None
    assert sorted(parallel.ready) == sorted(expected)


@each_pipeline
@pytest.mark.parametrize("sharded", (True, False), ids=("sharded", "unsharded"))
@pytest.mark.parametrize("delay", (False, True), ids=("now", "delayed"))
def test_sharded_data_parallel_fetches_bucket_when_gradient_is_computed(pipeline, sharded, delay):
    model, twin = model_and_twin(Row(0, True, delay, True, False), pipeline)
    reduced, fetched, forward = {}, [], [True]

    def prepare_unit():
        for weight in weights(model):
            del weight.main_grad
            weight.grad_added_to_main_grad, weight.__fsdp_param__ = False, True
            weight.overwrite_main_grad = sharded
            weight.get_main_grad = fetch(weight)

    def fetch(weight):
        def get():
            assert not forward[0]
            fetched.append(weight)
            return torch.full_like(weight, float("nan") if sharded else 0)

        return get

    def hook(weight):
        assert weight.grad_added_to_main_grad and weight.grad is not None
        weight.grad, weight.grad_added_to_main_grad = None, False
        reduced[weight] = reduced.get(weight, 0) + weight.main_grad.double()

    for linear in linears(model):
        if delay:
            linear.register_wgrad_accumulation_and_reduce_hooks(lambda w=linear.weight: hook(w))
        else:
            linear.weight.register_post_accumulate_grad_hook(hook)
    inputs = [rows(), rows()]
    for x in inputs:
        prepare_unit()
        forward[0] = True
        loss = loss_of(model, x)
        forward[0], before = False, len(fetched)
        loss.backward()
        assert len(fetched) == before + (0 if delay else len(weights(model)))
        for weight in weights(model):
            weight.grad_added_to_main_grad = weight.grad_added_to_main_grad and not delay  # un-sharded again
        for linear in reversed(linears(model)):
            linear.backward_dw()
    expected = gradients(twin, *inputs)
    assert len(fetched) == 2 * len(expected)
    for weight, dw in zip(weights(model), expected, strict=True):
        assert_near(reduced[weight], dw, torch.float32)


@pytest.mark.parametrize("flag", (False, True), ids=("no_flag", "flag"))
def test_accumulator_hook_fires_once_and_gets_grad_only_with_flag(flag):
    model, _ = model_and_twin(Row(0, True, False, flag, False), "linear")
    seen = []
    accumulator = model.weight.expand_as(model.weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda outputs, inputs: seen.append(inputs[0] is not None))
    step(model, rows())
    assert seen == [flag]


def test_invalid_main_grad_raises_without_side_effects():
    model, _ = model_and_twin(INTO_MAIN_GRAD[2], "linear")
    flat = torch.full((WIDTH, 2 * WIDTH), FILL)
    bad = (flat[:, :WIDTH].t(), flat[:, ::2], flat, flat[:WIDTH, :WIDTH].int(), torch.full((WIDTH,), FILL), None)
    for main_grad in bad:
        model.weight.main_grad = main_grad
        with pytest.raises(RuntimeError, match="Linear: .*main_grad"):
            step(model, rows())
        assert model.weight.grad_added_to_main_grad is False
        assert main_grad is None or (main_grad == main_grad.new_full((), FILL)).all()
    model.weight.main_grad = flat[:, ::2]
    with pytest.raises(RuntimeError, match=rf"shape \[{WIDTH}, {WIDTH}\] and strides \[{2 * WIDTH}, 2\]"):
        step(model, rows())
    del model.weight.main_grad
    with pytest.raises(RuntimeError, match="no main_grad"):
        step(model, rows())
    model.weight.main_grad = [1]
    with pytest.raises(TypeError, match="main_grad is a list"):
        step(model, rows())


def test_delayed_gradient_checks_main_grad_in_backward():
    model, _ = model_and_twin(INTO_MAIN_GRAD[6], "linear")
    del model.weight.main_grad
    with pytest.raises(RuntimeError, match="no main_grad"):
        loss_of(model, rows()).backward()
    assert model.pending_backward_dw == 0 and model.weight.grad_added_to_main_grad is False
    model.weight.__fsdp_param__, model.weight.get_main_grad = True, lambda: torch.zeros(WIDTH, WIDTH)
    step(model, rows())
    assert model.weight.main_grad.any()


def test_framework_error_keeps_type():
    model, _ = model_and_twin(INTO_MAIN_GRAD[2], "linear")

    def get():
        raise KeyError("bucket 3")

    model.weight.__fsdp_param__, model.weight.get_main_grad = True, get
    with pytest.raises(KeyError, match="bucket 3"):
        step(model, rows())


def test_flat_main_grad_works():
    model, twin = model_and_twin(INTO_MAIN_GRAD[0], "linear")
    model.weight.main_grad = torch.zeros(WIDTH * WIDTH)
    x = rows()
    step(model, x)
    (dw,) = gradients(twin, x)
    assert_near(model.weight.main_grad.view(WIDTH, WIDTH), dw, torch.float32)


# ---- other ways through autograd ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", (False, True))
@each_main_grad_row
def test_checkpointing_computes_gradient_once(row, reentrant):
    model, twin = model_and_twin(row, "block")
    x = rows()
    y = checkpoint(model, x, use_reentrant=reentrant)
    y.square().sum().backward()
    for linear in reversed(linears(model)):
        linear.backward_dw()
    for weight, dw in zip(weights(model), gradients(twin, x), strict=True):
        assert_near(weight.main_grad, dw if row.overwrite else dw + FILL, torch.float32)


def test_copied_saved_tensors_keep_parameter_identity():
    model, twin = model_and_twin(INTO_MAIN_GRAD[2], "block")
    x = rows()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = loss_of(model, x)
    loss.backward()
    for weight, dw in zip(weights(model), gradients(twin, x), strict=True):
        assert_near(weight.main_grad, dw + FILL, torch.float32)


@each_main_grad_row
@pytest.mark.parametrize("how", ("one_pipeline", "two_calls"))
def test_weight_used_twice_gets_both_gradients(row, how):
    model, twin = model_and_twin(row, "linear")
    if how == "one_pipeline":
        calls = [ops.Sequential(module, ops.GELU(), module) for module in (model, twin)]
    else:
        calls = [lambda x, m=m: m(torch.nn.functional.gelu(m(x), approximate="tanh")) for m in (model, twin)]
    x = rows()
    for call in calls:
        call(x).square().sum().backward()
    assert model.pending_backward_dw == row.delay
    model.backward_dw()
    assert_near(model.weight.main_grad, twin.weight.grad.double() + (0 if row.overwrite else FILL), torch.float32)


@each_row
def test_retained_graph_runs_twice(row):
    model, twin = model_and_twin(row, "block")
    x = rows()
    for module in (model, twin):
        loss = loss_of(module, x)
        loss.backward(retain_graph=True)
        for linear in reversed(linears(module)):
            linear.backward_dw()
        if row.overwrite and module is twin:
            module.zero_grad()
        loss.backward()
        for linear in reversed(linears(module)):
            linear.backward_dw()
    for weight, other in zip(weights(model), weights(twin), strict=True):
        grad_target = weight.main_grad if row.accumulate else weight.grad
        init = FILL if row.accumulate and not row.overwrite else 0
        assert_near(grad_target, other.grad.double() + init, torch.float32)


@each_main_grad_row
def test_requesting_only_dx_leaves_main_grad(row):
    model, _ = model_and_twin(row, "block")
    x = rows()
    start = [weight.main_grad.clone() for weight in weights(model)]
    torch.autograd.grad(loss_of(model, x), x)
    for weight, before in zip(weights(model), start, strict=True):
        assert torch.equal(weight.main_grad.nan_to_num(1.0), before.nan_to_num(1.0))
        assert not getattr(weight, "grad_added_to_main_grad", False)
    assert all(linear.pending_backward_dw == 0 for linear in linears(model))


def test_computed_weight_raises_with_advice():
    for options in ({"accumulate_into_main_grad": True}, {"delay_wgrad_compute": True}):
        model = ops.BasicLinear(WIDTH, WIDTH, **options)
        torch.nn.utils.parametrizations.weight_norm(model)
        with pytest.raises(RuntimeError, match="computed from other tensors"):
            model(rows()).sum().backward()


def test_concurrent_backwards_lose_no_gradient():
    model, _ = model_and_twin(INTO_MAIN_GRAD[2], "linear")
    x = torch.ones(1, WIDTH)

    def work():
        for _ in range(50):
            model(x).sum().backward()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(model.weight.main_grad, torch.full_like(model.weight, FILL + 100))


@pytest.mark.parametrize(
    "row, pipeline",
    [(ROWS[1], "linear"), (INTO_MAIN_GRAD[2], "linear_add"), (INTO_MAIN_GRAD[6], "block")],
    ids=("row2", "row5", "row9"),
)
def test_compiled_model_loses_no_gradient(row, pipeline):
    torch._dynamo.reset()
    model, twin = model_and_twin(row, pipeline)
    compiled = torch.compile(model, backend="aot_eager")
    x = rows()
    outputs = compiled(x)
    y, *extras = outputs if isinstance(outputs, tuple) else (outputs,)
    (y.square().sum() + sum(extra.sum() for extra in extras)).backward()
    for linear in reversed(linears(model)):
        linear.backward_dw()
    for weight, dw in zip(weights(model), gradients(twin, x), strict=True):
        grad_target = weight.main_grad if row.accumulate else weight.grad
        assert_near(grad_target, dw + FILL * row.accumulate, torch.float32)


def test_model_without_grad_compiles_fullgraph_and_exports():
    torch._dynamo.reset()
    model, twin = model_and_twin(INTO_MAIN_GRAD[2], "block")
    x = rows().detach()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), twin(x))
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), twin(x))


def test_dispatcher_op_rejects_delayed_gradients():
    model, x = ops.Linear(8, 8, delay_wgrad_compute=True), torch.randn(4, 8, requires_grad=True)
    text = model._traced_segments()[0][0]
    word = "cpu:float32:gc"
    call = f'{text} @call(autocast=none, eval=0, tensors="{word} {word} {word}")'
    outputs = torch.ops.weft.pipeline_forward([x, model.weight, model.bias], call)
    with pytest.raises(NotImplementedError, match="Run the module eagerly"):
        outputs[0].sum().backward()


# ---- modules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", (ops.Linear, ops.BasicLinear))
def test_delayed_weight_is_always_marked(make):
    def marked(module):
        return getattr(module.weight, "skip_backward_post_hook", None)

    module = make(4, 3, delay_wgrad_compute=True)
    assert marked(module) is True and marked(make(4, 3)) is None
    if make is ops.Linear:
        assert not hasattr(module.bias, "skip_backward_post_hook")
    assert marked(copy.deepcopy(module))
    module.weight = torch.nn.Parameter(torch.randn(3, 4))
    assert marked(module)
    module.reset_parameters()
    assert marked(module)
    assert marked(make(4, 3, device="meta", delay_wgrad_compute=True).to_empty(device="cpu"))
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert marked(loaded) and loaded.need_backward_dw()
    module.delay_wgrad_compute = False
    assert marked(module) is False and not module.need_backward_dw()
    module.delay_wgrad_compute = True
    assert marked(module)


@pytest.mark.parametrize("make", (ops.Linear, ops.BasicLinear))
def test_options_can_be_set_later(make):
    module = make(4, 3)
    x = torch.ones(2, 4)
    module(x).sum().backward()
    module.weight.grad = None
    module.accumulate_into_main_grad = True
    module.weight.main_grad = torch.zeros(3, 4)
    module(x).sum().backward()
    assert module.weight.grad is None and torch.equal(module.weight.main_grad, torch.full((3, 4), 2.0))
    module.delay_wgrad_compute = True
    module(x).sum().backward()
    assert module.pending_backward_dw == 1
    module.backward_dw()
    assert torch.equal(module.weight.main_grad, torch.full((3, 4), 4.0))


def test_copy_has_no_hooks_and_no_delayed_gradients():
    module = ops.Linear(4, 3, delay_wgrad_compute=True)
    ran = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: ran.append(1))
    module(torch.ones(2, 4)).sum().backward()
    other = copy.deepcopy(module)
    assert other.pending_backward_dw == 0
    other(torch.ones(2, 4)).sum().backward()
    other.backward_dw()
    assert not ran
    module.backward_dw()
    assert ran == [1]


def test_hooks_run_in_registration_order():
    module = ops.Linear(4, 3, delay_wgrad_compute=True)
    ran = []
    for name in "abc":
        module.register_wgrad_accumulation_and_reduce_hooks(lambda name=name: ran.append(name))
    module(torch.ones(2, 4)).sum().backward()
    module.backward_dw()
    assert ran == list("abc")


def test_unsupported_delay_is_rejected():
    with pytest.raises(NotImplementedError, match="userbuffers_options"):
        ops.BasicLinear(4, 3, delay_wgrad_compute=True, userbuffers_options={"comm_name": "qkv"})


def test_explain_names_options():
    module = ops.Linear(4, 3, accumulate_into_main_grad=True, delay_wgrad_compute=True)
    text = torchweft.explain(module, torch.ones(2, 4)).text
    assert "accumulate_into_main_grad=true" in text and "delay_wgrad_compute=true" in text


def test_rejected_option_leaves_linear_usable():
    linear = ops.Linear(8, 8, userbuffers_options={"comm_name": "fc1"})
    with pytest.raises(NotImplementedError, match="delay_wgrad_compute"):
        linear.delay_wgrad_compute = True
    assert not linear.delay_wgrad_compute
    assert linear(torch.ones(2, 8)).shape == (2, 8)
