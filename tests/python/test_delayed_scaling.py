"""Delayed scaling: the update of scales, and when regions update them."""

from __future__ import annotations

import copy
import math

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


def call(linear, backward=True, **options):
    x = torch.full([16, 32], 2.0, dtype=torch.bfloat16, requires_grad=True)
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
    for ignored in (good.double(), good[None], -good, torch.zeros(0)):
        assert attempt(ignored) and scales(linear) == [224, 1792, 114688]
    for _ in range(300):
        state = good.clone()
        at = torch.randint(len(state), [3], generator=generator)
        state[at] = torch.randn(3, generator=generator) * 10.0 ** torch.randint(-9, 9, [3], generator=generator)
        attempt(state)


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
