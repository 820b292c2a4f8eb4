"""`transformer_engine.pytorch.ops` by weft's plans (`install(fusion=True)`) against Transformer Engine's own steps.

pytest -p torchweft.te.pytest_plugin tests/te
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from test_modules import HIDDEN, RECIPES, WIDTH, make_sequential, relative, sequential
from torch.utils.checkpoint import checkpoint

import torchweft.te
from torchweft.te import _fusion

ops = te.ops
pytestmark = pytest.mark.skipif(
    not hasattr(ops, "register_forward_backward_fusion"), reason="this release has no joint fusions"
)
ROWS = 32


@pytest.fixture(autouse=True)
def fusion() -> Iterator[None]:
    _fusion.enabled = True
    yield
    _fusion.enabled = False


def residual_block(dtype: torch.dtype) -> torch.nn.Module:
    return ops.Sequential(
        ops.MakeExtraOutput(),
        ops.LayerNorm(WIDTH, dtype=dtype),
        ops.Linear(WIDTH, HIDDEN, dtype=dtype),
        ops.GELU(),
        ops.Linear(HIDDEN, WIDTH, dtype=dtype, bias=False),
        ops.AddExtraInput(),
    )


def scaled_block(dtype: torch.dtype) -> torch.nn.Module:
    return ops.Sequential(
        ops.L2Normalization(),
        ops.ConstantScale(0.5),
        ops.BasicLinear(WIDTH, HIDDEN, dtype=dtype),
        ops.Bias(HIDDEN, dtype=dtype),
        ops.ScaledSwiGLU(),
        ops.Reshape((ROWS // 2, 2, HIDDEN // 2)),
        ops.Linear(HIDDEN // 2, WIDTH, dtype=dtype),
    )


# name → (makes the module, sizes of its extra inputs)
BLOCKS: dict[str, tuple[Callable[[torch.dtype], Any], tuple[tuple[int, ...], ...]]] = {
    "mlp": (make_sequential, ()),
    "residual": (residual_block, ((ROWS, WIDTH),)),
    "scaled": (scaled_block, ((ROWS,),)),
}


class Step:
    """A forward and a backward of a module that is made anew from the same seed."""

    def __init__(self, name: str, fused: bool, recipe: Any = None, dtype: torch.dtype = torch.float32, calls: int = 1):
        _fusion.enabled = fused
        make, extra_sizes = BLOCKS[name]
        torch.manual_seed(0)
        self.module = make(dtype)
        for _ in range(calls):
            x, *extras = inputs = [
                torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in ((ROWS, WIDTH), *extra_sizes)
            ]
            with te.autocast(recipe=recipe) if recipe else nullcontext():
                outputs = self.module(x, *extras)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])
        self.values = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
        self.values |= {f"gradient of input {i}": t.grad for i, t in enumerate(inputs)}
        self.values |= {n: p.grad for n, p in self.module.named_parameters()}


def errors(fused: Step, plain: Step) -> dict[str, float]:
    assert fused.values.keys() == plain.values.keys()
    return {name: relative(value, plain.values[name]) for name, value in fused.values.items()}


def kinds(module: Any) -> list[str]:
    """The classes of the operations that forward runs."""
    return [type(op).__name__ for group in module._module_groups for op, _ in group._forward_ops]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_runs_are_those_of_transformer_engine(name, dtype):
    fused, plain = Step(name, True, dtype=dtype), Step(name, False, dtype=dtype)
    assert kinds(fused.module) == ["WeftRun"]
    assert "WeftRun" not in kinds(plain.module)
    found = errors(fused, plain)
    assert max(found.values()) < {torch.float32: 2e-6, torch.bfloat16: 0.015}[dtype], found


@pytest.mark.parametrize("chosen", sorted(RECIPES.keys() - {"nvfp4"}))  # whose Hadamard transform takes bfloat16 only
@pytest.mark.parametrize("name", BLOCKS)
def test_quantized_runs_have_the_same_codes(name, chosen):
    """In float32 a code that differs would be an error of 1e-3 or more."""
    calls = 3 if chosen == "delayed" else 1  # the first scales are 1
    fused, plain = (Step(name, on, RECIPES[chosen], calls=calls) for on in (True, False))
    assert kinds(fused.module) == ["WeftRun"] * (2 if name == "scaled" else 1)  # it has a Reshape
    found = errors(fused, plain)
    assert max(found.values()) < 1e-5, found
    if name == "mlp":
        assert torchweft.te.explain(fused.module).count("mlp_block") == 2


@pytest.mark.parametrize("chosen", RECIPES)
def test_quantized_bfloat16_is_near_plain_torch(chosen):
    step = Step("mlp", True, RECIPES[chosen], torch.bfloat16)
    assert kinds(step.module) == ["WeftRun"]
    torch.manual_seed(0)
    module = make_sequential(torch.bfloat16)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    expected = sequential({n: p.detach().cpu().double() for n, p in module.named_parameters()}, x.cpu().double())
    assert 2e-3 < relative(step.values["output 0"], expected) < (0.45 if chosen == "nvfp4" else 0.12)


def run_and_differentiate(module: Any, x: torch.Tensor, call: Callable[..., Any]) -> list[torch.Tensor]:
    module.zero_grad()
    x.grad = None
    y = call(module, x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def through_hooks(module: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.cuda()):
        return module(x)


@pytest.mark.parametrize(
    "call",
    (
        lambda m, x: checkpoint(m, x, use_reentrant=False),
        lambda m, x: checkpoint(m, x, use_reentrant=True),
        lambda m, x: te.checkpoint(m, x),
        through_hooks,
    ),
    ids=("checkpoint", "reentrant checkpoint", "te.checkpoint", "saved-tensor hooks"),
)
def test_checkpoints_and_hooks(call):
    module = make_sequential(torch.float32)
    x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    expected = run_and_differentiate(module, x, lambda m, x: m(x))
    for found, wanted in zip(run_and_differentiate(module, x, call), expected, strict=True):
        assert torch.equal(found, wanted)


def test_dropout_follows_the_generator_and_evaluation():
    module = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.Dropout(0.5))
    x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    torch.cuda.manual_seed(1)
    first = run_and_differentiate(module, x, lambda m, x: m(x))
    torch.cuda.manual_seed(1)
    again = run_and_differentiate(module, x, lambda m, x: checkpoint(m, x, use_reentrant=True))
    assert all(map(torch.equal, first, again))
    dropped = (first[0] == 0).float().mean().item()
    assert 0.4 < dropped < 0.6, dropped
    assert not (module.eval()(x) == 0).any()
    assert kinds(module) == ["WeftRun"]


def test_frozen_weights_and_no_grad():
    module = make_sequential(torch.float32)
    x = torch.randn(ROWS, WIDTH, device="cuda")
    with torch.no_grad():
        y = module(x)
    assert not y.requires_grad
    weights = dict(module.named_parameters())
    for name, p in weights.items():
        p.requires_grad_(name == "1.weight")
    module(x).sum().backward()
    assert [name for name, p in weights.items() if p.grad is not None] == ["1.weight"]
    assert torch.equal(module(x), y)


@pytest.mark.parametrize("chosen", (None, "current"))
def test_weight_gradients_are_added_to_main_grad(chosen):
    found = []
    for fused in (True, False):
        _fusion.enabled = fused
        torch.manual_seed(0)
        linear = ops.Linear(WIDTH, HIDDEN, accumulate_into_main_grad=True)
        linear.weight.main_grad = torch.ones_like(linear.weight)
        linear.weight.grad_added_to_main_grad = False
        x = torch.randn(ROWS, WIDTH, device="cuda")
        for _ in range(2):
            with te.autocast(recipe=RECIPES[chosen]) if chosen else nullcontext():
                y = linear(x)
            y.sum().backward()
        assert linear.weight.grad_added_to_main_grad
        found.append(linear.weight.main_grad)
    assert relative(*found) < 1e-6
    assert (found[0] != 1).any()


@pytest.mark.parametrize("to_caller", (False, True))
@pytest.mark.parametrize("chosen", (None, "current"))
def test_channels(chosen, to_caller):
    """With a recipe a value crosses from one run to another: a `Quantize` ends the first."""
    results = []
    for fused in (True, False):
        _fusion.enabled = fused
        torch.manual_seed(0)
        split, add = ops.MakeExtraOutput(), ops.AddExtraInput()
        if not hasattr(split, "set_extra_output_channel"):
            pytest.skip("operations of this release have no channels")
        split.set_extra_output_channel(0, "residual", output_to_caller=to_caller)
        add.set_extra_input_channel(0, "residual")
        linears = (ops.Linear(WIDTH, WIDTH), ops.ReLU(), ops.Quantize(), ops.Linear(WIDTH, WIDTH))
        module = ops.Sequential(split, *linears, add)
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        with te.autocast(recipe=RECIPES[chosen]) if chosen else nullcontext():
            y = module(x)
        assert isinstance(y, tuple) == to_caller
        torch.autograd.backward(y, [torch.randn_like(t) for t in y] if to_caller else torch.randn_like(y))
        results.append([*(y if to_caller else [y]), x.grad, *(p.grad for p in module.parameters())])
        assert kinds(module).count("WeftRun") == (0 if not fused else 2 if chosen else 1)
    for found, wanted in zip(*results, strict=True):
        assert relative(found, wanted) < 1e-5


def test_quantize_begins_and_ends_a_run():
    """Quantized tensors enter and leave a run; without a recipe the operation does nothing."""
    results = []
    for fused in (True, False):
        _fusion.enabled = fused
        torch.manual_seed(0)
        first, last = (ops.Quantize(forward=False, backward=True) for _ in range(2))
        module = ops.Sequential(first, ops.RMSNorm(WIDTH), ops.Quantize(), ops.GELU(), ops.Linear(WIDTH, WIDTH), last)
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
        with te.autocast(recipe=RECIPES["current"]):
            y = module(x)
        y.backward(torch.randn(ROWS, WIDTH, device="cuda"))
        assert type(x.grad).__name__ == "Float8Tensor"
        results.append([y, x.grad.dequantize(), *(p.grad for p in module.parameters())])
        assert kinds(module).count("WeftRun") == (2 if fused else 0)
        assert type(module(x)) is torch.Tensor
        assert kinds(module).count("WeftRun") == (1 if fused else 0)
        alone = ops.Sequential(ops.Quantize())
        with te.autocast(recipe=RECIPES["current"]):
            assert type(alone(x)).__name__ == "Float8Tensor"
    for found, wanted in zip(*results, strict=True):
        assert relative(found, wanted) < 1e-5


@pytest.mark.filterwarnings("ignore:Quantizer is being updated")  # Transformer Engine's, of its own quantizers
@pytest.mark.parametrize("override", (None, "high_precision", "dequantized"))
@pytest.mark.parametrize("chosen", sorted(RECIPES.keys() - {"delayed"}))
def test_quantized_weights_of_two_linears(chosen, override):
    recipe = dataclasses.replace(RECIPES[chosen], backward_override=override)
    results = []
    for fused in (True, False):
        _fusion.enabled = fused
        torch.manual_seed(0)
        dtype = torch.bfloat16 if chosen == "nvfp4" else torch.float32
        with te.quantized_model_init(recipe=recipe):
            linears = [ops.BasicLinear(WIDTH, WIDTH, dtype=dtype) for _ in range(2)]
            module = ops.Sequential(linears[0], ops.GELU(), linears[1])
        x = torch.randn(ROWS, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
        with te.autocast(recipe=recipe):
            y = module(x)
        y.backward(torch.randn(ROWS, WIDTH, device="cuda", dtype=dtype))
        results.append([y, x.grad, *(p.grad for p in module.parameters())])
        assert kinds(module).count("WeftRun") == fused
    bound = 0.3 if chosen == "nvfp4" else 0.1 if override else 1e-5  # stochastic rounding; it may quantize twice
    for found, wanted in zip(*results, strict=True):
        assert relative(found, wanted) < bound


def test_linears_of_a_run_have_the_limits_of_their_own_steps():
    """Without gradients a linear may have 8 features, and one after a `Reshape` has other rows than the run."""
    _fusion.enabled = True
    narrow = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.Linear(WIDTH, 8))
    x = torch.randn(ROWS, WIDTH, device="cuda")
    with torch.no_grad(), te.autocast(recipe=RECIPES["current"]):
        assert narrow(x).shape == (ROWS, 8)
    with pytest.raises(RuntimeError, match="8"), te.autocast(recipe=RECIPES["current"]):
        narrow(x).sum().backward()
    reshaped = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.Reshape((-1, 2 * WIDTH)), ops.Linear(2 * WIDTH, WIDTH))
    with pytest.raises((ValueError, RuntimeError), match="16 rows|multiple"), te.autocast(recipe=RECIPES["mxfp8"]):
        reshaped(torch.randn(32, WIDTH, device="cuda"))


@pytest.mark.filterwarnings("ignore:Quantizer is being updated")  # Transformer Engine's, of its own quantizers
@pytest.mark.parametrize("chosen", RECIPES)
def test_quantized_weights(chosen):
    """Their codes and scales enter as they are, without being decoded."""
    results = []
    for fused in (True, False):
        _fusion.enabled = fused
        torch.manual_seed(0)
        dtype = torch.bfloat16 if chosen == "nvfp4" else torch.float32
        with te.quantized_model_init(recipe=RECIPES[chosen]):
            module = ops.Sequential(ops.BasicLinear(WIDTH, HIDDEN, dtype=dtype))
        assert type(module[0].weight) is not torch.nn.Parameter
        x = torch.randn(ROWS, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
        with te.autocast(recipe=RECIPES[chosen]):
            y = module(x)
        torch.manual_seed(1)
        y.backward(torch.randn_like(y))
        results.append({"y": y, "x": x.grad, "weight": module[0].weight.grad, "values": module(x)})
        assert kinds(module) == (["WeftRun"] if fused else ["BasicLinear"])
    found = {name: relative(value, results[1][name]) for name, value in results[0].items()}
    assert found["y"] < 1e-6, found
    assert max(found.values()) < (0.3 if chosen == "nvfp4" else 1e-5), found  # its gradients are rounded at random


class Doubled(ops.FusedOperation if hasattr(ops, "FusedOperation") else object):
    """A user's joint fusion of one ReLU."""

    def fuser_forward(self, basic_op_ctxs, input_, **unused):
        basic_op_ctxs[0].save_for_backward(input_)
        return 2 * input_.relu(), [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **unused):
        (x,) = basic_op_ctxs[0].saved_tensors
        return 2 * grad_output * (x > 0), [()], [()]


