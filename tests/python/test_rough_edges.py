"""Cases that Transformer Engine's operations, fuser or Sequential get wrong or leave open: one test for the correct
behaviour of each.

In-place branches, replaced and meta Parameters, dtypes under autocast, pruned gradients, extra tensors and channels,
state dicts, dropout, scales, `main_grad`, and options that weft rejects. Quantization and CUDA graphs do not apply.
"""

from __future__ import annotations

import copy
import io
import math

import plain
import pytest
import torch
import torch.nn.functional as F

import torchweft
from torchweft import ops

WIDTH = 8
F64 = {"dtype": torch.float64}
both = pytest.mark.parametrize("in_place", (True, False), ids=("in_place", "out_of_place"))


def rows(*shape: int, requires_grad: bool = True, dtype=torch.float64) -> torch.Tensor:
    return (torch.rand(shape or (5, WIDTH), dtype=dtype) * 2 - 1).requires_grad_(requires_grad)


def fork(channel: str, in_place: bool = True, to_caller: bool = False):
    return ops.MakeExtraOutput(in_place=in_place).set_extra_output_channel(0, channel, output_to_caller=to_caller)


def join(channel: str, in_place: bool = True):
    return ops.AddExtraInput(in_place=in_place).set_extra_input_channel(0, channel)


def clones(tensors):
    return [t.detach().clone() for t in tensors]


def check(y: torch.Tensor, expected: torch.Tensor, grad_inputs, unchanged=()) -> None:
    """Checks values and gradients of `grad_inputs`, and that `unchanged` and the incoming gradient are not written."""
    torch.testing.assert_close(y, expected)
    dy = rows(*y.shape, requires_grad=False)
    held = clones([dy, *grad_inputs, *unchanged])
    grads = torch.autograd.grad(y, grad_inputs, dy, retain_graph=True)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, grad_inputs, dy))
    for before, after in zip(held, [dy, *grad_inputs, *unchanged], strict=True):
        assert torch.equal(before, after)
    torch.testing.assert_close(grads, torch.autograd.grad(y, grad_inputs, dy))  # saved tensors are unchanged, too


def count_calls(run, *names: str) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum(event.count for event in profile.key_averages() if event.key in names)


# ---- in-place branches and weight gradients -------------------------------------------------------------------------


@both
def test_in_place_branch_keeps_weight_gradient(in_place):
    linear, x = ops.Linear(WIDTH, WIDTH, **F64), rows()
    seq = torchweft.Sequential(fork("residual"), linear, join("residual", in_place))
    held = x.detach().clone()
    y = seq(x)
    check(y, F.linear(x, linear.weight, linear.bias) + x, [x, linear.weight, linear.bias])
    assert torch.equal(x, held)


@both
def test_in_place_branch_keeps_weight_gradient_across_sequentials(
    in_place,
):
    linear, x = ops.Linear(WIDTH, WIDTH, **F64), rows()
    before = torchweft.Sequential(ops.MakeExtraOutput(in_place=True), linear)
    after = torchweft.Sequential(ops.AddExtraInput(in_place=in_place))
    held = x.detach().clone()
    middle, residual = before(x)
    kept = clones([middle, residual])
    y = after(middle, residual)
    assert torch.equal(x, held)
    assert all(torch.equal(a, b) for a, b in zip((middle, residual), kept, strict=True))
    check(y, F.linear(x, linear.weight, linear.bias) + x, [x, linear.weight, linear.bias], [middle, residual])


