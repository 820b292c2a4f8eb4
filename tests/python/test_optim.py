"""FusedAdam against torch.optim: float32, master weights, main_grad, saved state, rejected arguments."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch

from torchweft import ops
from torchweft.optim import FusedAdam

OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(n, 5, generator=generator).to(dtype)) for n in (3, 40)]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(n, 5, generator=generator) for n in (3, 40)]


def train(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        for p, g in zip(params, gradients(step), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("adam_w_mode", (True, False))
def test_float32_equals_torch(adam_w_mode):
    params, expected = parameters(), parameters()
    train(FusedAdam(params, adam_w_mode=adam_w_mode, **OPTIONS), params, range(5))
    torch_adam = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    train(torch_adam(expected, fused=True, **OPTIONS), expected, range(5))
    for p, e in zip(params, expected, strict=True):
        assert torch.equal(p, e)


def test_without_bias_correction():
    (p,) = parameters()[:1]
    before, g = p.detach().clone(), gradients(0)[0]
    p.grad = g
    FusedAdam([p], lr=0.5, bias_correction=False, betas=(0.8, 0.95), eps=1e-6).step()
    expected = before - 0.5 * (0.2 * g) / ((0.05 * g.square()).sqrt() + 1e-6)
    torch.testing.assert_close(p.detach(), expected)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_master_weights_equal_float32_training(dtype):
    params = parameters(dtype)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer, expected = FusedAdam(params, master_weights=True, **OPTIONS), FusedAdam(wide, **OPTIONS)
    for step in range(5):
        for p, w, g in zip(params, wide, gradients(step), strict=True):
            p.grad = g.to(dtype)
            w.grad = p.grad.float()
        optimizer.step()
        expected.step()
    for p, w in zip(params, wide, strict=True):
        assert torch.equal(optimizer.state[p]["master_param"], w)
        assert torch.equal(p, w.to(dtype))


def test_low_precision_without_master_weights_rounds_each_step():
    params = parameters(torch.bfloat16)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer, expected = FusedAdam(params, **OPTIONS), FusedAdam(wide, **OPTIONS)
    for step in range(3):
        train(optimizer, params, range(step, step + 1))
        for w, p in zip(wide, params, strict=True):
            w.grad = p.grad.float()
        expected.step()
        for w in wide:
            w.data.copy_(w.data.bfloat16())
    for p, w in zip(params, wide, strict=True):
        assert torch.equal(p.float(), w) and optimizer.state[p]["exp_avg"].dtype == torch.float32


def test_trains_on_main_grad_of_linear():
    torch.manual_seed(3)
    linear = ops.BasicLinear(6, 4, dtype=torch.bfloat16, accumulate_into_main_grad=True)
    weight = linear.weight
    weight.main_grad = torch.zeros(weight.shape)
    optimizer = FusedAdam([weight], lr=0.1, master_weights=True)
    x, before = torch.randn(8, 6).bfloat16(), weight.detach().clone()
    linear(x).square().sum().backward()
    assert weight.main_grad.any()
    optimizer.step()
    assert not torch.equal(weight, before)
    optimizer.zero_grad()
    assert not weight.main_grad.any()


def test_decoupled_grad_is_read_instead_of_grad():
    (p,), (expected,) = parameters()[:1], parameters()[:1]
    p.grad, p.decoupled_grad = torch.full_like(p, 7), gradients(0)[0]
    expected.grad = gradients(0)[0]
    FusedAdam([p], use_decoupled_grad=True, **OPTIONS).step()
    FusedAdam([expected], **OPTIONS).step()
    assert torch.equal(p, expected)


def test_parameter_without_gradient_is_not_updated():
    params = parameters()
    params[0].grad = gradients(0)[0]
    before = params[1].detach().clone()
    optimizer = FusedAdam(params, **OPTIONS)
    optimizer.step()
    assert torch.equal(params[1], before) and params[1] not in optimizer.state


def test_saved_state_continues_with_equal_bits(tmp_path):
    params = parameters(torch.bfloat16)
    optimizer = FusedAdam(params, master_weights=True, **OPTIONS)
    train(optimizer, params, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other = copy.deepcopy(params)
    resumed = FusedAdam(other, master_weights=True, **OPTIONS)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    train(optimizer, params, range(3, 6))
    train(resumed, other, range(3, 6))
    for p, q in zip(params, other, strict=True):
        assert torch.equal(p, q)
        for name, value in optimizer.state[p].items():
            assert value.dtype == torch.float32 and torch.equal(value, resumed.state[q][name])


def test_state_without_master_weights_gets_them():
    params = parameters(torch.bfloat16)
    optimizer = FusedAdam(params, **OPTIONS)
    train(optimizer, params, range(2))
    resumed = FusedAdam(params, master_weights=True, **OPTIONS)
    resumed.load_state_dict(optimizer.state_dict())
    train(resumed, params, range(2, 3))
    assert all(torch.equal(resumed.state[p]["master_param"].bfloat16(), p) for p in params)


def test_hook_may_replace_loaded_state():
    params = parameters(torch.bfloat16)
    optimizer = FusedAdam(params, **OPTIONS)
    train(optimizer, params, range(2))
    state = optimizer.state_dict()
    other = FusedAdam(params, **OPTIONS)
    other.register_load_state_dict_pre_hook(lambda _, __: state)
    other.load_state_dict(FusedAdam(params, **OPTIONS).state_dict())
    assert torch.equal(other.state[params[0]]["exp_avg"], optimizer.state[params[0]]["exp_avg"])


def test_copied_optimizer_steps():
    params = parameters()
    optimizer = copy.deepcopy(FusedAdam(params, adam_w_mode=False, **OPTIONS))
    (group,) = optimizer.param_groups
    train(optimizer, group["params"], range(1))
    train(torch.optim.Adam(params, fused=True, **OPTIONS), params, range(1))
    assert all(torch.equal(p, q) for p, q in zip(group["params"], params, strict=True))


@pytest.mark.parametrize("view", (lambda t: t.t(), lambda t: t[:, ::2]), ids=("transposed", "every second column"))
def test_parameter_of_any_strides(view):
    base = torch.randn(4, 6)
    p = torch.nn.Parameter(view(base.clone()))
    expected = torch.nn.Parameter(view(base).clone(memory_format=torch.contiguous_format))
    p.main_grad = torch.randn(p.shape)
    expected.grad = p.main_grad.clone()
    for q in (p, expected):
        optimizer = FusedAdam([q], **OPTIONS)
        optimizer.step()
        optimizer.step()
    assert torch.equal(p, expected)


def test_dummy_gradient_is_not_used():
    (p,), (expected,) = parameters()[:1], parameters()[:1]
    p.grad, p.main_grad, p.grad_added_to_main_grad = torch.zeros_like(p), gradients(0)[0], True
    expected.grad = gradients(0)[0]
    FusedAdam([p], **OPTIONS).step()
    FusedAdam([expected], **OPTIONS).step()
    assert torch.equal(p, expected)


def test_closure_and_groups():
    a, b = parameters()
    optimizer = FusedAdam([{"params": [a], "lr": 0.0}, {"params": [b]}], lr=0.1)
    before = a.detach().clone()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = a.square().sum() + b.square().sum()
        loss.backward()
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first and torch.equal(a, before)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    (
        ({"amsgrad": True}, NotImplementedError, "FusedAdam: amsgrad=True is not supported"),
        ({"capturable": True}, NotImplementedError, "capturable=True is not supported"),
        (
            {"exp_avg_dtype": torch.float16},
            NotImplementedError,
            "is torch.float16, expected torch.float32",
        ),
        ({"lr": -1.0}, ValueError, "lr is -1.0, expected 0 or more"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas is \(0.9, 1.0\), expected two numbers from 0 to below 1"),
    ),
)
def test_rejected_arguments(options, error, message):
    with pytest.raises(error, match=message):
        FusedAdam(parameters(), **options)


def test_states_are_read_and_set_by_name():
    """As Megatron's distributed optimizer loads them: before the first step, and one at a time."""
    trained, given = parameters(torch.bfloat16), parameters(torch.bfloat16)
    first = FusedAdam(trained, master_weights=True, **OPTIONS)
    train(first, trained, range(3))
    second = FusedAdam(given, master_weights=True, **OPTIONS)
    for p, other in zip(given, trained, strict=True):
        second.initialize_state(p)
        p.data.copy_(other)
        for name in ("exp_avg_sq", "master_param", "exp_avg"):
            second.set_scaled_state(p, name, first.get_unscaled_state(other, name))
    second.param_groups[0]["step"] = first.param_groups[0]["step"]
    train(first, trained, range(3, 5))
    train(second, given, range(3, 5))
    assert all(torch.equal(p, other) for p, other in zip(given, trained, strict=True))


