"""Weight gradients of compiled programs that are accumulated into main_grad."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

import torchweft
import torchweft.ops as ops

WIDTH, FILL = 16, 0.5
BATCHES = (2, 3, 4, 5, 6)


def mlp() -> ops.Sequential:
    return ops.Sequential(
        ops.RMSNorm(WIDTH),
        ops.Linear(WIDTH, 32, accumulate_into_main_grad=True),
        ops.GELU(),
        ops.Linear(32, WIDTH, bias=False, accumulate_into_main_grad=True),
    )


def linear(**fields) -> ops.Linear:
    return ops.Linear(WIDTH, WIDTH, bias=False, accumulate_into_main_grad=True, **fields)


def weights(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [param for param in module.parameters() if param.dim() > 1]


def prepare(module: torch.nn.Module, flag: bool = False, **attributes) -> torch.nn.Module:
    """Gives every weight a main_grad that is not zero, and these attributes."""
    for weight in weights(module):
        weight.main_grad = torch.full(weight.shape, FILL)
        if flag:
            weight.grad_added_to_main_grad = False
        for name, value in attributes.items():
            setattr(weight, name, value)
    return module


def module_and_twin(make, **attributes) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Returns two modules with equal parameters."""
    module = make()
    twin = copy.deepcopy(module)
    return prepare(module, **attributes), prepare(twin, **attributes)


def compiled(module, backend: str = "aot_eager"):
    return torch.compile(module, fullgraph=True, backend=backend)


def assert_equal_gradients(module: torch.nn.Module, twin: torch.nn.Module) -> None:
    for param, expected in zip(module.parameters(), twin.parameters(), strict=True):
        assert (param.grad is None) == (expected.grad is None)
        if hasattr(expected, "main_grad"):
            assert not torch.equal(expected.main_grad, torch.full_like(expected.main_grad, FILL)), "nothing was added"
            torch.testing.assert_close(param.main_grad, expected.main_grad)
            assert getattr(param, "grad_added_to_main_grad", None) == getattr(expected, "grad_added_to_main_grad", None)
        elif expected.grad is not None:
            torch.testing.assert_close(param.grad, expected.grad)


def rows(count: int = 4, requires_grad: bool = True) -> torch.Tensor:
    return torch.randn(count, WIDTH, requires_grad=requires_grad)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("flag", (False, True), ids=("no flag", "flag"))
@pytest.mark.parametrize("first", (False, True), ids=("inner layer", "first layer"))
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_five_batch_sizes_compile_twice_without_break(backend, first, flag):
    module, twin = module_and_twin(mlp, flag=flag)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    call = torch.compile(module, fullgraph=True, backend=counter)
    for batch in BATCHES:
        x = rows(batch, requires_grad=not first)
        given = x.detach().clone().requires_grad_(not first)
        call(x).square().sum().backward()
        twin(given).square().sum().backward()
        if not first:
            torch.testing.assert_close(x.grad, given.grad)
        assert_equal_gradients(module, twin)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("single", (False, True))
def test_grouped_linear(single):
    def make():
        return ops.GroupedLinear(3, WIDTH, 8, bias=False, accumulate_into_main_grad=True, single_grouped_weight=single)

    module, twin = module_and_twin(make)
    splits, x = torch.tensor([1, 0, 3]), rows()
    for model in (compiled(module), twin):
        model(x, splits).square().sum().backward()
    for param, expected in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.main_grad, expected.main_grad)


def test_layers_of_one_kind_share_a_program():
    pairs = [module_and_twin(linear) for _ in range(12)]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda module, x: module(x), fullgraph=True, backend=counter)
    x = rows()
    y, expected = x, x
    for layer, twin in pairs:
        y, expected = call(layer, y), twin(expected)
    (y.square().sum() + expected.square().sum()).backward()
    for layer, twin in pairs:
        assert_equal_gradients(layer, twin)
    assert counter.frame_count <= 2


# ---- what would lose a gradient if backward wrote to a tensor that forward saved ----


def offload(t: torch.Tensor) -> torch.Tensor:
    return t.clone()


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_saved_tensor_hooks_that_copy(backend):
    module, twin = module_and_twin(mlp, flag=True)
    x = rows()
    with torch.autograd.graph.saved_tensors_hooks(offload, offload):
        y = compiled(module, backend)(x)
    y.square().sum().backward()
    twin(x).square().sum().backward()
    assert_equal_gradients(module, twin)


def test_main_grad_replaced_between_the_passes():
    module, twin = module_and_twin(mlp)
    x = rows()
    y = compiled(module)(x)
    old = [weight.main_grad for weight in weights(module)]
    for weight in weights(module):
        weight.main_grad = torch.full_like(weight, FILL)
    y.square().sum().backward()
    twin(x).square().sum().backward()
    assert_equal_gradients(module, twin)
    assert all(torch.equal(t, torch.full_like(t, FILL)) for t in old)