@both
def test_branch_keeps_weight_gradient_with_shared_dy(in_place):
    """Both outputs get the same gradient tensor, as from a sum outside."""
    linear, x = ops.BasicLinear(WIDTH, WIDTH, **F64), rows()
    y, residual = torchweft.Sequential(ops.MakeExtraOutput(in_place=in_place), linear)(x)
    check(y + residual, F.linear(x, linear.weight) + x, [x, linear.weight])
    y, residual = torchweft.Sequential(ops.MakeExtraOutput(in_place=in_place), linear)(x)
    dy = rows(5, WIDTH, requires_grad=False)
    held = dy.clone()
    grads = torch.autograd.grad((y, residual), (x, linear.weight), (dy, dy))
    torch.testing.assert_close(grads, torch.autograd.grad(F.linear(x, linear.weight) + x, (x, linear.weight), dy))
    assert torch.equal(dy, held)


@both
def test_in_place_channel_add_keeps_weight_gradient_and_input(in_place):
    linear, x = ops.Linear(WIDTH, WIDTH, **F64), rows()
    seq = torchweft.Sequential(fork("residual", in_place), linear, join("residual"))
    held = x.detach().clone()
    y = seq(x)
    assert torch.equal(x, held)
    check(y, F.linear(x, linear.weight, linear.bias) + x, [x, linear.weight, linear.bias])


@both
def test_in_place_channel_add_keeps_saved_input(in_place):
    """The branch is not a tensor of the caller, but the second linear saves it for its weight gradient."""
    first, second, x = ops.Linear(WIDTH, WIDTH, **F64), ops.Linear(WIDTH, WIDTH, **F64), rows()
    y = torchweft.Sequential(first, fork("residual", in_place), second, join("residual"), ops.GELU())(x)
    h = F.linear(x, first.weight, first.bias)
    expected = F.gelu(h + F.linear(h, second.weight, second.bias), approximate="tanh")
    check(y, expected, [x, *first.parameters(), *second.parameters()])


@both
def test_in_place_add_keeps_weight_gradient_and_input_across_sequentials(in_place):
    linear, x = ops.Linear(WIDTH, WIDTH, **F64), rows()
    held = x.detach().clone()
    middle, residual = torchweft.Sequential(ops.MakeExtraOutput(in_place=in_place), linear)(x)
    y = torchweft.Sequential(ops.AddExtraInput(in_place=True))(middle, residual)
    assert torch.equal(x, held)
    check(y, F.linear(x, linear.weight, linear.bias) + x, [x, linear.weight, linear.bias], [middle, residual])


def test_in_place_add_with_fan_out_gives_same_values():
    x = rows()
    y = torchweft.Sequential(fork("r"), ops.SiLU(), join("r"), ops.ConstantScale(2.0), join("r"), join("r"))(x)
    check(y, 2 * (F.silu(x) + x) + 2 * x, [x])


def test_in_place_add_keeps_viewed_extra_input():
    base, x = rows(10, WIDTH, requires_grad=False), rows()
    held = base.clone()
    torchweft.Sequential(ops.Linear(WIDTH, WIDTH, **F64), ops.AddExtraInput(in_place=True))(x, base[5:])
    ops.AddExtraInput(in_place=True)(x.detach(), base[:5])
    assert torch.equal(base, held)


# ---- Parameters and plans -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", (lambda op: op, lambda op: torchweft.Sequential(op)), ids=("alone", "Sequential"))
def test_replaced_parameter_is_used_and_gets_gradient(build):
    linear, x = ops.Linear(WIDTH, WIDTH, **F64), rows()
    module = build(linear)
    module(x)
    old, new = linear.weight, torch.nn.Parameter(rows(WIDTH, WIDTH).detach())
    linear.weight = new
    y = module(x)
    torch.testing.assert_close(y, F.linear(x, new, linear.bias))
    y.sum().backward()
    assert new.grad is not None
    assert old.grad is None


