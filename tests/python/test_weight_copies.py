"""Weights that modules quantize once for several micro-batches, and quantized Parameters."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pytest
import torch
import torch.nn.functional as F

import torchweft
from torchweft import ops
from torchweft.compat import transformer_engine as te_compat
from torchweft.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
STATELESS = [name for name in RECIPES if name != "delayed"]
ROWS, IN, OUT = 32, 64, 48


@pytest.fixture(name="te")
def installed():
    te_compat.install()
    import transformer_engine.pytorch as te

    yield te
    te_compat.uninstall()


def values(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).bfloat16()


def linear_of(te, seed: int = 0, **options) -> torch.nn.Module:
    torch.manual_seed(seed)
    return te.Linear(IN, OUT, params_dtype=torch.bfloat16, **options)


def step(module: torch.nn.Module, recipe, x: torch.Tensor, **call) -> list[torch.Tensor]:
    """Returns y and all gradients of one call in a region of its own."""
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    with torchweft.autocast(recipe=recipe):
        y = module(leaf, **call)
    y.float().square().sum().backward()
    return [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ---- micro-batches ------------------------------------------------------------------------------------------------


def kept(module: torch.nn.Module, name: str = "weight"):
    return module._weight_copies._copies[name].matrix


@pytest.mark.parametrize("name", STATELESS)
def test_copies_of_the_first_micro_batch_give_the_same_bits(te, name):
    recipe, linear = RECIPES[name], linear_of(te)
    plain = [step(linear, recipe, values(ROWS, IN, seed=i)) for i in range(3)]
    assert not linear._weight_copies._copies
    results = [step(linear, recipe, values(ROWS, IN, seed=0), is_first_microbatch=True)]
    copies = kept(linear)
    results += [step(linear, recipe, values(ROWS, IN, seed=i), is_first_microbatch=False) for i in (1, 2)]
    assert kept(linear) is copies
    assert all(equal(*pair) for pair in zip(plain, results, strict=True))
    step(linear, recipe, values(ROWS, IN), is_first_microbatch=True)
    assert kept(linear) is not copies


@pytest.mark.parametrize("change", ["in place", "replaced", "another recipe", "autocast"])
def test_copies_of_another_weight_are_not_used(te, change):
    recipe, linear, x = RECIPES["mxfp8"], linear_of(te), values(ROWS, IN)
    step(linear, recipe, x, is_first_microbatch=True)
    before = kept(linear)
    region = torch.autocast("cpu", torch.float16, enabled=change == "autocast")
    if change == "in place":
        with torch.no_grad():
            linear.weight.mul_(3)
    elif change == "replaced":
        linear.weight = torch.nn.Parameter(linear.weight.detach() * 3)
        gc.collect()
    elif change == "another recipe":
        recipe = RECIPES["block"]
    with region:
        results = step(linear, recipe, x, is_first_microbatch=False)
        assert equal(results, step(linear, recipe, x))
    assert kept(linear) is not before


def test_copies_made_without_gradients_are_completed(te):
    recipe, linear, x = RECIPES["block"], linear_of(te), values(ROWS, IN)
    with torch.no_grad(), torchweft.autocast(recipe=recipe):
        linear(x, is_first_microbatch=True)
    assert kept(linear).columnwise_data is None
    assert equal(step(linear, recipe, x, is_first_microbatch=False), step(linear, recipe, x))


@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer"])
def test_every_class_takes_copies(te, kind):
    torch.manual_seed(0)
    sizes = {"LayerNormLinear": (IN, OUT), "MultiheadAttention": (IN, 4), "TransformerLayer": (IN, 2 * IN, 4)}
    module = getattr(te, kind)(*sizes.get(kind, (IN, 2 * IN)), params_dtype=torch.bfloat16).eval()
    x = values(ROWS, 2, IN)
    plain = step(module, RECIPES["current"], x)
    assert equal(step(module, RECIPES["current"], x, is_first_microbatch=True), plain)
    assert equal(step(module, RECIPES["current"], x, is_first_microbatch=False), plain)


def test_delayed_scaling_records_the_weight_once(te):
    recipe, linear, x = RECIPES["delayed"], linear_of(te), values(ROWS, IN)
    amax = linear.weight.detach().abs().max().float()
    for first in (True, False, False):
        step(linear, recipe, x, is_first_microbatch=first)
    forward = linear._delayed_scaling["weight"][0]
    assert forward[2:, 1].tolist() == [0, 0, amax] and (forward[2:, 0] == x.abs().max()).all()


@pytest.mark.parametrize("name", RECIPES)
def test_checkpointing_repeats_with_the_same_copies(te, name):
    """Of delayed scaling the scale of the weight changes between the region of the copies and the repeated call."""
    gradients = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        mlp = te.LayerNormMLP(IN, 2 * IN, params_dtype=torch.bfloat16, checkpoint=checkpoint)
        results = [step(mlp, RECIPES[name], values(ROWS, IN, seed=i), is_first_microbatch=i == 0) for i in range(3)]
        gradients.append([t for result in results for t in result])
    assert equal(*gradients)


# ---- quantized Parameters -----------------------------------------------------------------------------------------


def quantized_linear(te, name: str, **options) -> torch.nn.Module:
    with te.quantized_model_init(recipe=RECIPES[name], **options):
        return linear_of(te)


def rounded(name: str, weight: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    if name == "delayed" and scale is None:
        scale = torch.ones(1)
    return RECIPES[name].quantizers().weight.quantize(weight, scale=scale).dequantize()


@pytest.mark.parametrize("name", RECIPES)
def test_weights_have_quantized_values(te, name):
    linear, plain = quantized_linear(te, name), linear_of(te)
    assert torch.equal(linear.weight, rounded(name, plain.weight.detach()))
    assert not torch.equal(linear.weight, plain.weight) and torch.equal(linear.bias, plain.bias)
    assert linear.primary_weights_in_fp8 and not plain.primary_weights_in_fp8
    x = values(ROWS, IN)
    torch.testing.assert_close(linear(x), F.linear(x, linear.weight, linear.bias))
    with torch.no_grad():
        plain.weight.copy_(linear.weight)
    assert equal(step(linear, RECIPES[name], x), step(plain, RECIPES[name], x))


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_quantizing_twice_changes_nothing(name, dtype):
    for seed, scale in enumerate((1e-3, 1.0, 7e4)):
        weight = (values(OUT, IN, seed=seed).float() * scale).to(dtype)
        once = rounded(name, weight)
        assert torch.equal(rounded(name, once), once)


@pytest.mark.parametrize("name", RECIPES)
def test_an_update_is_rounded(te, name):
    """The optimizer changes rounded values, and the next call rounds the result."""
    linear, x = quantized_linear(te, name), values(ROWS, IN)
    optimizer = torch.optim.SGD(linear.parameters(), lr=1e-3)
    for _ in range(3):
        step(linear, RECIPES[name], x)
        updated = linear.weight.detach().clone().add_(linear.weight.grad, alpha=-1e-3)
        optimizer.step()
        linear(x)  # also outside of a region
        scale = linear._delayed_scaling["weight"][0][0, 1:2] if name == "delayed" else None
        assert torch.equal(linear.weight, rounded(name, updated, scale))
        before = linear.weight._version
        linear(x)
        assert linear.weight._version == before


def test_delayed_weights_keep_their_scale(te):
    """Codes are not rounded again when the scale changes."""
    linear, x = quantized_linear(te, "delayed"), values(ROWS, IN)
    weight, codes = linear.weight.detach().clone(), kept(linear)
    for _ in range(3):
        step(linear, RECIPES["delayed"], x)
    assert linear._delayed_scaling["weight"][0][0, 1] != 1
    assert torch.equal(linear.weight, weight) and kept(linear) is codes


@pytest.mark.parametrize("how", ["data", "state_dict", "file", "deepcopy", "to", "replaced"])
def test_every_change_is_noticed(te, how):
    linear, other, x = quantized_linear(te, "mxfp8"), linear_of(te, seed=1), values(ROWS, IN)
    step(linear, RECIPES["mxfp8"], x)
    if how == "data":
        linear.weight.data.copy_(other.weight)
    elif how == "state_dict":
        linear.load_state_dict(other.state_dict())
    elif how == "file":
        file = io.BytesIO()
        torch.save(other.state_dict(), file)
        file.seek(0)
        linear.load_state_dict(torch.load(file, weights_only=True))
    elif how == "deepcopy":
        linear = copy.deepcopy(linear)
        linear.weight.data.copy_(other.weight)
    elif how == "to":
        linear = linear.to(torch.float32)
        linear.weight.data.copy_(other.weight)
    elif how == "replaced":
        linear.weight = torch.nn.Parameter(other.weight.detach().clone())
    linear(x.to(linear.weight.dtype))
    assert torch.equal(linear.weight, rounded("mxfp8", other.weight.detach()).to(linear.weight.dtype))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_a_module_has_its_weights(te, name, how):
    linear, x = quantized_linear(te, name, preserve_high_precision_init_val=True), values(ROWS, IN)
    optimizer = torch.optim.SGD(linear.parameters(), lr=1e-2)
    for _ in range(2):
        step(linear, RECIPES[name], x)
        optimizer.step()
    expected, weight = step(linear, RECIPES[name], x), linear.weight.detach().clone()
    other = how(linear)
    other(x)
    assert torch.equal(other.weight, weight)
    if name != "delayed":  # whose scales of x and dy have changed
        assert equal(step(other, RECIPES[name], x), expected)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARTS = [f"{side}_{part}" for side in ("rowwise", "columnwise") for part in ("data", "scales", "amax")]
MORE_RECIPES = {
    **RECIPES,
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True),
    "current, powers of two": Float8CurrentScaling(use_power_2_scales=True),
    "block, float32": Float8BlockScaling(use_f32_scales=True),
    "nvfp4, 1D": NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True, disable_2d_quantization=True),
}


def codes(module: torch.nn.Module, name: str = "weight") -> dict[str, torch.Tensor | None]:
    """All tensors of the copies: codes, scales and maxima of both directions."""
    return {part: getattr(kept(module, name), part) for part in PARTS}


def same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def wild(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Weights of many magnitudes, with zeros; for some seeds with NaN, infinities and -0."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(OUT, IN, generator=generator) * 10 ** (4 * torch.rand(1, generator=generator) - 2)
    if seed % 3 == 1:
        weight *= 10 ** torch.randn(OUT, IN, generator=generator)
    if seed % 3 == 2:
        weight[torch.rand(OUT, IN, generator=generator) < 0.9] = 0
    if seed == 3:
        weight[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    return weight.to(dtype)


def through_state_dict(module: torch.nn.Module, other: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


def through_save(module: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": lambda module, _: copy.deepcopy(module),
    "deepcopy twice": lambda module, _: copy.deepcopy(copy.deepcopy(module)),
    "pickle": lambda module, _: pickle.loads(pickle.dumps(module)),
    "torch.save": lambda module, _: through_save(module),
    "state_dict": through_state_dict,
    "state_dict twice": lambda module, new: through_state_dict(through_state_dict(module, copy.deepcopy(new)), new),
}


@pytest.mark.parametrize("name", MORE_RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_has_the_same_codes(te, name, dtype, how):
    """A checkpoint has the values, and the scale of delayed scaling."""
    recipe, seeds = MORE_RECIPES[name], range(6)
    with te.quantized_model_init(recipe=recipe):
        linear, new = (te.Linear(IN, OUT, params_dtype=dtype) for _ in range(2))
    x = values(ROWS, IN).to(dtype)
    for seed in seeds:
        with torch.no_grad():
            linear.weight.copy_(wild(dtype, seed))
        step(linear, recipe, x)  # with delayed scaling the scale of the next weight changes
        weight, expected = linear.weight.detach().clone(), codes(linear)
        other = COPIES[how](linear, new)
        other(x)
        assert all(same_bits(expected[part], codes(other)[part]) for part in PARTS), seed
        assert same_bits(other.weight.detach(), weight) and same_bits(linear.weight.detach(), weight)
        results = (step(module, recipe, x) for module in (copy.deepcopy(linear), other))
        assert all(same_bits(*pair) for pair in zip(*results, strict=True))


CLASSES = {"LayerNormMLP": (IN, 2 * IN), "TransformerLayer": (IN, 2 * IN, 4), "GroupedLinear": (2, IN, OUT)}
# GroupedLinear does not support delayed scaling.
PAIRS = [(kind, name) for kind in CLASSES for name in MORE_RECIPES if (kind, name) != ("GroupedLinear", "delayed")]


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_every_class_copies_its_codes(te, kind, name):
    sizes = CLASSES[kind]
    with te.quantized_model_init(recipe=MORE_RECIPES[name]):
        module, new = (getattr(te, kind)(*sizes, params_dtype=torch.bfloat16) for _ in range(2))
    owners = [p for p, child in module.named_modules() if hasattr(child, "_weight_copies") and child._weights]
    assert owners
    for how in COPIES.values():
        other = how(module, copy.deepcopy(new))
        for path in owners:
            left, right = module.get_submodule(path), other.get_submodule(path)
            right._round_weights()
            assert left._weight_copies._copies.keys() == right._weight_copies._copies.keys()
            for weight in left._weight_copies._copies:
                assert all(same_bits(codes(left, weight)[part], codes(right, weight)[part]) for part in PARTS)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_has_the_initial_values(te, how):
    linear = quantized_linear(te, "nvfp4", preserve_high_precision_init_val=True)
    other = COPIES[how](linear, None)
    initial = linear.weight.get_high_precision_init_val()
    assert torch.equal(other.weight.get_high_precision_init_val(), initial)
    assert other.weight.get_high_precision_init_val() is not initial
    other.weight.clear_high_precision_init_val()
    assert linear.weight.get_high_precision_init_val() is initial
    assert COPIES[how](other, None).weight.get_high_precision_init_val() is None


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict"])
def test_master_weights_of_a_copy_are_equal(te, how):
    """FusedAdam keeps the values that the quantized Parameters cannot hold."""
    linear, new = quantized_linear(te, "mxfp8"), quantized_linear(te, "mxfp8")
    make = lambda module: torchweft.optim.FusedAdam(module.parameters(), lr=1e-2, master_weights=True)  # noqa: E731
    optimizer, x = make(linear), values(ROWS, IN)
    for _ in range(2):
        step(linear, RECIPES["mxfp8"], x)
        optimizer.step()
    linear(x)
    other = COPIES[how](linear, new)
    resumed = make(other)
    resumed.load_state_dict(optimizer.state_dict())
    for _ in range(2):
        for p, q in zip(linear.parameters(), other.parameters(), strict=True):
            assert same_bits(optimizer.state[p]["master_param"], resumed.state[q]["master_param"])
        assert equal(step(linear, RECIPES["mxfp8"], x), step(other, RECIPES["mxfp8"], x))
        optimizer.step(), resumed.step()
        linear(x), other(x)
        assert all(same_bits(codes(linear)[part], codes(other)[part]) for part in PARTS)


def test_old_checkpoint_of_delayed_scaling_loads(te):
    """Without the scales of quantized Parameters, which are then rounded again."""
    linear, other = quantized_linear(te, "delayed"), quantized_linear(te, "delayed")
    step(linear, RECIPES["delayed"], values(ROWS, IN))
    state = linear.state_dict()
    state["_extra_state"] = state["_extra_state"][:-1]
    other.load_state_dict(state)
    other(values(ROWS, IN))
    assert torch.equal(other._delayed_scaling["weight"][0], linear._delayed_scaling["weight"][0])
    plain = linear_of(te)
    plain.load_state_dict(linear.state_dict())  # ignores them
    assert torch.equal(plain._delayed_scaling["weight"][0], linear._delayed_scaling["weight"][0])


def test_codes_of_nan_are_made_once(te):
    linear, x = quantized_linear(te, "mxfp8"), values(ROWS, IN)
    with torch.no_grad():
        linear.weight[0, 0] = float("nan")
    linear(x)
    before = kept(linear)
    linear(x)
    assert kept(linear) is before


def test_evaluation_between_steps(te):
    """The first call after an optimizer step is made without gradients; the weight's maximum counts, too."""
    linear, x = quantized_linear(te, "delayed"), values(ROWS, IN)
    optimizer = torch.optim.SGD(linear.parameters(), lr=1e-2)
    for mode in (torch.no_grad, torch.inference_mode):
        step(linear, RECIPES["delayed"], x)
        optimizer.step()
        with mode(), torchweft.autocast(recipe=RECIPES["delayed"]):
            linear(x)
        step(linear, RECIPES["delayed"], x)
        assert linear._delayed_scaling["weight"][0][-1, 1] > 0
        plain = linear_of(te)
        with mode(), torchweft.autocast(recipe=RECIPES["current"]):
            plain(x, is_first_microbatch=True)
        step(plain, RECIPES["current"], x, is_first_microbatch=False)