def test_wrong_states_raise():
    (p, _) = params = parameters()
    optimizer = FusedAdam(params, **OPTIONS)
    with pytest.raises(ValueError, match="has no state 'exp_avg'"):
        optimizer.get_unscaled_state(p, "exp_avg")
    assert not optimizer.state
    with pytest.raises(ValueError, match=r"of shape \[7\] for a parameter of shape \[3, 5\]"):
        optimizer.set_scaled_state(p, "exp_avg", torch.ones(7))
    with pytest.raises(ValueError, match="state 'master_param'"):
        optimizer.set_scaled_state(p, "master_param", torch.ones(3, 5))
    with pytest.raises(NotImplementedError, match="store_param_remainders"):
        optimizer.initialize_state(p, store_param_remainders=True)
    with pytest.raises(TypeError, match="exp_avg of parameter 0 of group 0 is torch.complex64"):
        optimizer.set_scaled_state(p, "exp_avg", torch.ones(3, 5, dtype=torch.complex64))


# ---- dtypes and shapes --------------------------------------------------------------------------------------------

SUPPORTED = (torch.float32, torch.bfloat16, torch.float16)
EVERY_DTYPE = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def parameter_of(dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(4, 2, dtype=dtype), requires_grad=False)


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_parameter_of_every_dtype_is_supported_or_rejected(dtype):
    """A zero gradient changes no value of a supported dtype."""
    if dtype not in SUPPORTED:
        with pytest.raises(TypeError, match=f"parameter 1 of group 0 is {dtype}, expected float32, bfloat16 or float1"):
            FusedAdam([*parameters()[:1], parameter_of(dtype)])
        optimizer = FusedAdam(parameters())
        with pytest.raises(TypeError, match=f"parameter 0 of group 1 is {dtype}"):
            optimizer.add_param_group({"params": [parameter_of(dtype)]})
        assert len(optimizer.param_groups) == 1
        return
    (p,) = parameters(dtype)[:1]
    before, p.grad = p.detach().clone(), torch.zeros_like(p)
    FusedAdam([p], lr=0.1).step()
    assert torch.equal(p, before)