@pytest.mark.parametrize(
    "build",
    (
        lambda device: ops.Linear(WIDTH, WIDTH, device=device),
        lambda device: ops.BasicLinear(WIDTH, WIDTH, device=device),
        lambda device: ops.LayerNorm(WIDTH, device=device),
        lambda device: torchweft.Sequential(
            ops.Linear(WIDTH, WIDTH, device=device), ops.GELU(), ops.Bias(WIDTH, device=device)
        ),
        lambda device: torchweft.Sequential(
            ops.RMSNorm(WIDTH, device=device), torch.nn.Tanh(), ops.Linear(WIDTH, 2, device=device)
        ),
    ),
    ids=("Linear", "BasicLinear", "LayerNorm", "pipeline", "two pipelines"),
)
def test_meta_parameters_materialize_at_first_call(build):
    module, x = build("meta"), rows(dtype=torch.float32)
    assert all(p.is_meta for p in module.parameters())
    torch.manual_seed(4)
    y = module(x)
    assert all(p.device.type == "cpu" for p in module.parameters())
    y.sum().backward()
    assert all(p.grad is not None and p.grad.device.type == "cpu" for p in module.parameters())
    torch.manual_seed(4)
    torch.testing.assert_close(y, build("cpu")(x))


def test_meta_parameters_can_be_materialized_and_loaded():
    source, linear = ops.Linear(WIDTH, 3), ops.Linear(WIDTH, 3, device="meta")
    linear.to_empty(device="cpu").load_state_dict(source.state_dict())
    x = rows(dtype=torch.float32)
    torch.testing.assert_close(linear(x), source(x))
    assigned = ops.Linear(WIDTH, 3, device="meta")
    assigned.load_state_dict(source.state_dict(), assign=True)
    torch.testing.assert_close(assigned(x), source(x))


def test_cast_after_first_call_takes_effect():
    seq, x = torchweft.Sequential(ops.Linear(WIDTH, WIDTH), ops.LayerNorm(WIDTH)), rows(dtype=torch.float32)
    assert seq(x).dtype == torch.float32
    seq.bfloat16()
    y = seq(x)
    assert y.dtype == torch.bfloat16
    fresh = torchweft.Sequential(ops.Linear(WIDTH, WIDTH), ops.LayerNorm(WIDTH)).bfloat16()
    fresh.load_state_dict(seq.state_dict())
    assert torch.equal(fresh(x), y)
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.bfloat16 for p in seq.parameters())


@pytest.mark.parametrize(
    "weight, autocast",
    (
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ),
)
def test_compute_dtype_decides_bias_fusion(weight, autocast):
    linear, x = ops.Linear(WIDTH, WIDTH, dtype=weight), rows(dtype=torch.float32)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        y = linear(x)
        plan = linear._runner.plan(x)
    assert y.dtype == (autocast or weight)
    assert plan.forward_rules == ["linear_bias"]


def test_no_input_gradient_below_last_required_one():
    seq = torchweft.Sequential(
        ops.Linear(WIDTH, WIDTH, **F64),
        ops.GELU(),
        ops.Linear(WIDTH, WIDTH, **F64),
        ops.SiLU(),
        ops.Linear(WIDTH, 2, **F64),
    )  # float64: plain ATen calls

    def products(x):
        y = seq(x)
        return count_calls(lambda: y.sum().backward(), "aten::mm", "aten::addmm")

    x = rows()
    assert products(x) == 6
    assert products(x.detach()) == 5  # the first linear needs no dx
    seq[0].requires_grad_(False)
    assert products(x.detach()) == 3  # nothing before the second linear's weight
    seq[2].requires_grad_(False)
    assert products(x.detach()) == 1  # only the last weight
    assert products(x) == 4  # back to the first operation, with one weight


def test_frozen_parameter_gradient_is_not_computed():
    linear, norm, x = ops.Linear(WIDTH, WIDTH, **F64), ops.RMSNorm(WIDTH, **F64), rows()  # float64: plain ATen calls

    def sums(module):
        y = module(x)
        dy = torch.ones_like(y)
        return count_calls(lambda: y.backward(dy), "aten::sum", "aten::mv", "aten::mm")

    with_bias, with_gamma = sums(linear), sums(norm)
    linear.bias.requires_grad_(False)
    norm.requires_grad_(False)
    assert sums(linear) == with_bias - 1
    assert sums(norm) == with_gamma - 1
    assert linear.bias.grad is not None  # from the first call
    linear.bias.grad = None
    linear(x).sum().backward()
    assert linear.bias.grad is None


