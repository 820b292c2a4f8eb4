"""Delayed scaling: the update of scales, and when regions update them."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch

import torchweft
from torchweft import _C, ops, recipe
from torchweft._delayed_scaling import BACKWARD, FORWARD, state_of
from torchweft.quantization import Quantizer, gemm

STEPS = [2, 0.5, 0, math.inf, 0.25, 0.125, 0.0625, 0.03125]
SCALES = {
    "max": [224, 224, 224, 224, 224, 224, 224, 1792],
    "most_recent": [224, 896, 896, 896, 1792, 3584, 7168, 14336],
}
HISTORIES = [
    [0, 0, 0, 2],
    [0, 0, 2, 0.5],
    [0, 0, 2, 0.5],
    [0, 2, 0.5, math.inf],
    [0, 0.5, math.inf, 0.25],
    [0, math.inf, 0.25, 0.125],
    [0, 0.25, 0.125, 0.0625],
    [0, 0.125, 0.0625, 0.03125],
]


@pytest.mark.parametrize("algo", SCALES)
@pytest.mark.parametrize("reduced", [False, True])
def test_updates(algo, reduced):
    state = _C.make_delayed_state(4, 1)
    for amax, scale, history in zip(STEPS, SCALES[algo], HISTORIES, strict=True):
        if not reduced:
            state[1] = amax
        _C.update_delayed_state(state, torch.tensor([float(amax)]) if reduced else None, 448, 0, algo)
        assert state[:, 0].tolist() == [scale, *history]


def test_update_edges():
    state = _C.make_delayed_state(1, 2)
    state[1] = torch.tensor([3.0, 1e-40])
    _C.update_delayed_state(state, None, 57344, 2)
    assert state[0].tolist() == [torch.tensor(4778.6665).item(), torch.finfo(torch.float32).max]
    assert state[1].tolist() == [0, 0]
    with pytest.raises(ValueError, match="float32"):
        _C.update_delayed_state(state.double(), None, 448)
    with pytest.raises(ValueError, match="2 reduced maxima"):
        _C.update_delayed_state(state, torch.zeros(3), 448)
    with pytest.raises(ValueError, match="amax_history_len is 0"):
        _C.make_delayed_state(0, 1)


class PlainLinear:
    """Delayed scaling written out, of one linear without bias."""

    def __init__(self, length):
        self.maxima = {role: [] for role in ("input", "weight", "grad_output")}
        self.scales = dict.fromkeys(self.maxima, 1.0)
        self.length = length

    def quantize(self, role, tensor):
        made = Quantizer("delayed", format="e5m2" if role == "grad_output" else "e4m3")
        self.maxima[role].append(tensor.abs().max().float().item())
        return made.quantize(tensor, columnwise=True, scale=torch.tensor([self.scales[role]]))

    def update(self, *roles):
        for role in roles:
            largest = 57344 if role == "grad_output" else 448
            amax = max(self.maxima[role][-self.length :])
            self.scales[role] = (torch.tensor(float(largest)) / torch.tensor(amax)).item()

    def step(self, x, w, dy):
        q_x, q_w = self.quantize("input", x), self.quantize("weight", w)
        y = gemm(q_x, q_w)
        self.update("input", "weight")
        q_dy = self.quantize("grad_output", dy)
        dx = gemm(q_dy, q_w, b_columnwise=True)
        dw = gemm(q_dy, q_x, a_columnwise=True, b_columnwise=True)
        self.update("grad_output")
        return y, dx, dw


@pytest.mark.parametrize("length", [1, 3, 1024])
def test_steps_use_the_maxima_of_earlier_steps(length):
    torch.manual_seed(0)
    linear, plain = ops.Linear(96, 40, bias=False, dtype=torch.bfloat16), PlainLinear(length)
    made = recipe.DelayedScaling(amax_history_len=length)
    for step in range(6):
        x = (torch.randn(48, 96) * 4 ** (step % 3)).bfloat16().requires_grad_()
        dy = (torch.randn(48, 40) / 8 ** (step % 2)).bfloat16()
        with torchweft.autocast(recipe=made):
            y = linear(x)
        dx, dw = torch.autograd.grad(y, (x, linear.weight), dy)
        expected = plain.step(x.detach(), linear.weight.detach(), dy)
        for value, other in zip((y, dx, dw), expected, strict=True):
            assert torch.equal(value, other), step
        with torch.no_grad():
            linear.weight.mul_(1.25)
    forward, backward = state_of(op_of(linear), length)
    assert forward[0].tolist() == [plain.scales["input"], plain.scales["weight"]]
    assert backward[0].tolist() == [plain.scales["grad_output"]]


def op_of(linear):
    return linear._stages()[0]


def scales(linear, length=8):
    forward, backward = state_of(op_of(linear), length)
    return [*forward[0].tolist(), *backward[0].tolist()]


def call(linear, backward=True, first=2.0, **options):
    x = torch.full([16, 32], 2.0, dtype=torch.bfloat16)
    x[0, 0] = first
    x.requires_grad_()
    with torchweft.autocast(recipe=recipe.DelayedScaling(amax_history_len=8, **options)):
        y = linear(x)
    if backward:
        y.backward(torch.full_like(y, 0.5))
    return y


@pytest.fixture
def linear():
    made = ops.Linear(32, 16, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        made.weight.fill_(0.25)
    return made


def test_forward_is_updated_when_the_region_ends_and_backward_after_it(linear):
    y = call(linear, backward=False)
    assert scales(linear) == [224, 1792, 1]
    y.backward(torch.full_like(y, 0.5))
    assert scales(linear) == [224, 1792, 114688]


def test_micro_batches_of_one_region_are_one_step(linear):
    with torchweft.autocast(recipe=recipe.DelayedScaling(amax_history_len=8)):
        for value in (1.0, 4.0, 2.0):
            y = linear(torch.full([16, 32], value, dtype=torch.bfloat16))
            assert scales(linear)[:2] == [1, 1]
            y.backward(torch.full_like(y, value))
    forward, _ = state_of(op_of(linear), 8)
    assert forward[1:, 0].tolist() == [0] * 7 + [4] and scales(linear)[0] == 112


def test_regions_within_others_update_with_the_outermost(linear):
    x = torch.full([16, 32], 2.0, dtype=torch.bfloat16)
    made = recipe.DelayedScaling(amax_history_len=8)
    with torchweft.autocast(recipe=made):
        with torchweft.autocast(recipe=made):
            linear(x)
        assert scales(linear)[0] == 1
    assert scales(linear)[0] == 224
    with torchweft.autocast(enabled=False):
        with torchweft.autocast(recipe=made):
            linear(x * 2)
        assert scales(linear)[0] == 112


def test_evaluation_does_not_change_the_state(linear):
    call(linear)
    before = [part.clone() for part in state_of(op_of(linear), 8)]
    with torch.no_grad(), torchweft.autocast(recipe=recipe.DelayedScaling(amax_history_len=8)):
        first = linear(torch.full([16, 32], 64.0, dtype=torch.bfloat16))
        second = linear(torch.full([16, 32], 64.0, dtype=torch.bfloat16))
    assert torch.equal(first, second)
    for part, old in zip(state_of(op_of(linear), 8), before, strict=True):
        assert torch.equal(part, old)


def test_repeated_calls_of_checkpointing_do_not_update(linear):
    def inner(t):
        with torchweft.autocast(recipe=recipe.DelayedScaling(amax_history_len=8)):
            return linear(t)

    x = torch.full([16, 32], 2.0, dtype=torch.bfloat16, requires_grad=True)
    torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False).sum().backward()
    forward, backward = state_of(op_of(linear), 8)
    assert forward[1:, 0].tolist() == [0] * 7 + [2] and backward[1:, 0].tolist() == [0] * 7 + [1]


def test_a_shorter_history_keeps_the_newest(linear):
    for value in (1, 2, 3):
        with torchweft.autocast(recipe=recipe.DelayedScaling(amax_history_len=8)):
            linear(torch.full([16, 32], float(value), dtype=torch.bfloat16))
    forward, _ = state_of(op_of(linear), 3)
    assert forward[1:, 0].tolist() == [0, 2, 3]
    forward, _ = state_of(op_of(linear), 5)
    assert forward[1:, 0].tolist() == [0, 0, 0, 2, 3]


def test_functions_of_the_user(linear):
    other = ops.Linear(32, 16, bias=False, dtype=torch.bfloat16)
    other.load_state_dict(linear.state_dict())
    functions = {
        "amax_compute_algo": lambda history: history.amax(0),
        "scaling_factor_compute_algo": lambda amax, scale, largest, made: torch.full_like(amax, largest) / amax,
    }
    for _ in range(3):
        assert torch.equal(call(linear), call(other, **functions))
    assert scales(linear) == scales(other)


def test_margin_and_format(linear):
    call(linear, margin=1, fp8_format=recipe.Format.E4M3)
    assert scales(linear) == [112, 896, 448]


def test_layers_of_a_model_have_states_of_their_own():
    model = torchweft.Sequential(
        ops.Linear(32, 64, dtype=torch.bfloat16), ops.GELU(), ops.Linear(64, 32, dtype=torch.bfloat16)
    )
    for _ in range(2):
        y = call(model)
    assert y.isfinite().all()
    first, second = (state_of(op_of(model[i]), 8)[FORWARD][0, 0].item() for i in (0, 2))
    assert first == 224 and second not in (1, 224)
    assert all(state_of(op_of(model[i]), 8)[BACKWARD][0, 0] != 1 for i in (0, 2))


def test_state_dict_and_copies_have_the_state(linear, tmp_path):
    for _ in range(3):
        call(linear)
    torch.save(linear.state_dict(), tmp_path / "state.pt")
    other = ops.Linear(32, 16, bias=False, dtype=torch.bfloat16)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    copied = copy.deepcopy(linear)
    for made in (other, copied):
        assert torch.equal(call(made), call(linear)) and scales(made) == scales(linear)
        linear.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    te = ops.Linear(32, 16, bias=False, dtype=torch.bfloat16, te_keys=True)
    te.load_state_dict(linear.state_dict())
    assert set(te.state_dict()) == {"basic_ops.0.weight", "_extra_state", "basic_ops.0._extra_state"}
    other.load_state_dict(te.state_dict())
    assert scales(other) == scales(linear)
    assert set(ops.Linear(4, 4).state_dict()) == {"weight", "bias"}


def test_mutated_states_raise_or_load(linear):
    call(linear)
    good = linear.state_dict()["_extra_state"]
    generator = torch.Generator().manual_seed(0)

    def attempt(state):
        try:
            linear.load_state_dict({**linear.state_dict(), "_extra_state": state})
        except ValueError as error:
            assert "_extra_state" in str(error)
            return False
        forward, backward = state_of(op_of(linear), 8)
        assert (forward[0] > 0).all() and (backward[0] > 0).all()
        return True

    assert attempt(good)
    negative = good.clone()
    negative[2] = -1
    assert not any(attempt(state) for state in (good[:-1], good[:2], negative))
    assert attempt(good.double()) and scales(linear) == [224, 1792, 114688]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a state with another version
        for _ in range(300):
            state = good.clone()
            at = torch.randint(len(state), [3], generator=generator)
            state[at] = torch.randn(3, generator=generator) * 10.0 ** torch.randint(-9, 9, [3], generator=generator)
            attempt(state)


class SubclassOfTensor(torch.Tensor):
    pass


UNUSABLE = {
    "bfloat16": (lambda good: good.bfloat16(), "values of bfloat16, expected .* is float32.*convert a state_dict"),
    "float16": (lambda good: good.half(), "values of float16"),
    "int32": (lambda good: good.int(), "values of int32"),
    "bool": (lambda good: good.bool(), "values of bool"),
    "complex64": (lambda good: good.to(torch.complex64), "values of complex64"),
    "other version": (lambda good: -good, "values of float32"),
    "truncated at the start": (lambda good: good[1:], "values of float32"),
    "one value": (lambda good: good[:1], "1 values of float32"),
    "bytes of float32": (lambda good: good.view(torch.uint8), "is damaged"),
    "two dimensions": (lambda good: good[None], r"shape \[1, 29\], expected one dimension"),
    "scalar": (lambda good: good[0], r"shape \[\], expected one dimension"),
    "meta device": (lambda good: good.to("meta"), "on the meta device and has no values"),
    "sparse": (lambda good: good.to_sparse(), "sparse_coo, expected a dense"),
    "subclass": (lambda good: good.as_subclass(SubclassOfTensor), "it is a SubclassOfTensor"),
    "number": (lambda good: 7, "it is int, expected a tensor"),
    "bytes": (lambda good: b"state", "it is bytes, expected a tensor"),
    "numpy": (lambda good: good.numpy(), "it is ndarray, expected a tensor"),
    "list": (lambda good: good.tolist(), "it is list, expected a tensor"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_unusable_states_are_named_in_a_warning(linear, kind):
    change, message = UNUSABLE[kind]
    call(linear)
    state = linear.state_dict()
    state["_extra_state"] = change(state["_extra_state"])
    with pytest.warns(UserWarning, match=f"^_extra_state is ignored: scales of delayed scaling start at 1.*{message}"):
        linear.load_state_dict(state)
    assert "_extra_state" not in linear.state_dict()


@pytest.mark.parametrize("empty", [None, torch.empty(0), torch.empty(0, dtype=torch.uint8), torch.empty(0, 3), b""])
def test_empty_states_start_anew(linear, empty):
    call(linear)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear.load_state_dict(linear.state_dict() | {"_extra_state": empty})
    assert "_extra_state" not in linear.state_dict()


@pytest.mark.parametrize("kind", ["own", "Parameter", "float64"])
def test_states_of_other_forms_are_used(linear, kind):
    call(linear)
    state, expected = linear.state_dict(), scales(linear)
    if kind == "Parameter":
        state["_extra_state"] = torch.nn.Parameter(state["_extra_state"])
    elif kind == "float64":
        state = {key: value.double() for key, value in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        linear.load_state_dict(state)
    assert scales(linear) == expected


@pytest.mark.parametrize("value", [1.4e-45, 1e-40, 0.0, -0.0, -1.0, math.inf, -math.inf, math.nan])
def test_scales_that_no_state_has_raise(linear, value):
    call(linear)
    for at in (2, 3, 2 + 2 * 9):  # of input, weight and gradient
        state = linear.state_dict()
        state["_extra_state"][at] = value
        with pytest.raises(ValueError, match=rf"_extra_state has a scale of {value:.3g}, expected a finite number"):
            linear.load_state_dict(state)


@pytest.mark.parametrize("value", [-1.0, -math.inf, math.nan])
def test_maxima_that_no_state_has_raise(linear, value):
    call(linear)
    state = linear.state_dict()
    state["_extra_state"][-1] = value
    with pytest.raises(ValueError, match=rf"_extra_state has a maximum magnitude of {value:.3g}, expected 0 or more"):
        linear.load_state_dict(state)


def test_states_of_any_training_load(linear):
    for value in (math.nan, math.inf, -math.inf, 3e38, 1e-45, 0.0):
        call(linear, first=value)
        linear.load_state_dict(linear.state_dict())


def test_states_of_operations_without_scales_are_named_in_a_warning():
    module = torchweft.Sequential(ops.RMSNorm(4), ops.Linear(4, 4), ops.GroupedLinear(2, 4, 4))
    state, foreign = module.state_dict(), torch.ones(3, dtype=torch.uint8)
    for key, name in (
        ("0._extra_state", "RMSNorm"),
        ("1.basic_ops.1._extra_state", "Linear"),
        ("2._extra_state", "GroupedLinear"),
    ):
        with pytest.warns(UserWarning, match=f"^{key} is ignored: {name} has no such state"):
            module.load_state_dict(state | {key: foreign})


def test_wrong_options_raise(linear):
    with pytest.raises(ValueError, match="amax_compute_algo is 'mean'"):
        call(linear, amax_compute_algo="mean")
    with (
        pytest.raises(ValueError, match="amax_history_len is 0"),
        torchweft.autocast(recipe=recipe.DelayedScaling(amax_history_len=0)),
    ):
        pass
    with pytest.raises(NotImplementedError, match="override_linear_precision"):
        recipe.DelayedScaling(override_linear_precision=(False, False, True))


def test_unsupported_uses_raise(linear):
    with pytest.raises(NotImplementedError, match="Float8CurrentScaling"):
        call(torch.compile(linear, backend="aot_eager", fullgraph=True))
    with pytest.raises(ValueError, match="backward_override"):
        call(linear, backward_override="dequantized")
    grouped = ops.GroupedLinear(2, 8, 8)
    with torchweft.autocast(recipe=recipe.DelayedScaling()), pytest.raises(NotImplementedError, match="GroupedLinear"):
        grouped(torch.ones(4, 8), torch.tensor([2, 2]))


def test_state_that_inference_created_trains():
    linear = ops.Linear(16, 16)
    delayed = recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=lambda history: history.amax(0))
    with torch.inference_mode(), torchweft.autocast(recipe=delayed):
        linear(torch.randn(4, 16))
        linear.load_state_dict(linear.state_dict())
    with torchweft.autocast(recipe=delayed):
        y = linear(torch.randn(4, 16))
    y.sum().backward()
    assert not any(part.is_inference() for part in linear._delayed_scaling)