def test_parameter_converted_after_construction_raises():
    linear = torch.nn.Linear(3, 3)
    optimizer = FusedAdam(linear.named_parameters())
    linear.double()(torch.ones(1, 3).double()).sum().backward()
    with pytest.raises(TypeError, match=r"parameter weight is torch.float64, expected .* Convert it"):
        optimizer.step()


@pytest.mark.parametrize("name", ("main_grad", "decoupled_grad"))
@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_gradient_of_every_dtype_is_supported_or_rejected(name, dtype):
    first, p = parameters()
    first.grad = first.decoupled_grad = gradients(0)[0]
    before = [first.detach().clone(), p.detach().clone()]
    optimizer = FusedAdam([{"params": [first]}, {"params": [p]}], use_decoupled_grad=name == "decoupled_grad")
    if dtype in SUPPORTED:
        setattr(p, name, gradients(0)[1].to(dtype))
        expected = torch.nn.Parameter(before[1].clone())
        expected.grad = getattr(p, name).float()
        FusedAdam([expected]).step()
        optimizer.step()
        assert torch.equal(p, expected)
        return
    setattr(p, name, torch.empty(40, 5, dtype=dtype))
    with pytest.raises(TypeError, match=f"the gradient of parameter 0 of group 1 is {dtype}, expected float32"):
        optimizer.step()
    assert torch.equal(first, before[0]) and torch.equal(p, before[1])  # no group has made half a step
    assert not optimizer.state and "step" not in optimizer.param_groups[0]


@pytest.mark.parametrize("name", ("main_grad", "decoupled_grad"))
@pytest.mark.parametrize("shape", ((5, 3), (3, 4), (3, 5, 1), (3,), (1, 15), ()), ids=str)
def test_gradient_of_another_shape_raises(name, shape):
    """The kernel reads as many values as the parameter has."""
    (p,) = parameters()[:1]
    setattr(p, name, torch.ones(shape))
    with pytest.raises(ValueError, match=r"gradient of parameter 0 of group 0 has shape .*, expected \[3, 5\]"):
        FusedAdam([p], use_decoupled_grad=name == "decoupled_grad").step()


