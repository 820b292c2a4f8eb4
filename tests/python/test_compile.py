"""torch.compile, torch.export and fake tensors: calls through the dispatcher."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
import torch.utils.flop_counter
from torch._subclasses.fake_tensor import FakeTensorMode

import torchweft.ops as ops
from torchweft import fusion


def block(public: bool = False) -> ops.Sequential:
    """A norm-MLP-residual block; with `public` the residual is also returned."""
    return ops.Sequential(
        ops.MakeExtraOutput(in_place=True).set_extra_output_channel(0, "residual", output_to_caller=public),
        ops.RMSNorm(16),
        ops.Linear(16, 64, bias=False),
        ops.SwiGLU(),
        ops.Linear(32, 16),
        ops.Dropout(0.0),
        ops.AddExtraInput(in_place=True).set_extra_input_channel(0, "residual"),
    )


def layer() -> ops.Sequential:
    """A transformer layer with attention."""
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False),
        ops.LayerNorm(16),
        ops.Linear(16, 48),
        ops.RotaryEmbedding(2, 8, qkv_format="sbhd", qkv_layout="group_interleaved"),
        ops.DotProductAttention(2, 8, qkv_format="sbhd", qkv_layout="group_interleaved"),
        ops.Linear(16, 16),
        ops.AddExtraInput().set_extra_input_channel(0, "x"),
        block(),
    )


MODELS = {
    "block": block,
    "layer": layer,
    "block that returns its branch": lambda: block(public=True),
    "one operation": lambda: ops.Linear(16, 16),
    "identity": lambda: ops.Identity(),
    "reshape": lambda: ops.Sequential(ops.Reshape((-1, 8)), ops.Linear(8, 8), ops.Reshape((-1, 16)), ops.GELU()),
    "nested": lambda: ops.Sequential(block(), ops.SiLU(), block()),
    "plain modules between": lambda: ops.Sequential(
        ops.Linear(16, 16), torch.nn.Tanh(), ops.GELU(), ops.Linear(16, 16)
    ),
    "a channel across a plain module": lambda: ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False),
        torch.nn.Tanh(),
        ops.AddExtraInput().set_extra_input_channel(0, "r"),
    ),
}


def results(call, module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Returns outputs and all gradients of a call."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    outputs = call(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    return [*outputs, x.grad, *(p.grad for p in module.parameters())]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", MODELS)
def test_fullgraph_compile_matches_eager(name):
    model = MODELS[name]()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 16)
    torch.testing.assert_close(results(compiled, model, x), results(model, model, x), rtol=0, atol=0)


def saved_bytes(call, module: torch.nn.Module, x: torch.Tensor) -> int:
    """Returns the memory that a call keeps for backward, besides x and the parameters."""
    given = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = call(x)
    y.sum().backward()
    return sum(size for storage, size in kept.items() if storage not in given)


def test_compiled_block_saves_no_more_than_eager():
    model = ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.LayerNorm(256),
        ops.Linear(256, 512),
        ops.GELU(),
        ops.Linear(512, 256),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(64, 256, requires_grad=True)
    compiled(x).sum().backward()
    assert saved_bytes(compiled, model, x) <= 1.02 * saved_bytes(model, model, x)
    torch.testing.assert_close(results(compiled, model, x.detach()), results(model, model, x.detach()))


def test_outputs_without_gradient_do_not_require_one():
    branch = ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=True)
    module = ops.Sequential(branch, ops.Linear(16, 16))
    x = torch.randn(4, 16)
    assert [t.requires_grad for t in module(x)] == [True, False]
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    assert [t.requires_grad for t in compiled] == [True, False]
    with torch.utils.flop_counter.FlopCounterMode(display=False):  # a dispatch mode
        y, extra = module(x)
    assert [y.requires_grad, extra.requires_grad] == [True, False]
    (y.sum() + extra.sum()).backward()
    torch.testing.assert_close(module[1].weight.grad, x.sum(0).expand(16, 16))


def test_joint_fusions_are_fixed_when_traced():
    model = ops.Sequential(ops.RMSNorm(256), ops.Linear(256, 256), ops.GELU(), ops.Linear(256, 256))
    x = torch.randn(4, 256, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = [t.clone() for t in results(compiled, model, x.detach())]
    kept = saved_bytes(compiled, model, x)
    y = compiled(x)
    with fusion.without_rules("mlp_block"):
        assert saved_bytes(model, model, x) > kept == saved_bytes(compiled, model, x)
        torch.testing.assert_close(results(compiled, model, x.detach()), expected, rtol=0, atol=0)
        y.sum().backward()


def test_unknown_joint_fusion_raises():
    call = 'GELU() @call(autocast=none, eval=0, joint="mlp_blok", tensors="cpu:float32:c")'
    with pytest.raises(ValueError, match="weft has no joint fusion 'mlp_blok'"):
        torch.ops.weft.pipeline_forward([torch.randn(3)], call)


def test_one_graph_handles_any_number_of_rows():
    model = block()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for rows in (3, 7, 64):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(results(compiled, model, x), results(model, model, x), rtol=0, atol=0)
    assert counter.frame_count == 1


def test_compiled_model_guards_on_mode_autocast_and_frozen_weights():
    model = ops.Sequential(ops.Linear(16, 16), ops.Dropout(0.5))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(64, 16)
    assert not torch.equal(compiled(x), compiled(x))
    model.eval()
    torch.testing.assert_close(compiled(x), model(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(x).dtype == torch.bfloat16
    model[0].weight.requires_grad_(False)
    compiled(x).sum().backward()
    assert model[0].weight.grad is None and model[0].bias.grad is not None


def test_exported_program_handles_other_numbers_of_rows():
    model = block().eval()
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(model, (torch.randn(4, 16),), dynamic_shapes=({0: rows},))
    x = torch.randn(9, 16)
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.slow
def test_inductor_matches_eager():
    model = block()
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(4, 16)
    torch.testing.assert_close(results(compiled, model, x), results(model, model, x))


class Doubled(ops.BasicOperation):
    def op_forward(self, ctx, input_, **unused):
        return 2 * input_

    def op_backward(self, ctx, grad_output):
        return 2 * grad_output, ()


def test_python_op_breaks_graph_and_is_correct():
    model = ops.Sequential(ops.Linear(16, 16), Doubled(), ops.GELU())
    x = torch.randn(4, 16)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(results(compiled, model, x), results(model, model, x), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["block", "one operation"])
def test_fake_tensors_have_right_sizes(name):
    with FakeTensorMode():
        model = MODELS[name]()
        assert model(torch.randn(5, 16)).shape == (5, 16)


CALL = (
    "BasicLinear(in_features=4, out_features=2); GELU() "
    '@call(autocast=none, eval=0, tensors="cpu:float32:gc cpu:float32:gc")'
)


def arguments():
    return [torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)], CALL


def test_dispatcher_op_passes_opcheck():
    torch.library.opcheck(torch.ops.weft.pipeline_forward, arguments())


def test_dispatcher_op_rejects_second_derivatives_and_tangents():
    (x, weight), call = arguments()
    (dx,) = torch.autograd.grad(torch.ops.weft.pipeline_forward([x, weight], call)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dx.sum().backward()
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises((NotImplementedError, RuntimeError), match="weft|jvp|forward"),
    ):
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        torch.ops.weft.pipeline_forward([dual, weight], call)


# ---- one program for modules of one kind ----


def test_blocks_of_one_kind_share_a_program():
    """As many blocks as a model has, each compiled by itself."""
    blocks = [block() for _ in range(12)]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = [torch.compile(module, fullgraph=True, backend=counter) for module in blocks]
    y = x = torch.randn(4, 16)
    for module in compiled:
        y = module(y)
    y.sum().backward()
    expected = [[p.grad.clone() for p in module.parameters()] for module in blocks]
    for module in blocks:
        module.zero_grad()
        x = module(x)
    torch.testing.assert_close(y, x)
    x.sum().backward()
    for module, grads in zip(blocks, expected, strict=True):
        for param, grad in zip(module.parameters(), grads, strict=True):
            torch.testing.assert_close(grad, param.grad)
    assert counter.frame_count <= 2


def gelu(approximate: str) -> ops.GELU:
    return ops.GELU(approximate=approximate)


def scaled(child: torch.nn.Module, change) -> torch.nn.Module:
    """A child whose output `change` makes ten times as large."""
    change(child)
    return child


class TenTimes(ops.GELU):
    def forward(self, x):
        return 10 * super().forward(x)


DIFFERENT_BLOCKS = {
    "field": lambda: ops.Sequential(ops.Linear(16, 16), gelu("none")),
    "class": lambda: ops.Sequential(ops.Linear(16, 16), ops.SiLU()),
    "order": lambda: ops.Sequential(gelu("tanh"), ops.Linear(16, 16)),
    "forward hook": lambda: ops.Sequential(
        ops.Linear(16, 16), scaled(gelu("tanh"), lambda m: m.register_forward_hook(lambda m, a, y: 10 * y))
    ),
    "forward pre-hook": lambda: ops.Sequential(
        ops.Linear(16, 16), scaled(gelu("tanh"), lambda m: m.register_forward_pre_hook(lambda m, a: (10 * a[0],)))
    ),
    "backward hook": lambda: ops.Sequential(
        ops.Linear(16, 16),
        scaled(gelu("tanh"), lambda m: m.register_full_backward_hook(lambda m, grads, _: (10 * grads[0],))),
    ),
    "forward of the object": lambda: ops.Sequential(
        ops.Linear(16, 16), scaled(gelu("tanh"), lambda m: setattr(m, "forward", lambda x: 10 * x))
    ),
    "forward of the class": lambda: ops.Sequential(ops.Linear(16, 16), TenTimes()),
    "bias": lambda: ops.Sequential(ops.Linear(16, 16, bias=False), gelu("tanh")),
    "nested": lambda: ops.Sequential(ops.Sequential(ops.Linear(16, 16)), gelu("tanh")),
    "hook of the Sequential": lambda: scaled(
        ops.Sequential(ops.Linear(16, 16), gelu("tanh")),
        lambda m: m.register_forward_hook(lambda m, a, y: 10 * y),
    ),
    "parametrization": lambda: ops.Sequential(
        torch.nn.utils.parametrizations.weight_norm(ops.Linear(16, 16)), gelu("tanh")
    ),
}


@pytest.mark.parametrize("first", ("plain", "different"))
@pytest.mark.parametrize("name", DIFFERENT_BLOCKS)
def test_blocks_that_differ_do_not_share_a_program(name, first):
    def call(module, x):
        return module(x)

    blocks = [ops.Sequential(ops.Linear(16, 16), gelu("tanh")), DIFFERENT_BLOCKS[name]()]
    compiled = torch.compile(call, backend="aot_eager")
    for module in blocks if first == "plain" else reversed(blocks):
        x = torch.randn(4, 16)
        expected = results(lambda t, module=module: module(t), module, x)
        found = results(lambda t, module=module: compiled(module, t), module, x)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_channels_are_part_of_the_kind():
    def branch(public: bool):
        fork, join = ops.MakeExtraOutput(), ops.AddExtraInput()
        fork.set_extra_output_channel(0, "r", output_to_caller=public)
        return ops.Sequential(fork, ops.GELU(), join.set_extra_input_channel(0, "r"))

    compiled = torch.compile(lambda module, x: module(x), fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 16)
    for public in (False, True, False):
        torch.testing.assert_close(compiled(branch(public), x), branch(public)(x))


def test_fields_set_after_compiling_take_effect():
    module = ops.Sequential(ops.Linear(16, 16), gelu("tanh"), ops.Sequential(ops.GELU()))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 16)
    torch.testing.assert_close(compiled(x), module(x))
    module[1].approximate = "none"
    torch.testing.assert_close(compiled(x), module(x), rtol=0, atol=0)
    module.fuse_nested = True
    torch.testing.assert_close(compiled(x), module(x))


def test_block_shares_a_program_again_when_its_hook_is_removed():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda module, x: module(x), fullgraph=True, backend=counter)
    x = torch.randn(4, 16)
    for _ in range(12):
        module = ops.Sequential(ops.Linear(16, 16), gelu("tanh"))
        module[1].register_forward_hook(lambda *_: None).remove()
        torch.testing.assert_close(call(module, x), module(x))
    assert counter.frame_count == 1


def test_pickled_modules_are_of_their_kind():
    """Also those that were pickled without the text that the compiler guards on."""
    call = torch.compile(lambda module, x: module(x), fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 16)
    for approximate in ("tanh", "none"):
        state = gelu(approximate).__getstate__()
        state.pop("_description_text", None)
        module = ops.GELU.__new__(ops.GELU)
        module.__setstate__(state)
        torch.testing.assert_close(call(module, x), gelu(approximate)(x), rtol=0, atol=0)


def test_component_of_a_linear_breaks_the_graph():
    linear, x = ops.Linear(16, 16), torch.randn(4, 16)
    found = torch.compile(lambda x: linear.basic_ops[0](x), backend="aot_eager")(x)
    torch.testing.assert_close(found, linear.basic_ops[0](x))


def test_compiled_export_that_accumulates_raises():
    module = ops.Linear(16, 16, bias=False, accumulate_into_main_grad=True)
    module.weight.main_grad = torch.zeros(16, 16)
    exported = torch.export.export(module, (torch.randn(4, 16),)).module()
    with pytest.raises(Exception, match="Compile the module instead of the exported program"):
        torch.compile(exported, backend="aot_eager")(torch.randn(4, 16)).sum().backward()


def test_traced_dropouts_are_not_merged():
    from torch._functorch.compile_utils import fx_graph_cse

    drop = ops.Dropout(0.5)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: (drop(x), drop(x)))(torch.ones(64)).graph
    calls = [node for node in fx_graph_cse(graph).nodes if "pipeline_forward" in str(node.target)]
    assert len(calls) == 2