def test_subclass_of_op_runs_like_base():
    class Loud(ops.GELU):
        """A subclass with another name."""

    class Thrifty(ops.Linear):
        """Another one."""

    linear, x = Thrifty(WIDTH, WIDTH, **F64), rows()
    seq = torchweft.Sequential(ops.Linear(WIDTH, WIDTH, **F64), Loud(), linear, ops.ReLU())
    h = F.gelu(F.linear(x, seq[0].weight, seq[0].bias), approximate="tanh")
    check(seq(x), F.relu(F.linear(h, linear.weight, linear.bias)), [x, *seq.parameters()])


@both
@pytest.mark.parametrize(
    "middle", (ops.Identity(), ops.ConstantScale(-1.5), ops.Bias(WIDTH, dtype=torch.bfloat16)), ids=repr
)
@pytest.mark.parametrize("extra", (torch.float32, torch.bfloat16, torch.float64))
def test_extra_input_dtype_is_promoted_in_every_fusion(extra, middle, in_place):
    linear = ops.BasicLinear(WIDTH, WIDTH, dtype=torch.bfloat16)
    x, e = rows(dtype=torch.bfloat16), rows(dtype=extra)
    held = e.detach().clone()
    y = torchweft.Sequential(linear, middle, ops.AddExtraInput(in_place=in_place))(x, e)
    assert y.dtype == torch.promote_types(torch.bfloat16, extra)
    expected = plain.apply(middle, F.linear(x, linear.weight))[0] + e
    torch.testing.assert_close(y, expected, rtol=1.6e-2, atol=1e-2)
    y.sum().backward()
    assert torch.equal(e.grad, torch.ones_like(e))
    assert torch.equal(e, held)
    torch.testing.assert_close(
        linear.weight.grad, torch.autograd.grad(expected.sum(), linear.weight)[0], rtol=1.6e-2, atol=2e-2
    )