def test_flat_main_grad_is_read_by_rows():
    """The gradient GEMM of a linear adds to any contiguous main_grad with as many values as the weight."""
    (p,), (expected,) = parameters()[:1], parameters()[:1]
    p.main_grad, expected.grad = gradients(0)[0].flatten(), gradients(0)[0]
    for q in (p, expected):
        FusedAdam([q], **OPTIONS).step()
    assert torch.equal(p, expected)


def test_sparse_tensors_raise():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="gradient of parameter 0 of group 0 has layout torch.sparse_coo.*dense"):
        FusedAdam(embedding.parameters()).step()
    with pytest.raises(TypeError, match="parameter 0 of group 0 has layout torch.sparse_coo"):
        FusedAdam([torch.nn.Parameter(torch.eye(3).to_sparse())])


def test_parameter_of_a_new_shape_raises():
    """Its moments have the old shape."""
    (p,) = parameters()[:1]
    optimizer = FusedAdam([p])
    optimizer.initialize_state(p)
    p.grad, p.data = None, torch.ones(300, 5)
    p.grad = torch.ones(300, 5)
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 of group 0 has shape \[3, 5\], expected \[300, 5\]"):
        optimizer.step()


def test_group_added_later_starts_at_step_1():
    (a, b), (alone,) = parameters(), parameters()[1:]
    optimizer = FusedAdam([a], **OPTIONS)
    train(optimizer, [a, b], range(3))
    optimizer.add_param_group({"params": [b], "lr": 0.5})
    for step in range(2):
        b.grad, a.grad = gradients(step)[1], gradients(step)[0]
        optimizer.step()
    expected = FusedAdam([alone], **{**OPTIONS, "lr": 0.5})
    for step in range(2):
        alone.grad = gradients(step)[1]
        expected.step()
    assert torch.equal(b, alone) and [group["step"] for group in optimizer.param_groups] == [5, 2]


@pytest.mark.parametrize("option", ({"lr": -1.0}, {"eps": -1.0}, {"weight_decay": float("nan")}, {"betas": (0.9, 1.0)}))
def test_options_of_a_group_are_checked(option):
    optimizer = FusedAdam(parameters()[:1])
    with pytest.raises(ValueError, match=f"{next(iter(option))} is "):
        optimizer.add_param_group({"params": parameters()[1:], **option})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=f"{next(iter(option))} is "):
        FusedAdam([{"params": parameters()}, {"params": parameters(), **option}])


@pytest.mark.parametrize("dtype", SUPPORTED, ids=str)
@pytest.mark.parametrize("master_weights", (False, True))
def test_step_counts_as_a_change(dtype, master_weights):
    """Fused kernels of torch do not count what they change in the version of a tensor."""
    params = parameters(dtype)
    versions = [p._version for p in params]
    params[0].grad = gradients(0)[0].to(dtype)
    FusedAdam(params, master_weights=master_weights).step()
    assert params[0]._version > versions[0] and params[1]._version == versions[1]


def test_weight_changed_between_forward_and_backward_raises():
    (p,) = parameters()[:1]
    optimizer, loss = FusedAdam([p]), p.square().sum()
    p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- state of torch's optimizers ----------------------------------------------------------------------------------

ADAMS = {True: torch.optim.AdamW, False: torch.optim.Adam}


@pytest.mark.parametrize("adam_w_mode", (True, False))
@pytest.mark.parametrize("implementation", ({"fused": True}, {"foreach": True}, {"capturable": True}), ids=str)
@pytest.mark.parametrize("named", (False, True))
def test_state_of_torch_continues(adam_w_mode, implementation, named, tmp_path):
    params, twins = parameters(), parameters()
    names = (lambda ps: [(f"p{i}", p) for i, p in enumerate(ps)]) if named else (lambda ps: ps)
    saved = ADAMS[adam_w_mode](names(params), **OPTIONS, **({} if "capturable" in implementation else implementation))
    train(saved, params, range(3))
    torch.save(saved.state_dict(), tmp_path / "state.pt")
    for p, twin in zip(params, twins, strict=True):
        twin.data.copy_(p.detach())
    optimizer = FusedAdam(names(twins), adam_w_mode=adam_w_mode)
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert optimizer.param_groups[0]["step"] == 3 and "fused" not in optimizer.param_groups[0]
    assert all(set(optimizer.state[p]) == {"exp_avg", "exp_avg_sq"} for p in twins)
    expected = ADAMS[adam_w_mode](params, fused=True, **OPTIONS)
    expected.load_state_dict({**saved.state_dict(), "param_groups": expected.state_dict()["param_groups"]})
    train(expected, params, range(3, 5))
    train(optimizer, twins, range(3, 5))
    assert all(torch.equal(p, twin) for p, twin in zip(params, twins, strict=True))