class Mine(ops.Identity):
    """A user's operation."""


def replace_relu(given: list[Any], **unused: Any) -> list[Any]:
    return [Doubled([op]) if isinstance(op, ops.ReLU) else op for op in given]


@pytest.fixture
def restored() -> Iterator[Any]:
    """The fuser, whose lists of fusions are put back."""
    from transformer_engine.pytorch.ops.fuser import OperationFuser

    names = [f"{which}_fusion_functions" for which in ("forward_backward", "forward", "backward")]
    before = [list(getattr(OperationFuser, name)) for name in names]
    yield OperationFuser
    for name, functions in zip(names, before, strict=True):
        getattr(OperationFuser, name)[:] = functions


def test_fusions_of_the_user_come_first(restored):
    ops.register_forward_backward_fusion(replace_relu)
    module = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.ReLU(), ops.Linear(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)
    y = module(x)
    assert kinds(module) == ["WeftRun", "Doubled", "WeftRun"]
    assert relative(y, module[2](2 * module[0](x).relu())) < 1e-6
    assert "a fusion of Transformer Engine or of the user takes it" in torchweft.te.explain(module)


def test_weft_stands_aside_for_fusions_of_one_pass(restored):
    def mine(given: list[Any], **unused: Any) -> list[Any]:
        return given

    ops.register_forward_fusion(mine)
    module = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.ReLU())
    module(torch.randn(ROWS, WIDTH, device="cuda"))
    assert "WeftRun" not in kinds(module)
    assert "mine is registered for one pass and comes first" in torchweft.te.explain(module)