def test_tensors_of_others_are_not_written(te):
    """What functional_call passes, and weights that a parametrization computes."""
    linear, x = quantized_linear(te, "mxfp8"), values(ROWS, IN)
    given = values(OUT, IN, seed=3)
    before = given.clone()
    with torchweft.autocast(recipe=RECIPES["mxfp8"]):
        y = torch.func.functional_call(linear, {"weight": given}, (x,))
    assert torch.equal(given, before) and y.shape == (ROWS, OUT)
    plain = linear_of(te)
    torch.nn.utils.parametrizations.weight_norm(plain)
    with torchweft.autocast(recipe=RECIPES["mxfp8"]):
        assert torch.equal(plain(x, is_first_microbatch=True), plain(x))


def test_a_shared_weight_is_written_once(te):
    first, second, x = quantized_linear(te, "mxfp8"), quantized_linear(te, "mxfp8"), values(ROWS, IN)
    second.weight = first.weight
    first(x), second(x)
    with torch.no_grad():
        first.weight.mul_(1.7)
    y = first(x.clone().requires_grad_())
    second(x)
    y.sum().backward()  # the weight that it saved has not changed


def test_histories_keep_their_length(te):
    linear, x = quantized_linear(te, "delayed"), values(ROWS, IN)
    longer = DelayedScaling(amax_history_len=9)
    for _ in range(3):
        step(linear, longer, x)
        with torch.no_grad():
            linear.weight.mul_(1.1)
    assert len(linear._delayed_scaling["weight"][0]) == 10