def test_low_precision_moments_of_torch_become_float32():
    params = parameters(torch.bfloat16)
    saved = torch.optim.AdamW(params, **OPTIONS)
    train(saved, params, range(2))
    optimizer = FusedAdam(params, master_weights=True, **OPTIONS)
    optimizer.load_state_dict(saved.state_dict())
    for p in params:
        for name in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[p][name]
            assert value.dtype == torch.float32 and torch.equal(value, saved.state[p][name].float())
    values = [p.detach().float() for p in params]
    optimizer.param_groups[0]["lr"] = 0
    train(optimizer, params, range(1))
    assert all(torch.equal(optimizer.state[p]["master_param"], v) for p, v in zip(params, values, strict=True))


def trained_state(make=torch.optim.AdamW, dtype: torch.dtype = torch.float32, **options) -> dict:
    params = parameters(dtype)
    optimizer = make(params, lr=0.1, **options)
    train(optimizer, params, range(2))
    return optimizer.state_dict()


def with_state(name: str, value: object) -> dict:
    state = trained_state()
    state["state"][1][name] = value
    return state


@pytest.mark.parametrize(
    ("state", "error", "message"),
    (
        (lambda: trained_state(amsgrad=True), NotImplementedError, "has amsgrad=True, which is not supported"),
        (lambda: trained_state(maximize=True), NotImplementedError, "has maximize=True, which is not supported"),
        (lambda: trained_state(torch.optim.Adam, weight_decay=0.1), ValueError, "Create FusedAdam with adam_w_mode=F"),
        (lambda: trained_state(torch.optim.SGD), ValueError, "group 0 of the loaded state has no betas, eps; expected"),
        (lambda: trained_state(torch.optim.Adamax), ValueError, "of group 0 has exp_avg, exp_inf; expected"),
        (lambda: trained_state(FusedAdam, torch.bfloat16, master_weights=True), ValueError, "has a master_param, but"),
        (lambda: with_state("step", torch.tensor(7.0)), ValueError, r"have made \[2, 7\] steps, expected one number"),
        (lambda: with_state("exp_avg", torch.ones(3)), ValueError, r"exp_avg .* has shape \[3\], expected \[40, 5\]"),
        (lambda: with_state("exp_avg", torch.ones(40, 5).cfloat()), TypeError, "loaded exp_avg of .* torch.complex64"),
        (lambda: with_state("exp_avg_sq", torch.ones(40, 5).double()), TypeError, "loaded exp_avg_sq .* torch.float64"),
        (lambda: with_state("exp_avg", 3.0), TypeError, "loaded exp_avg of parameter 1 of group 0 is 3.0, expected"),
    ),
)  # fmt: skip
def test_state_that_cannot_continue_raises(state, error, message):
    loaded = state()
    master = "master_param" in loaded["state"].get(0, {})
    params = parameters(torch.bfloat16 if master else torch.float32)
    optimizer = FusedAdam(params)
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(loaded)
    assert not optimizer.state and "step" not in optimizer.param_groups[0]


def test_loading_does_not_change_the_given_state():
    state = trained_state()
    expected = copy.deepcopy(state)
    FusedAdam(parameters()).load_state_dict(state)
    assert state["param_groups"] == expected["param_groups"]
    assert all(state["state"][i].keys() == expected["state"][i].keys() for i in (0, 1))


def test_torch_does_not_load_the_state_of_fused_adam():
    """It has no step per parameter, as Transformer Engine's has none."""
    with pytest.raises(KeyError, match="step"):
        torch.optim.AdamW(parameters()).load_state_dict(trained_state(FusedAdam))