def test_explain():
    module = make_sequential(torch.float32)
    with pytest.raises(ValueError, match="Call it first"):
        torchweft.te.explain(module)
    module(torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True)).sum().backward()
    text = torchweft.te.explain(module)
    assert text.startswith("0..5: weft: RMSNorm, BasicLinear, Bias, SwiGLU, BasicLinear, Bias"), text
    assert "mlp_block" in text, text
    mine = ops.Sequential(ops.Linear(WIDTH, WIDTH), Mine())
    mine(torch.randn(ROWS, WIDTH, device="cuda"))
    assert "2: Mine: it is not an operation of Transformer Engine" in torchweft.te.explain(mine)


def test_a_recipe_that_a_plan_cannot_take_is_an_error():
    """Transformer Engine does not fuse anew when the recipe changes but not its class."""
    from transformer_engine.common.recipe import Float8CurrentScaling

    module = ops.Sequential(ops.Linear(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH, device="cuda")
    with te.autocast(recipe=Float8CurrentScaling()):
        module(x)
    (group,) = module._module_groups
    ((run, _),) = group._forward_ops
    quantizer = run.basic_ops[0].get_quantizer("forward", 0)
    quantizer.amax_reduction_group = object()
    quantizer.with_amax_reduction = True
    with pytest.raises(NotImplementedError, match="share a maximum magnitude.*Create the module anew"):
        with te.autocast(recipe=Float8CurrentScaling()):
            module(x)


@pytest.mark.parametrize("chosen", (None, "current", "delayed"))
def test_modules_copy_and_pickle_after_a_call(chosen):
    module = make_sequential(torch.float32)
    x = torch.randn(ROWS, WIDTH, device="cuda")

    def call(m: Any) -> torch.Tensor:
        with te.autocast(recipe=RECIPES[chosen]) if chosen else nullcontext():
            return m(x)

    call(module)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    expected = call(module)
    for other in copies:
        assert torch.equal(call(other), expected)
        assert set(kinds(other)) == {"WeftRun"}
        assert not {id(p) for p in other.parameters()} & {id(p) for p in module.parameters()}


def test_changed_attributes_take_effect():
    x = torch.ones(ROWS, WIDTH, device="cuda")
    module = ops.Sequential(ops.ConstantScale(2.0), ops.Dropout(0.5))
    module(x)
    module[0].scale, module[1].dropout_probability = 3.0, 0.0
    assert torch.equal(module(x), 3 * x)
    linear = ops.Sequential(ops.BasicLinear(WIDTH, WIDTH))
    linear(x)
    weight = linear[0].weight
    del linear[0].weight
    linear[0].weight = 2 * weight.detach()
    with pytest.raises(NotImplementedError, match="its weight is not a Parameter of it. Create the module anew"):
        linear(x)


@pytest.mark.parametrize("chosen", (None, "current"))
def test_no_more_is_saved_than_by_transformer_engine(chosen):
    """The input of a run is a tensor that nobody else keeps."""
    kept = []
    for fused in (True, False):
        _fusion.enabled = fused
        module = make_sequential(torch.bfloat16)
        x = torch.randn(4096, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):  # the first call may allocate what stays
            before = torch.cuda.memory_allocated()
            with te.autocast(recipe=RECIPES[chosen]) if chosen else nullcontext():
                y = module(x * 1)
            kept.append(torch.cuda.memory_allocated() - before - y.nbytes)
            del y
    assert kept[1] <= kept[3]


@pytest.mark.parametrize(
    ("chosen", "rows", "inputs", "outputs"),
    (("mxfp8", 17, 64, 64), ("mxfp8", 32, 64, 48), ("current", 32, 24, 64), ("delayed", 32, 64, 24)),
)
def test_sizes_that_a_gpu_refuses_raise(chosen, rows, inputs, outputs):
    found = []
    for fused in (True, False):
        _fusion.enabled = fused
        module = ops.Sequential(ops.Linear(inputs, outputs))
        x = torch.randn(rows, inputs, device="cuda", requires_grad=True)
        with pytest.raises((ValueError, RuntimeError)) as raised, te.autocast(recipe=RECIPES[chosen]):
            module(x).sum().backward()
        found.append(raised.type)
    assert found[0] is found[1]


@pytest.mark.parametrize("make", (ops.Identity, lambda: ops.Reshape((-1, WIDTH)), ops.MakeExtraOutput))
def test_changing_a_view_of_the_input_raises(make):
    for fused in (True, False):
        _fusion.enabled = fused
        x = torch.randn(ROWS, WIDTH, device="cuda", requires_grad=True) * 1
        y = ops.Sequential(make())(x)
        with pytest.raises(RuntimeError, match="is a view and is being modified"):
            (y[1] if isinstance(y, tuple) else y).mul_(2)


def test_splits_on_the_cpu_and_names_of_channels():
    grouped = ops.Sequential(ops.GroupedLinear(2, WIDTH, WIDTH))
    splits = torch.tensor([20, 12])
    x = torch.randn(ROWS, WIDTH, device="cuda")
    assert torch.equal(grouped(x, splits), grouped(x, splits.cuda()))
    split, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    split.set_extra_output_channel(0, 'a "b\\', output_to_caller=False)
    add.set_extra_input_channel(0, 'a "b\\')
    assert torch.equal(ops.Sequential(split, ops.ConstantScale(2.0), add)(x), 3 * x)


def test_runs_over_ranks(run_two_ranks):
    """Sharded linears and collectives."""
    run_two_ranks("torchweft.te", Path(__file__).parent / "parallel_rank.py")
