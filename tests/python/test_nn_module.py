"""Common uses of torch.nn modules: each must work the same with weft's modules."""

import copy
import io
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from plain import apply
from torch.utils.checkpoint import checkpoint

import torchweft
from torchweft import ops

WIDTH = 8


def mlp(**options) -> ops.Sequential:
    return ops.Sequential(ops.Linear(WIDTH, 16, **options), ops.GELU(), ops.Linear(16, WIDTH, **options))


def block(**options) -> ops.Sequential:
    """The second half of a transformer block: norm, MLP, residual."""
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(WIDTH, **options),
        *mlp(**options),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


def plain(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The same in torch operations, with the same Parameters."""
    residual = None
    for op in module if isinstance(module, ops.Sequential) else [module]:
        if isinstance(op, ops.MakeExtraOutput):
            residual = x
        x, _ = apply(op, x, *([residual] if isinstance(op, ops.AddExtraInput) else []))
    return x


def rows(count: int = 4, **options) -> torch.Tensor:
    return torch.randn(count, WIDTH, **options)


def gradients(y: torch.Tensor, module: torch.nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(y.square().mean(), [*inputs, *module.parameters()]))


def assert_trains_like_torch(module: torch.nn.Module) -> None:
    x = rows(dtype=next(module.parameters()).dtype, requires_grad=True)
    y, expected = module(x), plain(module, x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients(y, module, x), gradients(expected, module, x))


MODELS = {
    "Linear": lambda **o: ops.Linear(WIDTH, WIDTH, **o),
    "Linear without bias": lambda **o: ops.Linear(WIDTH, WIDTH, bias=False, **o),
    "LayerNorm": lambda **o: ops.LayerNorm(WIDTH, **o),
    "block": block,
}
models = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)

# ---- parameters and checkpoints ----


@models
def test_state_dict_round_trip(make):
    source, target = make(), make()
    for param in source.parameters():
        torch.nn.init.normal_(param, std=0.3)
    assert target.load_state_dict(source.state_dict(), strict=True) == ([], [])
    x = rows()
    torch.testing.assert_close(target(x), source(x), rtol=0, atol=0)
    assert_trains_like_torch(target)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_linear_loads_torch_nn_linear_state(bias, assign):
    theirs = torch.nn.Linear(WIDTH, WIDTH, bias=bias)
    ours = ops.Linear(WIDTH, WIDTH, bias=bias)
    x = rows()
    ours(x)
    assert ours.load_state_dict(theirs.state_dict(), assign=assign) == ([], [])
    torch.testing.assert_close(ours(x), theirs(x))


def test_sequential_loads_torch_nn_sequential_state():
    theirs = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 16), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(16, WIDTH)
    )
    ours, x = mlp(), rows()
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x), theirs(x))


def test_missing_and_unexpected_keys_are_reported():
    seq = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.RMSNorm(WIDTH))
    state = seq.state_dict()
    del state["0.weight"]
    state["0.basic_ops.7.weight"] = torch.zeros(1)
    state["1.gamma"] = torch.zeros(1)
    missing, unexpected = seq.load_state_dict(state, strict=False)
    assert missing == ["0.weight"]
    assert sorted(unexpected) == ["0.basic_ops.7.weight", "1.gamma"]
    with pytest.raises(RuntimeError) as caught:
        seq.load_state_dict(state)
    assert all(key in str(caught.value) for key in [*missing, *unexpected])


def test_bias_key_without_bias_is_unexpected():
    ours = ops.Linear(WIDTH, WIDTH, bias=False)
    with pytest.raises(RuntimeError, match="[Uu]nexpected.*bias"):
        ours.load_state_dict(torch.nn.Linear(WIDTH, WIDTH).state_dict())


def test_wrong_shape_is_reported_with_both_shapes():
    ours = ops.Linear(WIDTH, WIDTH)
    with pytest.raises(RuntimeError, match="size mismatch for .*weight"):
        ours.load_state_dict(ops.Linear(WIDTH, 2 * WIDTH).state_dict())


@models
def test_parameters_assigned_from_state_dict_are_used_and_trained(make):
    target = make()
    target(rows())
    target.load_state_dict(make().state_dict(), assign=True)
    before = {name: param.detach().clone() for name, param in target.named_parameters()}
    optimizer = torch.optim.SGD(target.parameters(), lr=0.1)
    x = rows()
    target(x).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(param, before[name]) for name, param in target.named_parameters())
    torch.testing.assert_close(target(x), plain(target, x))
    saved, twin = target.state_dict(), make()
    twin.load_state_dict(saved)
    torch.testing.assert_close(twin(x), target(x), rtol=0, atol=0)


def test_parameters_are_registered_once_under_torch_names():
    linear = ops.Linear(WIDTH, WIDTH)
    assert [name for name, _ in linear.named_parameters(remove_duplicate=False)] == ["weight", "bias"]
    assert linear.basic_ops[0].weight is linear.weight and linear.basic_ops[1].bias is linear.bias
    names = [name for name, _ in block().named_parameters(remove_duplicate=False)]
    assert names == ["1.weight", "2.weight", "2.bias", "4.weight", "4.bias"]
    assert ops.Linear(WIDTH, WIDTH, bias=False).bias is None


def test_bias_cannot_be_added_to_linear_without_bias():
    linear = ops.Linear(WIDTH, WIDTH, bias=False)
    with pytest.raises(ValueError, match="bias"):
        linear.bias = torch.nn.Parameter(torch.zeros(WIDTH))


def test_tied_weights_get_both_gradients():
    seq = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.Linear(WIDTH, WIDTH))
    seq[2].weight = seq[0].weight
    assert len(list(seq.parameters())) == 3
    assert_trains_like_torch(seq)


# ---- copies ----


def through_pickle(module):
    return pickle.loads(pickle.dumps(module))


def through_torch_save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@models
@pytest.mark.parametrize("called", [False, True], ids=["fresh", "called"])
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
def test_copy_is_equal_and_independent(make, called, copied):
    module, x = make(), rows()
    if called:
        module(x).sum().backward()
        module.zero_grad()
    other = copied(module)
    torch.testing.assert_close(other(x), module(x), rtol=0, atol=0)
    assert not {id(p) for p in module.parameters()} & {id(p) for p in other.parameters()}
    other(x).sum().backward()
    assert all(p.grad is not None for p in other.parameters())
    assert all(p.grad is None for p in module.parameters())
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    assert not torch.equal(other(x), module(x))
    assert_trains_like_torch(other)


def test_copy_keeps_options_mode_hooks_and_channels():
    module, seen = block(), []
    module[1].zero_centered_gamma = True
    module.append(ops.Dropout(0.25))
    module.eval()
    other = copy.deepcopy(module)
    assert other[1].zero_centered_gamma is True and other[-1].p == 0.25 and not other[-1].training
    x = rows()
    torch.testing.assert_close(other(x), module(x))
    module[1].register_forward_hook(lambda *_: seen.append(1))
    copy.deepcopy(module)(x)
    assert seen == [1]


def test_state_dict_loads_with_weights_only():
    file, module, other = io.BytesIO(), block(), block()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = rows()
    torch.testing.assert_close(other(x), module(x))


@models
@pytest.mark.parametrize("cast", [lambda m: m.to(torch.float64), lambda m: m.double(), lambda m: m.bfloat16().double()])
def test_cast_module_computes_and_trains_in_new_dtype(make, cast):
    module = make()
    module(rows())
    module = cast(module)
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert_trains_like_torch(module)


def test_cast_to_half_and_back():
    module = mlp().half()
    x = rows(dtype=torch.float16, requires_grad=True)
    y = module(x)
    assert y.dtype == torch.float16
    y.sum().backward()
    assert x.grad.dtype == torch.float16 and module[0].weight.grad.dtype == torch.float16
    assert module.float()(rows()).dtype == torch.float32


def test_default_device_and_dtype_are_torch_defaults():
    with torch.device("meta"):
        assert {p.device.type for p in block().parameters()} == {"meta"}
    torch.set_default_dtype(torch.float64)
    assert {p.dtype for p in block().parameters()} == {torch.float64}


# ---- the meta device ----


@models
def test_meta_module_runs_on_meta(make):
    y = make(device="meta")(rows(device="meta"))
    assert y.device.type == "meta" and y.shape == (4, WIDTH)


@models
def test_to_empty_and_reset_parameters_materialize_meta_module(make):
    module = make(device="meta").to_empty(device="cpu")
    for child in module.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()
    assert_trains_like_torch(module)


@models
def test_first_call_materializes_meta_module(make):
    module = make(device="meta")
    module(rows()).sum().backward()
    assert all(p.device.type == "cpu" and p.grad is not None for p in module.parameters())
    assert_trains_like_torch(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = rows()
    before = module(x).detach()
    module(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(module(x), before)


def test_meta_module_is_initialized_like_real_module():
    x, late = rows(), ops.Linear(WIDTH, WIDTH, device="meta")
    torch.manual_seed(5)
    real = ops.Linear(WIDTH, WIDTH)
    torch.manual_seed(5)
    late(x)
    torch.testing.assert_close(late.weight, real.weight, rtol=0, atol=0)


def test_num_extra_inputs_does_not_block_materialization():
    module = block(device="meta")
    assert (module.num_extra_inputs, module.num_extra_outputs) == (0, 0)
    module(rows()).sum().backward()
    assert module[1].weight.grad is not None


@models
def test_state_dict_assigned_to_meta_module_materializes_it(make):
    source, target = make(), make(device="meta")
    target.load_state_dict(source.state_dict(), assign=True)
    x = rows()
    torch.testing.assert_close(target(x), source(x))
    assert_trains_like_torch(target)


def test_existing_parameter_survives_materialization():
    norm = ops.LayerNorm(WIDTH, device="meta")
    given = norm.weight = torch.nn.Parameter(torch.full((WIDTH,), 3.0))
    norm(rows())
    assert norm.weight is given
    torch.testing.assert_close(norm.weight.detach(), torch.full((WIDTH,), 3.0))
    torch.testing.assert_close(norm.bias.detach(), torch.zeros(WIDTH))


def test_layer_norm_without_bias_matches_torch():
    ours, theirs, x = ops.LayerNorm(WIDTH, bias=False), torch.nn.LayerNorm(WIDTH, bias=False), rows()
    torch.nn.init.uniform_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    assert ours.bias is None and [*ours.state_dict()] == ["weight"]
    for norm in (ours, copy.deepcopy(ours), torch.compile(ours, backend="eager", fullgraph=True)):
        torch.testing.assert_close(norm(x), theirs(x))
    assert "bias=false" in repr(ours)
    with pytest.raises(RuntimeError, match="bias"):
        ours.load_state_dict(torch.nn.LayerNorm(WIDTH).state_dict())


def test_plain_meta_module_in_sequential_fails_as_alone():
    seq = ops.Sequential(ops.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH, device="meta"))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        seq(rows())


# ---- parametrizations and function calls ----


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


PARAMETRIZED = {
    "Linear": lambda: ops.Linear(WIDTH, WIDTH),
    "BasicLinear": lambda: ops.BasicLinear(WIDTH, WIDTH),
    "RMSNorm": lambda: ops.RMSNorm(WIDTH),
}
parametrized = pytest.mark.parametrize("make", PARAMETRIZED.values(), ids=PARAMETRIZED)


@parametrized
@pytest.mark.parametrize("in_sequential", [False, True], ids=["alone", "in a Sequential"])
def test_parametrized_weight_is_used_and_original_trained(make, in_sequential):
    op, x = make(), rows()
    module = ops.Sequential(ops.Identity(), op) if in_sequential else op
    module(x)
    doubled, original = copy.deepcopy(op), op.weight
    doubled.weight.data.mul_(2)
    torch.nn.utils.parametrize.register_parametrization(op, "weight", Doubled())
    y = module(x)
    expected = plain(doubled, x)
    torch.testing.assert_close(y, expected)
    y.square().mean().backward()
    expected.square().mean().backward()
    torch.testing.assert_close(original.grad, 2 * doubled.weight.grad)
    torch.nn.utils.parametrize.remove_parametrizations(op, "weight")
    torch.testing.assert_close(module(x), y)


@parametrized
def test_parametrized_op_can_be_saved_and_loaded(make):
    source, target, x = make(), make(), rows()
    for op in (source, target):
        torch.nn.utils.parametrize.register_parametrization(op, "weight", Doubled())
    state = source.state_dict()
    assert "parametrizations.weight.original" in state
    target.load_state_dict(state)
    torch.testing.assert_close(target(x), source(x))


@pytest.mark.parametrize(
    "normalize",
    [
        torch.nn.utils.parametrizations.weight_norm,
        pytest.param(torch.nn.utils.weight_norm, marks=pytest.mark.filterwarnings("ignore")),
    ],
    ids=["parametrization", "hook"],
)
def test_weight_norm_works_on_linear(normalize):
    ours, theirs = ops.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
    ours.load_state_dict(theirs.state_dict())
    seq, theirs, x = ops.Sequential(normalize(ours), ops.GELU()), normalize(theirs), rows()
    expected = torch.nn.functional.gelu(theirs(x), approximate="tanh")
    y = seq(x)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    others = dict(theirs.named_parameters())
    assert len(others) == 3
    for name, param in seq[0].named_parameters():
        torch.testing.assert_close(param.grad, others[name].grad)


@models
def test_functional_call_computes_with_given_parameters(make):
    module, x = make(), rows()
    module(x)
    given = {name: (0.3 * torch.randn_like(param)).requires_grad_() for name, param in module.named_parameters()}
    y = torch.func.functional_call(module, given, (x,))
    other = copy.deepcopy(module)
    with torch.no_grad():
        for name, param in other.named_parameters():
            param.copy_(given[name])
    torch.testing.assert_close(y, plain(other, x))
    ours = torch.autograd.grad(y.square().mean(), list(given.values()))
    torch.testing.assert_close(list(ours), gradients(plain(other, x), other))
    torch.testing.assert_close(module(x), plain(module, x))


# ---- gradients ----


def test_clip_grad_norm_works():
    module = block()
    (100 * module(rows())).square().sum().backward()
    assert torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0) > 1
    total = torch.stack([p.grad.norm() for p in module.parameters()]).norm()
    torch.testing.assert_close(total, torch.ones(()))


def test_gradients_accumulate_over_backward_calls():
    module, x = block(), rows()
    module(x).square().sum().backward()
    once = [p.grad.clone() for p in module.parameters()]
    module(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in module.parameters()], [2 * g for g in once])


def test_hooks_on_parameters_see_and_change_gradients():
    module, x = block(), rows()
    expected = gradients(plain(module, x), module)
    params, seen = list(module.parameters()), []
    params[1].register_hook(lambda grad: 3 * grad)
    for param in params:
        param.register_post_accumulate_grad_hook(lambda p: seen.append(id(p)))
    module(x).square().mean().backward()
    torch.testing.assert_close(params[1].grad, 3 * expected[1])
    torch.testing.assert_close(params[2].grad, expected[2])
    assert sorted(seen) == sorted(id(p) for p in params)


def test_outputs_retain_grad_and_run_hooks():
    module, x, seen = block(), rows(), []
    y = module(x)
    y.retain_grad()
    y.register_hook(lambda grad: seen.append(grad))
    y.square().sum().backward()
    torch.testing.assert_close(y.grad, 2 * y.detach())
    assert len(seen) == 1


def test_gradients_of_subset_equal_gradients_of_all():
    module, x = block(), rows(requires_grad=True)
    every = gradients(plain(module, x), module, x)
    inputs = [x, *module.parameters()]
    for chosen in ([0], [1], [3, 5], [5], [0, 2]):
        got = torch.autograd.grad(module(x).square().mean(), [inputs[i] for i in chosen])
        torch.testing.assert_close(list(got), [every[i] for i in chosen])
    y = module(x)
    y.square().mean().backward(inputs=[inputs[2]])
    torch.testing.assert_close(inputs[2].grad, every[2])
    assert all(t.grad is None for i, t in enumerate(inputs) if i != 2)


def test_unused_extra_output_has_zero_gradient():
    seq, x = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.MakeExtraOutput(), ops.GELU()), rows(requires_grad=True)
    main, extra = seq(x)
    expected = plain(seq, x)
    for out, reference in ((main, expected), (extra, plain(seq[:1], x))):
        got = torch.autograd.grad(out.square().sum(), [x, seq[0].weight], retain_graph=True)
        torch.testing.assert_close(
            got, torch.autograd.grad(reference.square().sum(), [x, seq[0].weight], retain_graph=True)
        )


def test_retained_graph_gives_same_gradients_again():
    module, x = block(), rows(requires_grad=True)
    y = module(x).square().sum()
    inputs = [x, *module.parameters()]
    first = torch.autograd.grad(y, inputs, retain_graph=True)
    second = torch.autograd.grad(y, inputs, retain_graph=True)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, torch.autograd.grad(y, inputs), rtol=0, atol=0)


@models
def test_second_backward_without_retain_graph_raises(make):
    y = make()(rows())
    weights = torch.ones_like(y)
    y.backward(weights)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(weights)


@pytest.mark.parametrize("which", ["input", "weight"])
def test_changing_saved_tensor_in_place_raises(which):
    module = mlp()
    scale = torch.ones((), requires_grad=True)
    x = rows() * scale
    y = module(x)
    with torch.no_grad():
        (x if which == "input" else module[2].weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_changing_tensor_not_needed_by_backward_is_allowed():
    module, x = ops.Sequential(ops.ConstantScale(2.0), ops.Bias(WIDTH)), rows(requires_grad=True)
    inner = x * 1
    y = module(inner)
    with torch.no_grad():
        inner.zero_()
        module[1].bias.zero_()
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


ALIASING = {
    "Identity": lambda: ops.Identity(),
    "Reshape": lambda: ops.Reshape((-1,)),
    "Dropout in evaluation": lambda: ops.Dropout(0.5).eval(),
    "Quantize": lambda: ops.Quantize(),
    "Linear": lambda: ops.Linear(WIDTH, WIDTH),
    "GELU": lambda: ops.GELU(),
}


@pytest.mark.parametrize("kind", ALIASING)
@pytest.mark.parametrize("leaf", [True, False])
def test_writing_into_output_is_correct_or_raises(kind, leaf):
    op = ALIASING[kind]()
    source = rows(requires_grad=True)
    x = source if leaf else source * 1
    y = op(x)
    try:
        y.mul_(3)
    except RuntimeError as error:
        assert "in-place" in str(error) or "inplace" in str(error) or "modified" in str(error)
        return
    try:
        y.square().sum().backward()
    except RuntimeError as error:
        assert "inplace" in str(error)
        return
    expected = (3 * plain(op, source)).square().sum()
    torch.testing.assert_close(source.grad, torch.autograd.grad(expected, source)[0])


def test_writing_into_extra_output_aliasing_input_is_correct_or_raises():
    seq = ops.Sequential(ops.MakeExtraOutput(), ops.Linear(WIDTH, WIDTH))
    source = rows(requires_grad=True)
    main, extra = seq(source * 1)
    try:
        extra.mul_(3)
        (main.square().sum() + extra.square().sum()).backward()
    except RuntimeError as error:
        assert "in-place" in str(error) or "inplace" in str(error)
        return
    expected = plain(seq[1:], source).square().sum() + (3 * source).square().sum()
    torch.testing.assert_close(source.grad, torch.autograd.grad(expected, source)[0])


@pytest.mark.parametrize("kind", ALIASING)
def test_writing_into_output_without_grad_acts_as_view(kind):
    op, x = ALIASING[kind](), rows()
    with torch.no_grad():
        y = op(x)
        expected = 3 * y.clone()
        y.mul_(3)
    torch.testing.assert_close(y, expected)


# ---- torch's own tools ----


def test_anomaly_mode_names_pipeline_with_nan():
    module = mlp()
    with torch.no_grad():
        module[0].weight.fill_(float("inf"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="WeftPipelineBackward.*nan"), torch.autograd.detect_anomaly():
            module(rows(requires_grad=True)).sum().backward()


def test_anomaly_mode_changes_no_gradient():
    module, x = block(), rows(requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            got = gradients(module(x), module, x)
    torch.testing.assert_close(got, gradients(plain(module, x), module, x))


def test_profiler_shows_pipelines_and_backward():
    module = block()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(rows(requires_grad=True)).sum().backward()
    names = [event.name for event in profile.events()]
    assert names.count("weft::pipeline") == 1
    assert any("WeftPipelineBackward" in name for name in names)
    plan = module.explain(rows(requires_grad=True)).data[0]
    for steps, suffix in ((plan["forward"], ""), (plan["backward"], " backward")):
        for step in steps:
            assert not step["runs"] or f"weft::{step['name']}{suffix}" in names, step
    events = {event.name: event for event in profile.events()}
    inner, outer = (events[name].time_range for name in (f"weft::{plan['forward'][0]['name']}", "weft::pipeline"))
    assert outer.start <= inner.start and inner.end <= outer.end


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_gives_same_results(use_reentrant):
    module, x = block().append(ops.Dropout(0.5)), rows(16, requires_grad=True)
    torch.manual_seed(3)
    expected = module(x)
    torch.manual_seed(3)
    y = checkpoint(module, x, use_reentrant=use_reentrant)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    y.square().mean().backward()
    got = [x.grad, *(p.grad for p in module.parameters())]
    torch.testing.assert_close(got, gradients(expected, module, x), rtol=0, atol=0)


def test_activation_checkpointing_keeps_no_activation():
    module, x = block(), rows(16, requires_grad=True)

    def values_saved(call) -> int:
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            call()
        return sum(t.numel() for t in saved)

    assert values_saved(lambda: checkpoint(module, x, use_reentrant=False)) <= x.numel()
    assert values_saved(lambda: module(x)) > 3 * x.numel()


class Remembers(ops.BasicOperation):
    """x², in Python, with a saved tensor."""

    def op_forward(self, ctx, input_, **_):
        ctx.save_for_backward(input_)
        return input_.square()

    def op_backward(self, ctx, grad_output):
        return 2 * ctx.saved_tensors[0] * grad_output, ()


@pytest.mark.parametrize("python_op", [False, True], ids=["native", "with an operation in Python"])
def test_saved_tensor_hooks_see_every_saved_tensor(python_op):
    """Backward uses what unpack returns; a tensor saved without the hooks would not become zero."""
    module = mlp()
    if python_op:
        module.append(Remembers())
    x, packed = rows(requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
        y = module(x)
    expected = torch.autograd.grad(y.sum(), [x, *module.parameters()])
    torch.testing.assert_close(expected, torch.autograd.grad(module(x).sum(), [x, *module.parameters()]))
    assert len(packed) >= 4 + python_op
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, torch.zeros_like):
        y = module(x)
    zeroed = torch.autograd.grad(y.sum(), [x, module[0].weight, module[2].weight])
    assert all(not t.any() for t in zeroed)


def test_save_on_cpu_changes_no_gradient():
    module, x = block(), rows(requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = module(x)
    torch.testing.assert_close(gradients(y, module, x), gradients(plain(module, x), module, x))


@pytest.mark.parametrize("when", ["pack", "unpack"])
def test_exception_in_saved_tensor_hook_keeps_type(when):
    class DiskFull(Exception):
        pass

    def full(tensor):
        raise DiskFull

    hooks = (full, lambda t: t) if when == "pack" else (lambda t: t, full)
    module = mlp()
    with pytest.raises(DiskFull):
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            y = module(rows())
        y.sum().backward()
    module(rows()).sum().backward()


def test_disabled_saved_tensors_raise():
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            mlp()(rows())


def test_inference_mode_gives_same_values_without_graph():
    module, x = block(), rows()
    expected = plain(module, x)
    with torch.inference_mode():
        y = module(x)
        inner = module(rows())
    assert y.is_inference() and not y.requires_grad
    torch.testing.assert_close(y.clone(), expected)
    with pytest.raises(RuntimeError, match="[Ii]nference tensors"):
        module(inner).sum().backward()
    module(x).sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_gemms_and_keeps_gradient_dtypes(dtype):
    module, x = mlp(bias=False), rows(requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        y = module(x)
        with torch.autocast("cpu", enabled=False):
            exact = module(x)
    assert y.dtype == dtype and exact.dtype == torch.float32
    y.sum().backward()
    assert x.grad.dtype == torch.float32 and {p.grad.dtype for p in module.parameters()} == {torch.float32}
    torch.testing.assert_close(y.float(), exact, rtol=5e-2, atol=5e-2)


def test_linear_with_bias_returns_the_autocast_dtype():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.nn.Linear(WIDTH, WIDTH)(rows()).dtype == torch.bfloat16
        assert ops.Linear(WIDTH, WIDTH)(rows()).dtype == torch.bfloat16


def test_backward_outside_autocast_uses_forward_dtypes():
    module, x = mlp(), rows(requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(module(x).float().sum(), [x, *module.parameters()])
        y = module(x)
    torch.testing.assert_close(torch.autograd.grad(y.float().sum(), [x, *module.parameters()]), inside, rtol=0, atol=0)


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizer_trains_weft_like_torch(kind):
    module = block()
    other, x, target = copy.deepcopy(module), rows(16), rows(16)
    for model, call in ((module, module), (other, lambda x: plain(other, x))):
        optimizer = OPTIMIZERS[kind](model.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            (call(x) - target).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(list(module.parameters()), list(other.parameters()), rtol=1e-4, atol=1e-5)


def test_optimizer_in_backward_frees_gradients():
    module, x = block(), rows()
    before = [p.detach().clone() for p in module.parameters()]
    for param in module.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)

        def step(p, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    module(x).square().sum().backward()
    assert all(p.grad is None and not torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))


def test_swa_and_parameter_vectors_work():
    module = block()
    averaged = torch.optim.swa_utils.AveragedModel(module)
    averaged.update_parameters(module)
    x = rows()
    torch.testing.assert_close(averaged(x), module(x))
    vector = torch.nn.utils.parameters_to_vector(module.parameters())
    torch.nn.utils.vector_to_parameters(torch.zeros_like(vector), module.parameters())
    torch.testing.assert_close(module(x), x)


def test_apply_and_named_modules_reach_every_op():
    module, seen = block(), []
    module.apply(lambda m: seen.append(type(m).__name__))
    assert seen == ["MakeExtraOutput", "RMSNorm", "Linear", "GELU", "Linear", "AddExtraInput", "Sequential"]
    assert [name for name, _ in module.named_modules()] == ["", "0", "1", "2", "3", "4", "5"]


def test_repr_shows_options():
    assert repr(ops.Linear(3, 4, bias=False)) == "Linear(in_features=3, out_features=4, bias=False)"
    assert "eps=0.5" in repr(ops.RMSNorm(4, eps=0.5))


def test_import_is_cheap():
    """The compiler, which takes a second to import, is imported at the first compilation."""
    code = "import sys, torchweft; print('torch._dynamo' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(torchweft.__file__).parents[1])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