@both
def test_branch_gradient_keeps_dtype_under_autocast(in_place):
    linear, x = ops.Linear(WIDTH, WIDTH), rows(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, residual = torchweft.Sequential(ops.MakeExtraOutput(in_place=in_place), linear)(x)
    assert residual.dtype == torch.float32
    d_residual = rows(5, WIDTH, requires_grad=False, dtype=torch.float32) * 1e-3
    dx, dw = torch.autograd.grad((y, residual), (x, linear.weight), (torch.ones_like(y), d_residual))
    ones = torch.ones(5, WIDTH)
    assert dx.dtype == dw.dtype == torch.float32
    torch.testing.assert_close(dx, ones @ linear.weight + d_residual, rtol=1.6e-2, atol=2e-2)
    torch.testing.assert_close(dw, ones.t() @ x, rtol=1.6e-2, atol=2e-2)


@both
@pytest.mark.parametrize("then", (ops.RMSNorm(WIDTH, **F64), ops.Linear(WIDTH, WIDTH, **F64), ops.GELU()), ids=repr)
def test_undifferentiated_extra_output_adds_nothing(then, in_place):
    x = rows()
    y, extra = torchweft.Sequential(ops.MakeExtraOutput(in_place=in_place), then)(x)
    assert torch.equal(extra, x)
    check(y, plain.apply(then, x)[0], [x, *then.parameters()])


@both
def test_undifferentiated_main_output_adds_nothing(in_place):
    x, linear = rows(), ops.Linear(WIDTH, WIDTH, **F64)
    _, extra = torchweft.Sequential(ops.MakeExtraOutput(in_place=in_place), linear)(x)
    extra.backward(torch.full_like(extra, 2))
    assert torch.equal(x.grad, torch.full_like(x, 2))
    assert linear.weight.grad is None or not linear.weight.grad.any()


def test_second_backward_needs_retained_graph():
    seq, x = torchweft.Sequential(ops.Linear(WIDTH, WIDTH, **F64), ops.GELU(), ops.Linear(WIDTH, 2, **F64)), rows()
    y = seq(x).sum()
    first = torch.autograd.grad(y, [x, *seq.parameters()], retain_graph=True)
    second = torch.autograd.grad(y, [x, *seq.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_call_sets_no_attributes_on_tensors():
    seq, x, e = torchweft.Sequential(ops.Linear(WIDTH, WIDTH, **F64), ops.AddExtraInput(in_place=True)), rows(), rows()
    y = seq(x, e)
    y.sum().backward()
    for t in (x, e, y, *seq.parameters()):
        assert t.__dict__ == {}


def test_operation_called_alone_plans_once():
    linear, x = ops.Linear(WIDTH, WIDTH, **F64), rows()
    linear(x)
    runner = linear._runner
    for rows_given in range(1, 20):
        linear(rows(rows_given, WIDTH))
    assert linear._runner is runner
    assert runner.plans_made == 1


def test_fusion_function_takes_effect_and_can_be_removed():
    seen = []

    def watch(ops_, *, recipe):
        seen.append(len(ops_))
        return ops_

    seq, x = torchweft.Sequential(ops.GELU(), ops.Bias(WIDTH, **F64)), rows()
    expected = seq(x)
    with ops.register_forward_fusion(watch):
        assert torch.equal(seq(x), expected)
        assert seen == [2]
    seen.clear()
    assert torch.equal(seq(x), expected)
    assert not seen


# ---- Sequential -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", (0, 2))
@pytest.mark.parametrize("split", (False, True), ids=("one pipeline", "two pipelines"))
def test_wrong_number_of_extra_inputs_is_rejected(given, split):
    middle = [torch.nn.Tanh()] if split else []
    seq = torchweft.Sequential(ops.GELU(), *middle, ops.AddExtraInput())
    with pytest.raises(ValueError, match=rf"1 extra inputs?\b.*, got {given}"):
        seq(rows(), *[rows() for _ in range(given)])


@pytest.mark.parametrize("fuse_nested", (False, True))
def test_nested_sequential_passes_extra_tensors(fuse_nested):
    x, e = rows(), rows()
    inner = torchweft.Sequential(ops.AddExtraInput(), ops.MakeExtraOutput(), ops.SiLU())
    y, extra = ops.Sequential(ops.ConstantScale(2.0), inner, ops.ConstantScale(3.0), fuse_nested=fuse_nested)(x, e)
    assert torch.equal(extra, 2 * x + e)
    check(y, 3 * F.silu(2 * x + e), [x, e])


@pytest.mark.parametrize(
    "change, expected",
    (
        (lambda seq: setattr(seq, "0", ops.ConstantScale(5.0)), 15.0),
        (lambda seq: setattr(seq, "last", ops.ConstantScale(7.0)), 42.0),
        (lambda seq: seq.add_module("1", ops.ConstantScale(4.0)), 8.0),
        (lambda seq: seq.__setitem__(slice(0, 2), [ops.ConstantScale(4.0), ops.ConstantScale(5.0)]), 20.0),
        (lambda seq: seq.__delitem__(0), 3.0),
        (lambda seq: seq._modules.update({"1": ops.Identity()}), 2.0),
    ),
    ids=("attribute", "new attribute", "add_module", "slice", "delete", "dictionary"),
)
def test_every_module_replacement_takes_effect(change, expected):
    seq, x = torchweft.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0)), torch.ones(2)
    assert torch.equal(seq(x), 6 * x)
    change(seq)
    assert torch.equal(seq(x), expected * x)


def test_hooks_of_contained_operations_fire():
    seq, x = torchweft.Sequential(ops.ConstantScale(2.0), ops.GELU(), ops.ConstantScale(3.0)), rows()
    expected, seen = seq(x), []
    seq[1].register_forward_hook(lambda module, args, output: seen.append(args[0]))
    seq[1].register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out[0]))
    y = seq(x)
    y.sum().backward()
    assert torch.equal(y, expected)
    assert torch.equal(seen[0], 2 * x)
    assert torch.equal(seen[1], torch.full_like(x, 3))