def test_deferred_weights(te):
    with te.quantized_model_init(recipe=RECIPES["current"]):
        linear = te.Linear(IN, OUT, params_dtype=torch.bfloat16, device="meta")
    step(linear, RECIPES["current"], values(ROWS, IN))
    weight = linear.weight.detach()
    assert not weight.is_meta and torch.equal(weight, rounded("current", weight))


def test_initial_values_are_preserved(te):
    linear, plain = quantized_linear(te, "nvfp4", preserve_high_precision_init_val=True), linear_of(te)
    assert torch.equal(linear.weight.get_high_precision_init_val(), plain.weight)
    linear.weight.clear_high_precision_init_val()
    assert linear.weight.get_high_precision_init_val() is None
    assert not hasattr(quantized_linear(te, "nvfp4").weight, "get_high_precision_init_val")


def test_autocast_dtype(te):
    with te.fp8_model_init(recipe=RECIPES["current"]):
        linear = te.Linear(IN, OUT, params_dtype=torch.float32)
    plain = te.Linear(IN, OUT, params_dtype=torch.float32)
    plain.load_state_dict(linear.state_dict())
    for module in (linear, plain):
        with torch.autocast("cpu", torch.bfloat16), torchweft.autocast(recipe=RECIPES["current"]):
            module.y = module(values(ROWS, IN).float())
    assert linear.y.dtype == torch.bfloat16
    torch.testing.assert_close(linear.y, plain.y)