def test_main_grads_that_are_views_of_one_buffer():
    """As in Megatron: a compiler that knew of writes to them would have to reason about aliases."""
    module, twin = module_and_twin(mlp)
    buffer = torch.full((sum(weight.numel() for weight in weights(module)),), FILL)
    for weight, part in zip(weights(module), buffer.split([w.numel() for w in weights(module)]), strict=True):
        weight.main_grad = part.view_as(weight)
    x = rows()
    for model in (compiled(module, "inductor"), twin):
        model(x).square().sum().backward()
    assert_equal_gradients(module, twin)


def test_getter_of_main_grad_is_called_in_backward():
    module, twin = module_and_twin(linear)
    buffer, calls = torch.full((WIDTH, WIDTH), FILL), []
    del module.weight.main_grad
    module.weight.__fsdp_param__ = True
    module.weight.get_main_grad = lambda: calls.append(1) or buffer
    x = rows()
    y = compiled(module)(x)
    assert not calls
    y.square().sum().backward()
    twin(x).square().sum().backward()
    torch.testing.assert_close(buffer, twin.weight.main_grad)


def test_forwards_before_their_backwards_and_a_backward_twice():
    module, twin = module_and_twin(mlp)
    call = compiled(module)
    first, second = rows(), rows()
    for model in (call, twin):
        losses = [model(x).square().sum() for x in (first, second)]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        losses[0].backward()
    assert_equal_gradients(module, twin)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("overwrite", (False, True))
def test_equal_calls_are_not_merged(backend, overwrite):
    """Two calls with the same input have equal backwards; each adds to main_grad."""
    module, twin = module_and_twin(linear, overwrite_main_grad=overwrite)
    x, other = rows(), rows()

    def thrice(model):
        return (model(x) + model(x) + model(other)).square().sum()

    for model in (module, twin):
        function = compiled(thrice, backend) if model is module else thrice
        function(model).backward()
    assert_equal_gradients(module, twin)


def test_program_whose_only_gradients_are_main_grads():
    module, twin = module_and_twin(linear)
    x = rows(requires_grad=False)
    head = torch.nn.Linear(WIDTH, 1)  # outside the program: backward of the program must still run
    for model in (compiled(module, "inductor"), twin):
        head(model(x)).sum().backward()
    assert_equal_gradients(module, twin)


def test_checkpoint_inside_a_program():
    """A recomputed forward draws the same dropout mask: gradients are those of the outputs."""
    torch.manual_seed(0)
    module = prepare(ops.Sequential(linear(), ops.Dropout(0.5), linear()))
    x = rows()

    def call(x):
        return checkpoint(module, x, use_reentrant=False)

    y = compiled(call, "inductor")(x)
    y.sum().backward()
    # y = W2 (m * W1 x) with mask m, so that sum(y) = sum(dW2 * W2) = sum(dx * x), whatever the mask is, if it is one.
    dw = module[2].weight.main_grad - FILL
    torch.testing.assert_close((dw * module[2].weight).sum(), y.sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((x.grad * x).sum(), y.sum(), rtol=1e-4, atol=1e-4)


def test_compiled_autograd():
    module, twin = module_and_twin(mlp, flag=True)
    x = rows()
    call = compiled(module)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        call(x).square().sum().backward()
    twin(x).square().sum().backward()
    assert_equal_gradients(module, twin)


# ---- changes after the module was compiled ----


@pytest.mark.parametrize("flag", (False, True))
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_unused_output(backend, flag):
    """No gradient reaches the linear: what the program returns for it is zero."""

    def make():
        return ops.Sequential(ops.MakeExtraOutput(), ops.Linear(WIDTH, WIDTH, accumulate_into_main_grad=True))

    module = prepare(make(), flag=flag)
    x = rows()
    compiled(lambda x: module(x)[1] * 2, backend)(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2))
    assert torch.equal(module[1].weight.main_grad, torch.full_like(module[1].weight, FILL))
    assert module[1].bias.grad is None or not module[1].bias.grad.any()


def test_module_that_its_first_call_allocates():
    call = compiled(lambda module, x: module(x))
    x = rows()
    for module in (prepare(linear()), linear(device="meta"), ops.Sequential(linear(device="meta"))):
        module(x)
        prepare(module)
        call(module, x).sum().backward()
        assert not torch.equal(weights(module)[0].main_grad, torch.full((WIDTH, WIDTH), FILL))


def test_new_parameter():
    module, twin = module_and_twin(mlp)
    call, x = compiled(module), rows()
    call(x).sum().backward()
    for i in (1, 3):
        twin[i].weight = torch.nn.Parameter(torch.randn_like(twin[i].weight))
        module[i].weight = torch.nn.Parameter(twin[i].weight.detach().clone())
    prepare(module), prepare(twin)
    module.zero_grad()
    for model in (call, twin):
        model(x).square().sum().backward()
    assert_equal_gradients(module, twin)