@pytest.mark.parametrize("target", (0, 1))
def test_unknown_keyword_is_rejected_for_every_component(target):
    seq = torchweft.Sequential(ops.Linear(WIDTH, WIDTH, **F64), ops.Bias(WIDTH, **F64))
    with pytest.raises(TypeError, match="unexpected keyword argument 'gain'"):
        seq(rows(), op_kwargs={target: {"gain": 2}})


def test_channels_can_be_rebound():
    source, sink, x = fork("a"), join("a"), rows()
    seq = torchweft.Sequential(source, ops.ConstantScale(2.0), sink)
    torch.testing.assert_close(seq(x), 3 * x)
    sink.set_extra_input_channel(0, None)
    with pytest.raises(ValueError, match="Channel 'a' has no reader"):
        seq(x, 5 * x)
    source.set_extra_output_channel(0, None)
    torch.testing.assert_close(seq(x, 5 * x), (7 * x, x))
    torch.testing.assert_close(source(x), (x, x))  # called separately, an operation ignores its channels
    twin = copy.deepcopy(seq)
    for each in (seq, twin):
        each[0].set_extra_output_channel(0, "b", output_to_caller=False)
        each[2].set_extra_input_channel(0, "b")
        torch.testing.assert_close(each(x), 3 * x)


def test_channel_is_read_around_plain_module():
    x = rows()
    y = torchweft.Sequential(fork("r"), ops.SiLU(), join("r"), torch.nn.Tanh(), join("r"))(x)
    check(y, torch.tanh(F.silu(x) + x) + x, [x])


@pytest.mark.parametrize("hooked", (False, True))
def test_unread_hidden_output_raises(hooked):
    x, op = rows(), fork("unread")
    if hooked:
        op.register_forward_hook(lambda *_: None)
    for module in (torchweft.Sequential(ops.SiLU(), op, ops.ConstantScale(2.0)), torchweft.Sequential(op)):
        with pytest.raises(ValueError, match="Channel 'unread' has no reader"):
            module(x)
    op.set_extra_output_channel(0, "unread")  # to the caller
    y, unread = torchweft.Sequential(ops.SiLU(), op, ops.ConstantScale(2.0))(x)
    check(y, 2 * F.silu(x), [x])
    torch.testing.assert_close(unread, F.silu(x))


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("wrap", (lambda m: m, lambda m: ops.Sequential(ops.GELU(), m)), ids=("alone", "Sequential"))
def test_linear_loads_own_state_dict_strictly(wrap, bias):
    source, target = (wrap(ops.Linear(WIDTH, 3, bias=bias)) for _ in range(2))
    target.load_state_dict(source.state_dict(), strict=True)
    x = rows(dtype=torch.float32)
    assert torch.equal(target(x), source(x))


def test_missing_weight_is_reported_not_raised():
    linear = ops.Linear(WIDTH, 3)
    state = linear.state_dict()
    del state["weight"]
    missing, unexpected = linear.load_state_dict(state, strict=False)
    assert missing == ["weight"]
    assert unexpected == []
    with pytest.raises(RuntimeError, match="Missing key.*weight"):
        linear.load_state_dict(state)


@pytest.mark.parametrize("bias", (True, False))
def test_torch_linear_state_dict_loads(bias):
    source, target = torch.nn.Linear(WIDTH, 3, bias=bias), ops.Linear(WIDTH, 3, bias=bias)
    target.load_state_dict(source.state_dict(), strict=True)
    x = rows(dtype=torch.float32)
    torch.testing.assert_close(target(x), source(x))