# ---- GradScaler and clipping --------------------------------------------------------------------------------------


def scaled_backward(scaler, params: list[torch.nn.Parameter], step: int) -> None:
    loss = sum((p * g).sum() for p, g in zip(params, gradients(step), strict=True))
    scaler.scale(loss).backward()


@pytest.mark.parametrize("unscale", (False, True))
def test_grad_scaler_divides_grad(unscale):
    params, expected = parameters(), parameters()
    optimizer, scaler = FusedAdam(params, **OPTIONS), torch.amp.GradScaler("cpu", init_scale=1024.0)
    reference = FusedAdam(expected, **OPTIONS)
    for step in range(3):
        optimizer.zero_grad()
        scaled_backward(scaler, params, step)
        for p, g in zip(expected, gradients(step), strict=True):
            p.grad = g
        if unscale:
            scaler.unscale_(optimizer)
            norms = [torch.nn.utils.clip_grad_norm_(ps, 0.5) for ps in (params, expected)]
            assert torch.equal(*norms)
        scaler.step(optimizer)
        scaler.update()
        reference.step()
    assert all(torch.equal(p, e) for p, e in zip(params, expected, strict=True))


def test_grad_scaler_skips_a_step_with_an_infinity():
    params = parameters()
    optimizer, scaler = FusedAdam(params), torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [p.detach().clone() for p in params]
    scaled_backward(scaler, params, 0)
    params[1].grad[3, 2] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512 and not optimizer.state
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


@pytest.mark.parametrize("flagged", (False, True))
@pytest.mark.parametrize("mixed", (False, True))
@pytest.mark.parametrize("before", ("step", "unscale_", "unscale_ and clip"))
def test_grad_scaler_with_main_grad_raises(flagged, mixed, before):
    linear = ops.Linear(6, 4, bias=mixed, accumulate_into_main_grad=True)
    linear.weight.main_grad = torch.zeros(4, 6)
    if flagged:
        linear.weight.grad_added_to_main_grad = False
    values = [p.detach().clone() for p in linear.parameters()]
    optimizer, scaler = FusedAdam(linear.parameters()), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(linear(torch.full((2, 6), float("inf"))).sum()).backward()
    if before != "step":
        scaler.unscale_(optimizer)
    if before == "unscale_ and clip":
        torch.nn.utils.clip_grad_norm_(linear.parameters(), 1.0)
    with pytest.raises(NotImplementedError, match="GradScaler is not supported for main_grad, the gradient of param"):
        scaler.step(optimizer)
    assert all(torch.equal(p, v) for p, v in zip(linear.parameters(), values, strict=True)) and not optimizer.state
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)  # scales nothing


def test_grad_scaler_with_decoupled_grad_raises():
    (p,) = parameters()[:1]
    optimizer, scaler = FusedAdam([p], use_decoupled_grad=True), torch.amp.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    p.decoupled_grad = torch.ones_like(p)
    with pytest.raises(NotImplementedError, match="not supported for decoupled_grad, the gradient of parameter 0 of"):
        scaler.step(optimizer)


@pytest.mark.parametrize("value", (None, torch.full((3, 5), 100.0)))
def test_grad_scaler_ignores_a_main_grad_that_is_not_read(value):
    (p,) = parameters()[:1]
    p.main_grad = value
    optimizer, scaler = FusedAdam([p]), torch.amp.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (optimizer.state[p]["exp_avg"] == 0.1).all()


def test_documented_clipping_of_main_grad():
    """As docs/user_guide.md shows it; clip_grad_norm_ clips grad only."""
    page = (Path(__file__).parents[2] / "docs" / "user_guide.md").read_text()
    (program,) = re.findall(r"^```python\n(gradients = .*?)^```", page, re.MULTILINE | re.DOTALL)
    params, expected = parameters(), parameters()
    for p, e, g in zip(params, expected, gradients(0), strict=True):
        p.main_grad, e.grad = g.clone(), g.clone()
    params[0].main_grad, params[0].grad = None, params[0].main_grad  # a mixture
    exec(program, {"torch": torch, "optimizer": FusedAdam(params), "max_norm": 0.5})
    torch.nn.utils.clip_grad_norm_(expected, 0.5)
    assert torch.equal(params[0].grad, expected[0].grad) and torch.equal(params[1].main_grad, expected[1].grad)