def test_regions_and_mistakes(te):
    manager = te.fp8.FP8GlobalStateManager
    with te.quantized_model_init(), te.quantized_model_init(enabled=False):
        assert not te.Linear(2, 2).primary_weights_in_fp8 and not manager.with_fp8_parameters()
        torchweft.ops.Linear(2, 2)
    with te.fp8_model_init():
        assert manager.with_fp8_parameters()
        for make in (ops.Linear, ops.BasicLinear, lambda n, m: ops.GroupedLinear(2, n, m)):
            with pytest.raises(NotImplementedError, match="outside of quantized_model_init"):
                make(4, 4)
        te.Linear(16, 16)(torch.ones(16, 16))  # builds its operations here
    with pytest.raises(TypeError, match="expected a recipe"), te.quantized_model_init(recipe="mxfp8"):
        pass
    linear = quantized_linear(te, "mxfp8")
    with pytest.raises(RuntimeError, match="recipe mismatch: its weights .* MXFP8BlockScaling.* has Float8Current"):
        step(linear, RECIPES["current"], values(ROWS, IN))


def test_grouped_linear(te):
    with te.quantized_model_init(recipe=RECIPES["current"]):
        grouped = te.GroupedLinear(2, IN, OUT, params_dtype=torch.bfloat16)
    x, splits = values(ROWS, IN), [ROWS // 2, ROWS // 2]
    for weight in (grouped.weight0, grouped.weight1):
        assert torch.equal(weight, rounded("current", weight.detach()))
    step(grouped, RECIPES["current"], x, m_splits=splits)
    with pytest.raises(NotImplementedError, match="delayed"), te.quantized_model_init(recipe=RECIPES["delayed"]):
        te.GroupedLinear(2, IN, OUT)
    with pytest.raises(RuntimeError, match="recipe mismatch"):
        step(grouped, RECIPES["mxfp8"], x, m_splits=splits)


def test_layer_trains(te):
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=RECIPES["mxfp8"]):
        layer = te.TransformerLayer(IN, 2 * IN, 4, params_dtype=torch.bfloat16)
    optimizer, x = torch.optim.SGD(layer.parameters(), lr=0.1), values(ROWS, 2, IN)
    losses = []
    for _ in range(6):
        with torchweft.autocast(recipe=RECIPES["mxfp8"]):
            loss = F.mse_loss(layer(x).float(), torch.zeros(ROWS, 2, IN))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_compiled_call(te):
    linear, x = quantized_linear(te, "mxfp8"), values(ROWS, IN)
    compiled = torch.compile(linear, backend="aot_eager")
    with torch.no_grad():
        linear.weight.mul_(1.7)
    y = compiled(x)
    assert torch.equal(linear.weight, rounded("mxfp8", linear.weight.detach()))
    assert torch.equal(y, linear(x))
    with pytest.raises(RuntimeError, match="recipe mismatch"), torchweft.autocast(recipe=RECIPES["current"]):
        compiled(x)
    torch._dynamo.reset()