def test_checkpoint_holds_tensors_only():
    seq, file = torchweft.Sequential(ops.Linear(WIDTH, 3), ops.LayerNorm(3)), io.BytesIO()
    state = torchweft.checkpoint.set_te_keys(seq).state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert all(
        value.numel() == 0 and value.dtype == torch.uint8 for key, value in state.items() if "_extra_state" in key
    )
    torch.save(state, file)
    file.seek(0)
    seq.load_state_dict(torch.load(file, weights_only=True))
    stripped = {key: value for key, value in state.items() if "_extra_state" not in key}
    seq.load_state_dict(stripped, strict=True)


# ---- operations -----------------------------------------------------------------------------------------------------


def test_fresh_linear_has_bounded_weights_and_no_bias():
    linear = ops.Linear(64, 256)
    bound = 1 / math.sqrt(64)
    assert linear.weight.abs().max() <= bound
    assert linear.weight.abs().mean().item() == pytest.approx(bound / 2, rel=0.05)
    assert not linear.bias.any()


@pytest.mark.parametrize("name", ("AllReduce", "AllGather", "ReduceScatter"))
def test_single_rank_collectives_keep_input(name):
    x = rows()
    held = x.detach().clone()
    check(torchweft.Sequential(getattr(ops, name)(), ops.ConstantScale(2.0))(x), 2 * x, [x])
    assert torch.equal(x, held)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("p", (0.001, 1 / 300, 0.1, 0.7))
def test_dropout_keeps_mean_for_every_p(p, dtype):
    n = 512 * 512
    y = ops.Dropout(p)(torch.ones(512, 512, dtype=dtype))
    dropped = (y == 0).sum().item()
    assert dropped > 0
    assert abs(dropped - n * p) < 5 * math.sqrt(n * p * (1 - p))
    assert y.double().mean().item() == pytest.approx(1, abs=5 * math.sqrt(p / (1 - p) / n) + torch.finfo(dtype).eps)


@pytest.mark.parametrize("shape", ((4, 16), (7, 3)), ids=str)
def test_dropout_draws_same_mask_in_every_dtype(shape):
    masks = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(9)
        masks.append(ops.Dropout(0.5)(torch.ones(shape, dtype=dtype)) != 0)
    assert all(torch.equal(mask, masks[0]) for mask in masks)


def test_dropout_with_p_one_is_zero():
    x = rows()
    y = ops.Dropout(1.0)(x)
    assert torch.equal(y, torch.zeros_like(x))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("name", plain.SCALED)
def test_scales_keep_precision(name):
    """float32 router probabilities with bfloat16 activations: the product is rounded once, ds is float32."""
    op = getattr(ops, name)(**({"tanh_clamp_scale": 2.0} if name == "ScaledTanhSReLU" else {}))
    x, scales = rows(64, 32, dtype=torch.bfloat16), rows(64, dtype=torch.float32)
    y = op(x, scales)
    assert y.dtype == torch.bfloat16
    exact_scales = scales.detach().double().requires_grad_()
    exact, _ = plain.apply(op, x.detach().double(), exact_scales)
    torch.testing.assert_close(y.double(), exact.detach(), rtol=2**-8, atol=1e-6)  # half an ulp of bfloat16, not two
    dy = rows(*y.shape, requires_grad=False).bfloat16()
    y.backward(dy)
    exact.backward(dy.double())
    assert scales.grad.dtype == torch.float32
    torch.testing.assert_close(scales.grad.double(), exact_scales.grad, rtol=1e-5, atol=1e-5)