def test_copied_and_pickled_modules_have_their_own_main_grad():
    module = prepare(linear())
    x = rows()
    compiled(module)(x).sum().backward()
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    expected = module.weight.main_grad.clone()
    for other in (copy.deepcopy(module), torch.load(stream, weights_only=False)):
        prepare(other)
        compiled(other)(x).sum().backward()
        torch.testing.assert_close(other.weight.main_grad, expected)
        torch.testing.assert_close(module.weight.main_grad, expected)


def test_handle_of_another_parameter_raises():
    module = prepare(linear(), flag=True)
    call, x = compiled(module), rows()
    call(x).sum().backward()
    stale = torch.nn.Parameter(torch.randn(WIDTH, WIDTH))
    stale.__dict__.update(module.weight.__dict__)  # as libraries do that move a Parameter with its attributes
    rewrapped = torch.nn.Parameter(module.weight.data)
    rewrapped.__dict__.update(module.weight.__dict__)
    old, module._parameters["weight"] = module.weight, rewrapped
    with pytest.raises(RuntimeError, match="main_grad handle of another weight"):
        call(x)
    module._parameters["weight"] = stale
    with pytest.raises(RuntimeError, match="main_grad handle of another weight"):
        call(x)
    del old
    with pytest.raises(RuntimeError, match="names no Parameter"):
        call(x)
    del stale._main_grad_handle
    torch.compiler.reset()
    call(x).sum().backward()


def test_flag_set_between_the_passes_raises():
    module = prepare(linear())
    y = compiled(module)(rows())
    module.weight.grad_added_to_main_grad = False
    with pytest.raises(RuntimeError, match="grad_added_to_main_grad .* was set between"):
        y.sum().backward()
    assert torch.equal(module.weight.main_grad, torch.full_like(module.weight, FILL))


def test_flag_set_before_the_next_call_compiles_again():
    module, twin = module_and_twin(linear)
    call, x = compiled(module), rows()
    call(x).sum().backward()
    twin(x).sum().backward()
    for model in (module, twin):
        model.weight.grad_added_to_main_grad = False
    call(x).sum().backward()
    twin(x).sum().backward()
    assert_equal_gradients(module, twin)


# ---- what raises ----


def test_no_main_grad_raises():
    y = compiled(linear())(rows())
    with pytest.raises(RuntimeError, match="has no main_grad"):
        y.sum().backward()


@pytest.mark.parametrize("flag", (False, True))
def test_gradients_of_chosen_tensors_raise(flag):
    module, x = prepare(linear(), flag=flag), rows()
    call = compiled(module)
    for backward in (
        lambda loss: torch.autograd.grad(loss, x),
        lambda loss: loss.backward(inputs=[x]),
        lambda loss: loss.backward(inputs=[module.weight]),
    ):
        with pytest.raises(RuntimeError, match=r"backward\(inputs=...\) are not supported"):
            backward(call(x).sum())
    assert torch.equal(module.weight.main_grad, torch.full_like(module.weight, FILL))


def test_hooks_that_round_raise():
    module = prepare(linear())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.to(torch.float32)):
        y = compiled(module)(rows())
    with pytest.raises((RuntimeError, ValueError), match="weft: a main_grad handle"):
        y.sum().backward()


def test_parametrized_weight_raises():
    module = prepare(linear())
    torch.nn.utils.parametrizations.weight_norm(module)
    y = torch.compile(module, backend="aot_eager")(rows())
    with pytest.raises((RuntimeError, NotImplementedError), match="main_grad"):
        y.sum().backward()


# ---- dropout ----


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_calls_with_the_same_input_draw_different_masks(backend):
    module = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.Dropout(0.5))
    first, second = torch.compile(lambda x: (module(x), module(x)), fullgraph=True, backend=backend)(rows(32))
    assert not torch.equal(first, second)
    module.eval()
    first, second = torch.compile(lambda x: (module(x), module(x)), fullgraph=True, backend=backend)(rows(32))
    assert torch.equal(first, second)


def test_calls_draw_different_seeds_for_stochastic_rounding():
    """The sum of eight equal calls has the spread of eight draws, not of one taken eight times."""
    module = ops.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    x, dy = torch.randn(2, 32, 64, dtype=torch.bfloat16)

    def spread(call) -> float:
        grads = []
        for _ in range(12):
            given = x.clone().requires_grad_()
            with torchweft.autocast(recipe=torchweft.recipe.NVFP4BlockScaling()):
                y = call(given)
            y.backward(dy)
            grads.append(given.grad.float())
        return torch.stack(grads).std(0).mean().item()

    def eight(x):
        return sum(module(x) for _ in range(8))

    assert spread(torch.compile(eight, backend="aot_eager")) < 1.5 * spread(eight)
