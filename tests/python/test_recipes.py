"""Linears under recipes: the bytes and GEMMs of torchweft.quantization, in forward and backward."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import threading

import pytest
import torch

import torchweft
from torchweft import ops, recipe
from torchweft.quantization import Quantizer, gemm

RECIPES = {
    "current": recipe.Float8CurrentScaling(),
    "current, powers of two, E4M3": recipe.Float8CurrentScaling(use_power_2_scales=True, fp8_format=recipe.Format.E4M3),
    "block": recipe.Float8BlockScaling(),
    "block, float32 scales": recipe.Float8BlockScaling(use_f32_scales=True, fp8_format=recipe.Format.HYBRID),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "mxfp8, square blocks": recipe.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4, plain": recipe.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
    "nvfp4, 4over6": recipe.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE"
    ),
}
OVERRIDES = [None, "high_precision", "dequantized"]


def inputs(rows=48, width=96, features=40, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    dy = torch.randn(rows, features, generator=generator).to(dtype)
    return x, dy


def plain_linear(quantizers, x, w, dy, bias=None):
    """Returns y, dx and dW, from torchweft.quantization."""
    override = quantizers.backward_override
    q_x = quantizers.input.quantize(x, columnwise=True)
    q_w = quantizers.weight.quantize(w, columnwise=True)
    y = gemm(q_x, q_w, bias=bias)
    if override is not None:
        x_back, w_back = (x, w) if override == "high_precision" else (q_x.dequantize(), q_w.dequantize())
        return y, dy @ w_back, dy.t() @ x_back
    q_dy = quantizers.grad_output.quantize(dy, columnwise=True)
    return y, gemm(q_dy, q_w, b_columnwise=True), gemm(q_dy, q_x, a_columnwise=True, b_columnwise=True)


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_made_of_quantized_gemms(name, override, bias):
    chosen = dataclasses.replace(RECIPES[name], backward_override=override)
    linear = ops.Linear(96, 40, bias=bias, dtype=torch.bfloat16)
    x, dy = inputs()
    with torchweft.autocast(recipe=chosen):
        y = linear(x)
    y.backward(dy)
    expected = plain_linear(
        chosen.quantizers(), x.detach(), linear.weight.detach(), dy, linear.bias.detach() if bias else None
    )
    exact = override is None
    for value, plain in zip((y, x.grad, linear.weight.grad), expected, strict=True):
        torch.testing.assert_close(value, plain, rtol=0 if exact else 1.6e-2, atol=0 if exact else 1e-2)
    if bias:
        torch.testing.assert_close(linear.bias.grad, dy.float().sum(0).bfloat16(), rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in RECIPES
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        if name != "nvfp4" or dtype == torch.bfloat16  # the Hadamard transform requires it
    ],
)
def test_linear_is_near_plain_math(name, dtype):
    chosen, linear = RECIPES[name], ops.Linear(96, 40, bias=False, dtype=dtype)
    x, dy = inputs(dtype=dtype)
    with torchweft.autocast(recipe=chosen):
        y = linear(x)
    y.backward(dy)
    w64, x64, dy64 = linear.weight.detach().double(), x.detach().double(), dy.double()
    bound = 0.25 if "nvfp4" in name else 0.08  # of the norm: the formats round by up to 1/4 and 1/16
    for value, plain in ((y, x64 @ w64.t()), (x.grad, dy64 @ w64), (linear.weight.grad, dy64.t() @ x64)):
        error = (value.double() - plain).norm() / plain.norm()
        assert 0.01 < error < bound, f"{error:.3f}"  # bfloat16 alone rounds by 0.002


def test_stochastic_rounding_repeats_with_the_seed_and_is_unbiased():
    linear = ops.Linear(64, 48, bias=False, dtype=torch.bfloat16)
    x, dy = inputs(32, 64, 48)

    def gradient(seed):
        torch.manual_seed(seed)
        with torchweft.autocast(recipe=recipe.NVFP4BlockScaling(disable_rht=True)):
            y = linear(x)
        return torch.autograd.grad(y, x, dy)[0]

    assert torch.equal(gradient(1), gradient(1)) and not torch.equal(gradient(1), gradient(2))
    with torchweft.autocast(recipe=recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)):
        y = linear(x)
    exact = dy.double() @ RECIPES["nvfp4"].quantizers().weight.quantize(linear.weight.detach()).dequantize().double()
    mean = torch.stack([gradient(seed).double() for seed in range(50)]).mean(0)
    rounded = torch.autograd.grad(y, x, dy)[0].double()
    assert (mean - exact).norm() < 0.6 * (rounded - exact).norm()


# ---- regions ------------------------------------------------------------------------------------------------------


def test_regions_nest_and_end():
    linear = ops.Linear(64, 32, dtype=torch.bfloat16)
    x = inputs(8, 64)[0].detach()
    plain = linear(x)
    with torchweft.autocast(recipe=RECIPES["mxfp8"]):
        quantized = linear(x)
        with torchweft.autocast(enabled=False):
            assert torch.equal(linear(x), plain)
        with torchweft.autocast(recipe=RECIPES["current"]):
            current = linear(x)
        assert torch.equal(linear(x), quantized)
    assert torch.equal(linear(x), plain)
    assert len({tuple(t.flatten().tolist()) for t in (plain, quantized, current)}) == 3
    with pytest.raises(RuntimeError, match="of the region"), torchweft.autocast(recipe=RECIPES["current"]):
        raise RuntimeError("of the region")
    assert torch.equal(linear(x), plain)


def test_regions_belong_to_threads():
    linear, x = ops.Linear(64, 32, dtype=torch.bfloat16), inputs(8, 64)[0].detach()
    plain, found = linear(x), []
    with torchweft.autocast(recipe=RECIPES["current"]):
        thread = threading.Thread(target=lambda: found.append(linear(x)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], plain)


def test_backward_runs_after_the_region():
    linear, (x, dy) = ops.Linear(96, 40, dtype=torch.bfloat16), inputs()
    with torchweft.autocast(recipe=RECIPES["mxfp8"]):
        y = linear(x)
        inside = torch.autograd.grad(y, x, dy, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], inside)


UNSUPPORTED = [
    recipe.CustomRecipe(qfactory=lambda role: Quantizer("delayed")),
    recipe.Float8CurrentScaling(fp8_dpa=True),
]


@pytest.mark.parametrize("made", UNSUPPORTED, ids=lambda made: type(made).__name__)
def test_unsupported_recipes_raise(made):
    with pytest.raises(NotImplementedError, match=type(made).__name__), torchweft.autocast(recipe=made):
        pass


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", RECIPES)
def test_custom_recipes_equal_those_of_the_library(name, override):
    made = dataclasses.replace(RECIPES[name], backward_override=override).quantizers()
    roles = []

    def qfactory(role):
        roles.append(role)
        return getattr(made, role.tensor_type)

    custom = recipe.CustomRecipe(qfactory, backward_override=override)
    assert custom.quantizers() == made and custom.custom() and not custom.mxfp8()
    assert roles == [recipe.QuantizerRole("linear", tensor) for tensor in ("input", "weight", "grad_output")]


def test_custom_recipe_quantizes():
    def qfactory(role):
        return Quantizer("mxfp8", format="e5m2" if role.tensor_type == "input" else "e4m3")

    custom, (x, dy) = recipe.CustomRecipe(qfactory), inputs()
    linear = ops.Linear(96, 40, bias=False, dtype=torch.bfloat16)
    with torchweft.autocast(recipe=custom):
        y = linear(x)
    dx, dw = torch.autograd.grad(y, (x, linear.weight), dy)
    expected = plain_linear(custom.quantizers(), x.detach(), linear.weight.detach(), dy)
    for value, wanted in zip((y, dx, dw), expected, strict=True):
        assert torch.equal(value, wanted)


def test_bad_factories_raise():
    with pytest.raises(TypeError, match="qfactory returned None for the input of a linear"):
        recipe.CustomRecipe(lambda role: None).quantizers()
    mixed = {"input": "mxfp8", "weight": "nvfp4", "grad_output": "mxfp8"}
    with pytest.raises(ValueError, match="same scaling"):
        recipe.CustomRecipe(lambda role: Quantizer(mixed[role.tensor_type])).quantizers()
    with pytest.raises(ValueError, match="backward_override is 'bf16'"):
        recipe.CustomRecipe(lambda role: Quantizer("mxfp8"), backward_override="bf16").quantizers()


BAD_OPTIONS = {
    "two square blocks": (recipe.Float8BlockScaling(x_block_scaling_dim=2), "at most one of them may be 2"),
    "dimension": (recipe.Float8BlockScaling(x_block_scaling_dim=3), "expected 1 or 2"),
    "format": (recipe.MXFP8BlockScaling(fp8_format=recipe.Format.E5M2), 'fp8_format is "E5M2"'),
    "override": (recipe.MXFP8BlockScaling(backward_override="bf16"), "expected one of high_precision, dequantized"),
    "4over6 and transform": (recipe.NVFP4BlockScaling(nvfp4_4over6="all"), "excludes random_hadamard_transform"),
    "NVFP4's format": (recipe.NVFP4BlockScaling(fp8_format=recipe.Format.HYBRID), 'fp8_format is "HYBRID"'),
    "scope": (recipe.NVFP4BlockScaling(nvfp4_4over6="some"), "none, weights, activations, all"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_raise_at_the_region(name):
    made, message = BAD_OPTIONS[name]
    with pytest.raises(ValueError, match=message), torchweft.autocast(recipe=made):
        pass


def test_wrong_arguments_raise():
    with pytest.raises(TypeError, match="recipe=..."):
        torchweft.autocast(recipe.MXFP8BlockScaling())
    with pytest.raises(TypeError, match="recipe is 'mxfp8'"):
        torchweft.autocast(recipe="mxfp8")
    with pytest.raises(TypeError, match="recipe is None"):
        torchweft.autocast()
    for arguments in ((torch.bfloat16,), ("cpu",), ("cpu", torch.bfloat16), (torch.device("cpu"),)):
        with pytest.raises(TypeError, match=r"enabled is .*use torch\.autocast"):
            torchweft.autocast(*arguments)
    for enabled in (1, 0, None, 1.0, torch.tensor(True), []):
        with pytest.raises(TypeError, match="enabled is .*expected True or False"):
            torchweft.autocast(enabled, recipe=recipe.MXFP8BlockScaling())


def test_regions_are_reusable_and_decorate():
    linear, x = ops.Linear(64, 32, dtype=torch.bfloat16), inputs(8, 64)[0].detach()
    region = torchweft.autocast(recipe=RECIPES["mxfp8"])
    with region:
        first = linear(x)
        with region:
            assert torch.equal(linear(x), first)
        assert torch.equal(linear(x), first)
    with region:
        assert torch.equal(linear(x), first)
    assert torch.equal(region(linear.forward)(x), first) and not torch.equal(linear(x), first)


def test_threads_share_a_region_object():
    linear, x = ops.Linear(64, 32, dtype=torch.bfloat16), inputs(8, 64)[0].detach()
    shared, outer = torchweft.autocast(recipe=RECIPES["mxfp8"]), torchweft.autocast(recipe=RECIPES["current"])
    with shared:
        in_shared = linear(x)
    with outer:
        in_outer = linear(x)
    plain, found = linear(x), {}
    a_entered, b_entered, a_left = threading.Event(), threading.Event(), threading.Event()

    @shared
    def step(depth, entered, left):
        if depth:
            return step(depth - 1, entered, left)
        entered.set()
        left.wait(10)
        return linear(x)

    def with_outer_region():
        with outer:
            found["A, shared"] = step(2, a_entered, b_entered)
            found["A, after"] = linear(x)
        a_left.set()

    def without():
        a_entered.wait(10)
        found["B, shared"] = step(0, b_entered, a_left)
        found["B, after"] = linear(x)

    threads = [threading.Thread(target=target) for target in (with_outer_region, without)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {"A, shared": in_shared, "A, after": in_outer, "B, shared": in_shared, "B, after": plain}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_generators_leave_their_regions_in_any_order():
    linear, x = ops.Linear(64, 32, dtype=torch.bfloat16), inputs(8, 64)[0].detach()
    plain, regions = linear(x), {name: torchweft.autocast(recipe=RECIPES[name]) for name in ("mxfp8", "current")}
    expected = {name: region(linear.forward)(x) for name, region in regions.items()}

    def calls(name):
        with regions[name]:
            yield linear(x)

    first, second = calls("mxfp8"), calls("current")
    assert torch.equal(next(first), expected["mxfp8"]) and torch.equal(next(second), expected["current"])
    first.close()
    assert torch.equal(linear(x), expected["current"])
    second.close()
    assert torch.equal(linear(x), plain)


def test_a_region_is_left_in_the_thread_that_entered_it():
    region, errors = torchweft.autocast(recipe=RECIPES["mxfp8"]), []

    def leave():
        try:
            region.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    with region:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
    assert len(errors) == 1 and "did not enter" in errors[0]


def test_functions_whose_body_runs_later_are_not_decorated():
    region = torchweft.autocast(recipe=RECIPES["mxfp8"])

    def generator():
        yield

    async def coroutine():
        pass

    async def asynchronous_generator():
        yield

    for function in (generator, coroutine, asynchronous_generator, ops.Linear):
        with pytest.raises(TypeError, match="Open the region inside of it"):
            region(function)


@pytest.mark.parametrize("name", list(torchweft._C.recipe_fields()))
def test_defaults_are_those_of_the_library(name):
    made = getattr(recipe, name)()
    for field, default, _ in torchweft._C.recipe_fields()[name]:
        value = getattr(made, field)
        assert (value.name if isinstance(value, recipe.Format) else value) == default, field
    assert "Args:" in getattr(recipe, name).__doc__


def test_float64_raises():
    with (
        torchweft.autocast(recipe=RECIPES["current"]),
        pytest.raises(TypeError, match="float32, bfloat16 or float16"),
    ):
        ops.Linear(8, 8, dtype=torch.float64)(torch.ones(2, 8, dtype=torch.float64))


# ---- grouped linears ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", RECIPES)
def test_groups_of_a_grouped_linear_are_linears(name, override):
    chosen = dataclasses.replace(RECIPES[name], backward_override=override)
    splits = [16, 0, 32]
    grouped = ops.GroupedLinear(3, 96, 40, bias=True, dtype=torch.bfloat16)
    x, dy = inputs()
    with torchweft.autocast(recipe=chosen):
        y = grouped(x, torch.tensor(splits))
    y.backward(dy)
    for i, (rows, gradient, out, dx) in enumerate(
        zip(x.detach().split(splits), dy.split(splits), y.split(splits), x.grad.split(splits), strict=True)
    ):
        weight, bias = getattr(grouped, f"weight{i}"), getattr(grouped, f"bias{i}")
        if not len(rows):
            assert not weight.grad.any()
            continue
        expected = plain_linear(chosen.quantizers(), rows, weight.detach(), gradient, bias.detach())
        exact = {"rtol": 0, "atol": 0} if override is None else {"rtol": 1.6e-2, "atol": 1e-2}
        torch.testing.assert_close(out, expected[0], rtol=0, atol=0)
        torch.testing.assert_close(dx, expected[1], **exact)
        torch.testing.assert_close(weight.grad, expected[2], **exact)


def test_groups_draw_different_random_numbers():
    grouped = ops.GroupedLinear(2, 64, 48, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        grouped.weight1.copy_(grouped.weight0)
    x, dy = (t.repeat(2, 1).detach() for t in inputs(16, 64, 48))
    x.requires_grad_()
    with torchweft.autocast(recipe=recipe.NVFP4BlockScaling(disable_rht=True)):
        y = grouped(x, torch.tensor([16, 16]))
    y.backward(dy)
    first, second = x.grad.split(16)
    assert torch.equal(*y.split(16)) and not torch.equal(first, second)


# ---- with the rest of the library ---------------------------------------------------------------------------------


def block(width=64, **options):
    return torchweft.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(width, **options),
        ops.Linear(width, 2 * width, **options),
        ops.SwiGLU(),
        ops.Linear(width, width, **options),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


def run(module, x, dy, chosen):
    x = x.detach().requires_grad_()
    with torchweft.autocast(recipe=chosen):
        y = module(x)
    y.backward(dy)
    grads = [p.grad for p in module.parameters()]
    for p in module.parameters():
        p.grad = None
    return [y.detach(), x.grad, *grads]


CHOICES = {**RECIPES, "nvfp4, stochastic": recipe.NVFP4BlockScaling()}


def without_biases(width, **options):
    """A block whose operations, run one by one, round only what the fused ones round."""
    mlp = (ops.Linear(width, 2 * width, bias=False, **options), ops.SwiGLU())
    return torchweft.Sequential(ops.RMSNorm(width, **options), *mlp, ops.Linear(width, width, bias=False, **options))


@pytest.mark.parametrize("width", [64, 256])  # saves the inputs of linears; recomputes them
@pytest.mark.parametrize(("name", "override"), [("delayed", None), *itertools.product(CHOICES, OVERRIDES)])
def test_block_is_one_step_with_the_bits_of_separate_ones(name, width, override):
    chosen = recipe.DelayedScaling()
    if name != "delayed":
        chosen = dataclasses.replace(CHOICES[name], backward_override=override)
    torch.manual_seed(0)
    module, x = without_biases(width, dtype=torch.bfloat16), torch.randn(64, width).bfloat16()
    other, dy = copy.deepcopy(module), torch.randn_like(x)
    for _ in range(2):
        torch.manual_seed(1)
        fused = run(module, x, dy, chosen)
        with torchweft.fusion.without_rules():
            torch.manual_seed(1)
            unfused = run(other, x, dy, chosen)
        for i, (a, b) in enumerate(zip(fused, unfused, strict=True)):
            if override is None or i in (0, 4):
                assert torch.equal(a, b)
            else:  # backward quantizes nothing: after an activation, fused operations round once
                torch.testing.assert_close(a, b, rtol=2e-2, atol=0.1)
    with torchweft.autocast(recipe=chosen):
        plan = module.explain(x.requires_grad_()).data[0]
        assert [step["name"] for step in plan["forward"] + plan["backward"]] == ["mlp_block"] * 2


@pytest.mark.parametrize("norm_linear", [False, True])
@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_pipeline_is_the_same_fused_and_unfused(name, norm_linear):
    torch.manual_seed(0)
    module, x = block(dtype=torch.bfloat16), torch.randn(4, 8, 64).bfloat16()
    dy = torch.randn_like(x)
    with contextlib.ExitStack() as stack:
        if norm_linear:
            stack.enter_context(torchweft.fusion.without_rules("mlp_block"))
            stack.enter_context(torchweft.fusion.with_rules("norm_linear"))
        fused = run(module, x, dy, RECIPES[name])
    with torchweft.fusion.without_rules():
        unfused = run(module, x, dy, RECIPES[name])
    for a, b in zip(fused, unfused, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


def test_a_float64_residual_is_added_in_float64():
    x, residual = torch.randn(16, 64).bfloat16(), torch.randn(16, 64, dtype=torch.float64)
    add = torchweft.Sequential(ops.Linear(64, 64, dtype=torch.bfloat16), ops.AddExtraInput())
    with torchweft.autocast(recipe=RECIPES["mxfp8"]):
        fused = add(x, residual)
        with torchweft.fusion.without_rules():
            unfused = add(x, residual)
        plain = add[0](x)
    assert fused.dtype == torch.float64
    torch.testing.assert_close(fused, unfused, rtol=0, atol=2**-8 * plain.abs().max().item())


def test_explain_says_what_a_recipe_prevents():
    scaled = torchweft.Sequential(ops.Linear(64, 64, bias=False), ops.ConstantScale(2.5))
    with torchweft.autocast(recipe=RECIPES["mxfp8"]):
        text = str(scaled.explain(torch.randn(64, 64, requires_grad=True)))
    assert "a recipe quantizes a matched operation" in text and "quantized\n" in text
    module, x = block(dtype=torch.bfloat16), torch.randn(8, 64).bfloat16()
    with torchweft.autocast(recipe=RECIPES["mxfp8"]):
        data = module.explain(x).data[0]
    assert [note["op"] for note in data["quantized"]] == [2, 5] and "mxfp8" in data["quantized"][0]["text"]
    assert "a recipe quantizes" not in str(module.explain(x))


def test_tensors_are_quantized_after_torch_autocast_casts_them():
    linear = ops.Linear(96, 40, bias=False)
    x, dy = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torchweft.autocast(recipe=RECIPES["mxfp8"]):
        y = linear(x)
    y.backward(dy.bfloat16())
    plain = plain_linear(
        RECIPES["mxfp8"].quantizers(), x.detach().bfloat16(), linear.weight.detach().bfloat16(), dy.bfloat16()
    )
    assert y.dtype == torch.bfloat16 and torch.equal(y, plain[0])
    assert torch.equal(x.grad, plain[1].float()) and torch.equal(linear.weight.grad, plain[2].float())


def test_main_grad_accumulates():
    linear = ops.Linear(96, 40, bias=False, dtype=torch.bfloat16, accumulate_into_main_grad=True)
    linear.weight.main_grad = torch.ones(40, 96)
    x, dy = inputs()
    for _ in range(2):
        with torchweft.autocast(recipe=RECIPES["mxfp8"]):
            y = linear(x)
        y.backward(dy)
    quantizers = RECIPES["mxfp8"].quantizers()
    q_dy = quantizers.grad_output.quantize(dy, columnwise=True)
    q_x = quantizers.input.quantize(x.detach(), columnwise=True)
    dw = gemm(q_dy, q_x, a_columnwise=True, b_columnwise=True, dtype=torch.float32)
    torch.testing.assert_close(linear.weight.main_grad, 1 + 2 * dw, rtol=1e-6, atol=1e-5)


def test_weight_gradient_may_be_delayed():
    plain = ops.Linear(96, 40, bias=False, dtype=torch.bfloat16)
    delayed = ops.Linear(96, 40, bias=False, dtype=torch.bfloat16, delay_wgrad_compute=True)
    delayed.load_state_dict(plain.state_dict())
    x, dy = inputs()
    for linear in (plain, delayed):
        with torchweft.autocast(recipe=RECIPES["nvfp4"]):
            y = linear(x)
        y.backward(dy)
    assert delayed.weight.grad is None
    delayed.backward_dw()
    assert torch.equal(delayed.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("needs", ["input", "weight", "none"])
def test_only_needed_gradients_are_computed(needs):
    linear = ops.Linear(96, 40, bias=False, dtype=torch.bfloat16)
    linear.weight.requires_grad_(needs == "weight")
    x, dy = inputs()
    x.requires_grad_(needs == "input")
    with torchweft.autocast(recipe=RECIPES["block"]):
        y = linear(x)
    expected = plain_linear(RECIPES["block"].quantizers(), x.detach(), linear.weight.detach(), dy)
    assert torch.equal(y, expected[0])
    if needs == "none":
        assert not y.requires_grad
        return
    y.backward(dy)
    found = x.grad if needs == "input" else linear.weight.grad
    assert torch.equal(found, expected[1 if needs == "input" else 2])


def test_saved_tensors_are_the_quantized_copies():
    linear, (x, _) = ops.Linear(96, 40, bias=False, dtype=torch.bfloat16), inputs(1024)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(x)
        plain = sum(t.nbytes for t in saved if t.data_ptr() != linear.weight.data_ptr())
        saved.clear()
        with torchweft.autocast(recipe=RECIPES["mxfp8"]):
            linear(x)
    saved = [t for t in saved if t.data_ptr() != linear.weight.data_ptr()]
    assert {t.dtype for t in saved} == {torch.uint8} and sum(t.nbytes for t in saved) < 0.6 * plain


def test_hooks_may_return_part_of_a_pool():
    linear, (x, dy) = ops.Linear(96, 40, dtype=torch.bfloat16), inputs()

    def unpack(t):
        flat = t.flatten().view(torch.uint8)
        pool = torch.full([flat.numel() + 128], 255, dtype=torch.uint8)
        pool[64 : 64 + flat.numel()] = flat
        return pool[64 : 64 + flat.numel()].view(t.dtype).view(t.shape)

    for name in ("current", "block", "nvfp4"):
        with torchweft.autocast(recipe=RECIPES[name]):
            plain = linear(x)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
                pooled = linear(x)
        tensors = x, linear.weight
        for a, b in zip(torch.autograd.grad(pooled, tensors, dy), torch.autograd.grad(plain, tensors, dy), strict=True):
            assert torch.equal(a, b)


def test_checkpointing_with_the_region_inside():
    linear, (x, dy) = ops.Linear(96, 40, dtype=torch.bfloat16), inputs()

    def call(t):
        with torchweft.autocast(recipe=RECIPES["mxfp8"]):
            return linear(t)

    y = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(call(x), x, dy)[0])


@pytest.mark.parametrize("kind", ["linear", "linear, high precision", "grouped linear", "other recipe"])
def test_checkpointing_outside_of_the_region_raises(kind):
    x, dy = inputs()
    grouped = ops.GroupedLinear(2, 96, 40, dtype=torch.bfloat16)
    linear = ops.Linear(96, 40, dtype=torch.bfloat16)
    override = "high_precision" if kind == "linear, high precision" else None

    def call(t):
        return grouped(t, torch.tensor([16, 32])) if kind == "grouped linear" else linear(t)

    with torchweft.autocast(recipe=recipe.MXFP8BlockScaling(backward_override=override)):
        y = torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False)
    other = torchweft.autocast(kind == "other recipe", recipe=RECIPES["current"])
    with other, pytest.raises(torch.utils.checkpoint.CheckpointError):
        y.backward(dy)


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
def test_compiled_calls_use_the_recipe(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = block(dtype=torch.bfloat16), torch.randn(16, 64).bfloat16()
    dy = torch.randn_like(x)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for chosen in (RECIPES[name], RECIPES["block"], RECIPES[name]):
        for a, b in zip(run(compiled, x, dy, chosen), run(module, x, dy, chosen), strict=True):
            assert torch.equal(a, b)
    plain = x.detach()
    assert torch.equal(compiled(plain), module(plain))
    quantized = compiled(plain)
    with torchweft.autocast(recipe=RECIPES[name]):
        assert not torch.equal(compiled(plain), quantized)


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_compiled_overrides_and_any_number_of_rows(override, dtype):
    torch._dynamo.reset()
    torch.manual_seed(0)
    linear = ops.Linear(96, 40)
    chosen = recipe.MXFP8BlockScaling(backward_override=override)
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (16, 33, 7):
        x, dy = torch.randn(rows, 96), torch.randn(rows, 40)
        results = []
        for call in (compiled, linear):
            t = x.clone().requires_grad_()
            with torch.autocast("cpu", dtype, enabled=dtype is not None), torchweft.autocast(recipe=chosen):
                y = call(t)
            y.backward(dy.to(y.dtype))
            results.append((y.detach(), t.grad, linear.weight.grad))
            linear.weight.grad = None
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_compiled_grouped_linear_with_stochastic_rounding():
    torch._dynamo.reset()
    grouped = ops.GroupedLinear(2, 64, 48, bias=False, dtype=torch.bfloat16)
    x, dy = inputs(32, 64, 48)
    splits = torch.tensor([16, 16])
    with torchweft.autocast(recipe=recipe.NVFP4BlockScaling()):
        y = torch.compile(grouped, backend="aot_eager", fullgraph=True)(x, splits)
        expected = grouped(x, splits)
    assert torch.equal(y, expected)
    found = torch.autograd.grad(y, x, dy)[0].float()
    near = torch.autograd.grad(expected, x, dy)[0].float()
    assert 0.01 < (found - near).norm() / near.norm() < 0.3  # other random numbers


def test_recipes_are_values():
    made = RECIPES["mxfp8"].quantizers()
    assert made == recipe.MXFP8BlockScaling().quantizers() and hash(made) == hash(
        copy.copy(RECIPES["mxfp8"]).quantizers()
    )
    assert made != RECIPES["block"].quantizers() and made.id == recipe.MXFP8BlockScaling().quantizers().id
    assert made.weight == Quantizer("mxfp8") and "mxfp8" in repr(made)
    derived = type("OwnScaling", (recipe.MXFP8BlockScaling,), {})()
    assert derived.quantizers() == made


def test_exported_programs_are_called_with_their_recipe():
    """The text of a program fixes its recipe, so a region with another one raises; calls outside of regions do not."""
    net, x, made = block().eval(), torch.randn(16, 64), RECIPES["mxfp8"]
    plain = torch.export.export(net, (x,)).module()
    with torchweft.autocast(recipe=made):
        quantized, expected = torch.export.export(net, (x,)).module(), net(x)
        assert torch.equal(quantized(x), expected)
        with pytest.raises(RuntimeError, match="exported without a recipe"), torch.inference_mode():
            plain(x)
        with torchweft.autocast(enabled=False):
            assert torch.equal(plain(x), net(x))
    assert torch.equal(quantized(x), expected)
    other = torchweft.autocast(recipe=RECIPES["current"])
    with other, pytest.raises(RuntimeError, match="exported with another recipe"):
        quantized(x)