def test_autocast_of_tensor_device_applies():
    seq, x = ops.Sequential(ops.LayerNorm(WIDTH), ops.Linear(WIDTH, WIDTH), ops.SwiGLU()), rows(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = seq(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in seq.parameters())
    with torch.autocast("cpu", enabled=False):
        assert seq(x).dtype == torch.float32
    assert seq(x).dtype == torch.float32


def test_backward_ignores_autocast():
    seq, x = torchweft.Sequential(ops.Linear(WIDTH, WIDTH, **F64), ops.GELU()), rows()
    grad_inputs = [x, *seq.parameters()]
    expected = torch.autograd.grad(seq(x).sum(), grad_inputs)
    y = seq(x).sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grads = torch.autograd.grad(y, grad_inputs)
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("build", (lambda: ops.Bias(WIDTH), lambda: ops.Linear(WIDTH, 3), lambda: ops.LayerNorm(WIDTH)))
def test_parameters_can_be_reset_in_place(build):
    op = build()
    op(rows(dtype=torch.float32)).sum().backward()
    params = list(op.parameters())
    with torch.no_grad():
        for p in params:
            p.fill_(9)
    op.reset_parameters()
    assert all(a is b for a, b in zip(params, op.parameters(), strict=True))
    assert all(p.requires_grad and p.device.type == "cpu" and p.abs().max() <= 1 for p in params)


@pytest.mark.parametrize("name", ("Linear", "BasicLinear"))
def test_main_grad_is_required_and_accumulated(name):
    x = rows(dtype=torch.float32)
    op = getattr(ops, name)(WIDTH, 3, accumulate_into_main_grad=True)
    op.weight.main_grad = torch.full((3, WIDTH), 0.5)
    op(x).sum().backward()
    torch.testing.assert_close(op.weight.main_grad, 0.5 + torch.ones(5, 3).t() @ x.detach())
    assert op.weight.grad is None or not op.weight.grad.any()
    op.weight.main_grad = None
    with pytest.raises(RuntimeError, match="main_grad"):
        op(x).sum().backward()


@pytest.mark.parametrize("name", ("LayerNorm", "RMSNorm"))
def test_sm_margin_forms_and_no_environment_variable(name, monkeypatch):
    for stage in ("FWD", "BWD", "INF"):
        monkeypatch.setenv(f"NVTE_{stage}_LAYERNORM_SM_MARGIN", "99")
    x = rows(dtype=torch.float32)
    expected = getattr(ops, name)(WIDTH)(x)
    assert torch.equal(getattr(ops, name)(WIDTH, sm_margin={"forward": 4, "backward": 2, "inference": 1})(x), expected)
    norm = getattr(ops, name)(WIDTH, sm_margin=4)
    assert norm.sm_margin == 4
    assert torch.equal(norm(x), expected)


def test_documented_formulas_match_results():
    x = torch.tensor([-2.0, 3.0])
    assert torch.equal(ops.SReLU()(x), torch.tensor([0.0, 9.0]))
    assert "max(x, 0)²" in ops.SReLU.__doc__
    constant = torch.full((1, WIDTH), 4.0)  # its variance is 0, its mean square is not
    torch.testing.assert_close(ops.RMSNorm(WIDTH)(constant), torch.ones(1, WIDTH))
    assert "mean(x²)" in ops.RMSNorm.__doc__


def test_recomputation_with_dropout_gives_same_gradients():
    seq, x = (
        ops.Sequential(ops.Linear(WIDTH, WIDTH, **F64), ops.Dropout(0.5), ops.GELU(), ops.Linear(WIDTH, 2, **F64)),
        rows(),
    )
    grad_inputs = [x, *seq.parameters()]
    torch.manual_seed(6)
    expected = torch.autograd.grad(seq(x).sum(), grad_inputs)
    for use_reentrant in (False, True):
        torch.manual_seed(6)
        y = torch.utils.checkpoint.checkpoint(seq, x, use_reentrant=use_reentrant)
        y.sum().backward()
        for t, grad in zip(grad_inputs, expected, strict=True):
            torch.testing.assert_close(t.grad, grad)
            t.grad = None
