"""Inputs, weights, hooks and buffers that a caller changes unseen by autograd, a kernel or a cached plan: the result is
correct, or an error names the cause."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import OrderedDict

import pytest
import torch
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from torchweft import ops

F64 = {"dtype": torch.float64}


def block(**options) -> ops.Sequential:
    return ops.Sequential(
        ops.RMSNorm(32, **options), ops.Linear(32, 64, **options), ops.GELU(), ops.Linear(64, 32, **options)
    )


# ---- sizes of parameters ----

WRONG_SIZES = {
    "Linear.weight": (lambda: ops.Linear(16, 8), "weight", (8, 12)),
    "Linear.bias short": (lambda: ops.Linear(16, 8), "bias", (3,)),
    "Linear.bias long": (lambda: ops.Linear(16, 8), "bias", (9,)),
    "Linear.bias matrix": (lambda: ops.Linear(16, 8), "bias", (1, 8)),
    "BasicLinear.weight": (lambda: ops.BasicLinear(16, 8), "weight", (16, 8)),
    "Bias": (lambda: ops.Bias(16), "bias", (1,)),
    "LayerNorm.weight": (lambda: ops.LayerNorm(16), "weight", (3,)),
    "LayerNorm.bias": (lambda: ops.LayerNorm(16), "bias", (3,)),
    "RMSNorm.weight": (lambda: ops.RMSNorm(16), "weight", (1,)),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("case", WRONG_SIZES)
def test_parameter_of_wrong_size_raises(case, dtype):
    make, name, shape = WRONG_SIZES[case]
    module, x = make().to(dtype), torch.randn(300, 16, dtype=dtype)
    nested = ops.Sequential(module, ops.GELU())
    for call in (module, nested):
        call(x)
        right = getattr(module, name)
        setattr(module, name, Parameter(torch.ones(shape, dtype=dtype)))
        with pytest.raises(ValueError, match=rf"parameter '{name}' of (Sequential\[0\] )?{type(module).__name__} has"):
            call(x)
        setattr(module, name, right)
        call(x)


def test_functional_call_checks_sizes():
    linear, x = ops.Linear(16, 8), torch.randn(4, 16)
    with pytest.raises(ValueError, match=r"'bias'.*shape \[3\], expected \[8\]"):
        torch.func.functional_call(linear, {"bias": torch.zeros(3)}, (x,))


def test_parameter_that_is_not_floating_point_raises():
    linear = ops.Linear(16, 8, bias=False)
    linear.weight = Parameter(torch.ones(8, 16, dtype=torch.int64), requires_grad=False)
    with pytest.raises(TypeError, match="int64"):
        linear(torch.randn(4, 16))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_strided_parameters_give_same_results(dtype):
    module, x = ops.Sequential(ops.LayerNorm(64), ops.Linear(64, 48)).to(dtype), torch.randn(300, 64).to(dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_()
    want = module(x)
    for m in module:
        for name, p in list(m.named_parameters()):
            padded = torch.empty(*p.shape, 2, dtype=dtype)
            padded[..., 0] = p.detach()
            setattr(m, name, Parameter(padded[..., 0]))
    assert torch.equal(module(x), want)


# ---- views made below autograd share version counters with the caller's tensors ----

RESHAPED = {
    "reshape, activation": lambda: ops.Sequential(ops.Reshape((-1, 8)), ops.SiLU()),
    "reshape, linear": lambda: ops.Sequential(ops.Reshape((-1, 8)), ops.Linear(8, 4)),
    "reshape, norm": lambda: ops.Sequential(ops.Reshape((-1, 8)), ops.RMSNorm(8)),
    "reshape twice": lambda: ops.Sequential(ops.Reshape((-1,)), ops.Reshape((-1, 8)), ops.SwiGLU()),
}


@pytest.mark.parametrize("model", RESHAPED)
def test_input_written_through_reshape_is_detected(model):
    x = torch.randn(4, 2, 8, requires_grad=True) * 1
    y = RESHAPED[model]()(x)
    with torch.no_grad():
        x.mul_(-3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_extra_output_written_through_reshape_is_detected():
    x = torch.randn(4, 8, requires_grad=True)
    y, e = ops.Sequential(ops.Linear(8, 8), ops.MakeExtraOutput(), ops.Reshape((-1, 4)), ops.SiLU())(x)
    with torch.no_grad():
        e.mul_(-3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_delayed_gradient_detects_change_of_reshaped_input():
    linear, x = ops.Linear(8, 8, bias=False, delay_wgrad_compute=True), torch.ones(4, 8)
    ops.Sequential(ops.Reshape((4, 8)), linear)(x).sum().backward()
    x.mul_(100)
    with pytest.raises(RuntimeError, match="modified in place"):
        linear.backward_dw()


def test_delayed_gradient_detects_change_of_reshaped_dy():
    linear, grad = ops.Linear(8, 8, bias=False, delay_wgrad_compute=True), torch.ones(2, 2, 8)
    ops.Sequential(linear, ops.Reshape((2, 2, 8)))(torch.ones(4, 8)).backward(grad)
    grad.mul_(100)
    with pytest.raises(RuntimeError, match="modified in place"):
        linear.backward_dw()


def test_delayed_gradient_detects_change_of_grouped_input():
    linear = ops.GroupedLinear(2, 8, 8, bias=False, delay_wgrad_compute=True)
    x = torch.ones(2, 2, 8)
    linear(x, torch.tensor([2, 2])).sum().backward()
    x.mul_(100)
    with pytest.raises(RuntimeError, match="modified in place"):
        linear.backward_dw()


# ---- replaced attributes ----


def test_replaced_parameter_dict_is_used():
    for module in (ops.RMSNorm(8), ops.Linear(8, 8), ops.Sequential(ops.RMSNorm(8))):
        x = torch.randn(4, 8)
        module(x)
        holder = module[0] if isinstance(module, ops.Sequential) else module
        holder._parameters = dict(holder._parameters)
        holder.weight = Parameter(torch.zeros_like(holder.weight))
        if getattr(holder, "bias", None) is not None:
            holder.bias = Parameter(torch.zeros_like(holder.bias))
        assert module(x).abs().sum() == 0


def test_replaced_hook_dicts_work():
    seq, x, ran = ops.Sequential(ops.GELU(), ops.ReLU()), torch.randn(4, 8), []
    seq(x)
    seq[0]._forward_hooks = OrderedDict()
    seq(x)
    seq[0].register_forward_hook(lambda *_: ran.append(1))
    seq(x)
    assert ran


def test_replaced_children_run():
    seq, x = ops.Sequential(ops.GELU()), torch.randn(4, 8)
    seq(x)
    seq._modules = {"0": ops.ReLU()}
    assert torch.equal(seq(x), x.relu())


def test_patched_forward_runs(monkeypatch):
    x = torch.randn(4, 8)
    seq = ops.Sequential(ops.GELU(), ops.ReLU())
    seq(x)
    seq[0].__dict__["forward"] = lambda input: input + 1
    assert torch.equal(seq(x), (x + 1).relu())
    del seq[0].__dict__["forward"]
    assert torch.allclose(seq(x), torch.nn.functional.gelu(x, approximate="tanh").relu())
    monkeypatch.setattr(type(seq[1]), "forward", lambda self, input: input - 5)
    assert torch.allclose(seq(x), torch.nn.functional.gelu(x, approximate="tanh") - 5)
    monkeypatch.undo()
    assert torch.allclose(seq(x), torch.nn.functional.gelu(x, approximate="tanh").relu())


def test_subclass_call_runs():
    class Doubled(ops.GELU):
        def __call__(self, x):
            return 2 * super().__call__(x)

    x = torch.randn(4, 8)
    seq = ops.Sequential(Doubled(), ops.ReLU())
    assert torch.allclose(seq(x), (2 * ops.GELU()(x)).relu())
    assert "__call__" in str(seq.explain(x))


def test_patched_module_call_runs(monkeypatch):
    x, seq, seen = torch.randn(4, 8), ops.Sequential(ops.GELU(), ops.ReLU()), []
    want = seq(x)
    original = torch.nn.Module.__call__

    def watched(self, *args, **kwargs):
        seen.append(type(self).__name__)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__call__", watched)
    assert torch.allclose(seq(x), want)
    assert seen == ["Sequential", "GELU", "ReLU"]


def test_changed_class_of_child_is_detected():
    class Doubled(ops.GELU):
        def __call__(self, x):
            return 2 * super().__call__(x)

    x, seq = torch.randn(4, 8), ops.Sequential(ops.GELU(), ops.ReLU())
    seq(x)
    seq[0].__class__ = Doubled
    assert torch.allclose(seq(x), (2 * ops.GELU()(x)).relu())


@pytest.mark.parametrize("make", (lambda: ops.Linear(8, 8), lambda: ops.RMSNorm(8), lambda: block()[0:1]))
def test_copied_dict_does_not_share_pipeline(make):
    x = torch.randn(4, 8 if not isinstance(make(), ops.Sequential) else 32)
    module = make()
    module(x)
    replica = module._replicate_for_data_parallel()
    replica._parameters = {k: None if p is None else torch.zeros_like(p) for k, p in module._parameters.items()}
    replica._modules = {k: m._replicate_for_data_parallel() for k, m in module._modules.items()}
    for k, child in replica._modules.items():
        child._parameters = {name: torch.zeros_like(p) for name, p in module._modules[k]._parameters.items()}
    assert replica(x).abs().sum() == 0
    assert module(x).abs().sum() > 0


# ---- saved-tensor hooks ----

BAD_HOOKS = {
    "rows": lambda t: t[:1],
    "dtype": lambda t: t.double() if t.is_floating_point() else t,
    "flat": lambda t: t.reshape(-1) if t.dim() > 1 else t[:0],
    "meta": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("bad", BAD_HOOKS)
@pytest.mark.parametrize("model", ("block", "linear", "norm", "dropout"))
def test_hook_that_unpacks_wrong_tensor_raises(model, bad):
    module = {
        "block": block,
        "linear": lambda: ops.Linear(32, 32),
        "norm": lambda: ops.LayerNorm(32),
        "dropout": lambda: ops.Sequential(ops.Linear(32, 32), ops.Dropout(0.5)),
    }[model]()
    x = torch.randn(40, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, BAD_HOOKS[bad]):
        y = module(x)
    with pytest.raises(RuntimeError, match="saved-tensor hook"):
        y.square().sum().backward()


def test_hook_may_change_strides_and_storage():
    module, x = block(), torch.randn(40, 32, requires_grad=True)
    (want,) = torch.autograd.grad(module(x).square().sum(), x)

    def strided(t):
        return t.t().contiguous().t() if t.dim() == 2 else t

    for unpack in (strided, torch.clone):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = module(x)
        assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], want)


def test_hook_sees_parameters_as_parameters():
    linear, seen = ops.Linear(8, 8, bias=False), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        linear(torch.randn(4, 8, requires_grad=True))
    assert any(t._base is linear.weight for t in seen)


# ---- weights ----


def test_backward_uses_forward_weight_after_data_is_set():
    x = torch.randn(4, 32, requires_grad=True)
    module = block()
    (want,) = torch.autograd.grad(module(x).sum(), x)
    y = module(x).sum()
    for p in module.parameters():
        p.data = torch.zeros_like(p)
    assert torch.equal(torch.autograd.grad(y, x)[0], want)


def test_weight_written_between_passes_is_detected():
    linear, x = ops.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    y = linear(x).sum()
    with torch.no_grad():
        linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def checkpointed(linear, x, depth: int, reentrant: bool):
    call = linear
    for _ in range(depth):
        call = (lambda inner: lambda t: checkpoint(inner, t, use_reentrant=reentrant))(call)
    return call(x)


@pytest.mark.parametrize("depth", (1, 2, 3))
@pytest.mark.parametrize("reentrant", (True, False))
def test_overwritten_once_under_nested_backwards(depth, reentrant):
    linear = ops.Linear(8, 8, bias=False, accumulate_into_main_grad=True)
    linear.weight.main_grad, linear.weight.overwrite_main_grad = torch.full((8, 8), 7.0), True
    x = torch.ones(4, 8, requires_grad=True)
    for _ in range(2):  # each backward overwrites the result of the previous one
        y = sum(checkpointed(linear, x * k, depth, reentrant).sum() for k in (1, 2))
        y.backward()
        assert torch.equal(linear.weight.main_grad, torch.full((8, 8), 12.0))


def test_failed_backward_is_not_outer_backward():
    linear = ops.Linear(8, 8, bias=False, accumulate_into_main_grad=True)
    linear.weight.main_grad, linear.weight.overwrite_main_grad = torch.zeros(8, 8), True
    x = torch.ones(4, 8, requires_grad=True)

    def failing(t):
        y = linear(t)
        if torch.is_grad_enabled():  # the recomputation inside backward
            raise RuntimeError("planned")
        return y

    y = checkpoint(failing, x, use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match="planned"):
        y.backward()
    for factor in (1, 3):
        (checkpoint(linear, x, use_reentrant=True).sum() * factor).backward()
        assert torch.equal(linear.weight.main_grad, torch.full((8, 8), 4.0 * factor))


def test_nested_backward_of_unknown_outer_raises():
    linear = ops.Linear(8, 8, bias=False, accumulate_into_main_grad=True)
    linear.weight.main_grad, linear.weight.overwrite_main_grad = torch.zeros(8, 8), True
    inner = linear(torch.ones(4, 8)).sum()

    class Starts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            inner.backward()
            return grad

    with pytest.raises(RuntimeError, match="inside another one"):
        Starts.apply(torch.ones(1, requires_grad=True)).sum().backward()


def test_backward_dw_runs_once_per_backward():
    linear, x = ops.Linear(8, 8, bias=False, delay_wgrad_compute=True), torch.ones(4, 8)
    (linear(x).sum() + linear(2 * x).sum()).backward()
    linear(x).sum().backward()
    assert linear.pending_backward_dw == 2
    linear.backward_dw()
    assert torch.equal(linear.weight.grad, torch.full((8, 8), 12.0))
    assert linear.pending_backward_dw == 1
    linear.backward_dw()
    linear.backward_dw()  # nothing is pending
    assert torch.equal(linear.weight.grad, torch.full((8, 8), 16.0))


def test_reentrant_checkpoint_counts_as_one_delayed_backward():
    linear = ops.Linear(8, 8, bias=False, delay_wgrad_compute=True)
    x = torch.ones(4, 8, requires_grad=True)
    sum(checkpoint(linear, x * k, use_reentrant=True).sum() for k in (1, 2)).backward()
    linear.backward_dw()
    assert torch.equal(linear.weight.grad, torch.full((8, 8), 12.0))


# ---- buffers for gradients ----


def grouped_gradient(use, **buffer):
    torch.manual_seed(0)
    linear, splits = ops.GroupedLinear(2, 8, 8, bias=False), torch.tensor([2, 2])
    x = torch.ones(4, 8, requires_grad=True)
    use(lambda t: linear(t, splits, **buffer).sum(), x)
    return x.grad


def accumulated(f, x):
    for factor in (1, 10):
        (f(x) * factor).backward()


def used_twice(f, x):
    h = x * 1
    (f(h) + 10 * f(h)).backward()


def kept_by_a_hook(f, x):
    kept = []
    h = x * 1
    h.register_hook(kept.append)
    f(h).backward(retain_graph=True)
    before = kept[0].clone()
    (f(x * 2) * 3).backward()
    assert torch.equal(kept[0], before)


@pytest.mark.parametrize("use", (accumulated, used_twice, kept_by_a_hook))
def test_gradient_buffer_keeps_earlier_gradients(use):
    buffer = torch.zeros(4, 8)
    assert torch.equal(grouped_gradient(use, grad_input=buffer), grouped_gradient(use))


def test_gradient_buffer_is_passed_on_without_copy():
    linear, buffer = ops.GroupedLinear(2, 8, 8, bias=False), torch.zeros(4, 8)
    seen = []
    for _ in range(3):
        h = torch.ones(4, 8, requires_grad=True) * 1
        h.register_hook(lambda g: seen.append(g.data_ptr() == buffer.data_ptr()))
        linear(h, torch.tensor([2, 2]), grad_input=buffer).sum().backward()
    assert seen == [True] * 3


# ---- exit, threads ----

EXITS = {
    "fusion never removed": "from torchweft import ops; ops.register_forward_fusion(lambda o, **k: o)",
    "fusion in use": """
import torch
from torchweft import ops
ops.register_backward_fusion(lambda o, **k: o)
seq = ops.Sequential(ops.GELU(), ops.ReLU())
seq(torch.randn(2, 2, requires_grad=True)).sum().backward()
""",
    "graph alive": """
import torch
from torchweft import ops
class Twice(ops.BasicOperation):
    def op_forward(self, ctx, x, **_):
        ctx.save_for_backward(x)
        return 2 * x
    def op_backward(self, ctx, grad):
        return 2 * grad, ()
keep = Twice()(torch.randn(2, 2, requires_grad=True))
""",
}


@pytest.mark.parametrize("case", EXITS)
def test_process_exits_cleanly(case):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", EXITS[case]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr


def test_threads_may_replace_parameters_of_their_modules():
    wrong = []

    def work(fill: float) -> None:
        linear, x = ops.Linear(8, 8, bias=False), torch.ones(2, 8)
        for i in range(200):
            linear._parameters = {"weight": Parameter(torch.full((8, 8), fill + i)), "bias": None}
            if not torch.equal(linear(x), torch.full((2, 8), 8 * (fill + i))):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(float(k),)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# ---- memory that was replaced or freed between the passes ----------------------------------------------------------


def backward_of(change, op, *shapes, **kinds):
    """The gradients of `op` after `change` of its first input between the passes, and those without it."""
    found = []
    for changed in (False, True):
        torch.manual_seed(0)
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        y = op(*inputs, **kinds)
        if changed:
            change(inputs[0])
        found.append(torch.autograd.grad(y.square().sum(), [p for p in op.parameters()] + inputs[1:]))
    return found


SAVERS = {
    "Linear": (lambda: ops.Linear(1024, 512), (512, 1024)),
    "RMSNorm": (lambda: ops.RMSNorm(1024), (512, 1024)),
    "LayerNorm": (lambda: ops.LayerNorm(1024), (512, 1024)),
    "ScaledSwiGLU": (lambda: ops.ScaledSwiGLU(), (512, 1024), (512,)),
    "mlp": (block, (64, 32)),
}


def set_small(x):
    x.data = torch.zeros(1, 1)


def set_other_values(x):
    x.data = torch.zeros_like(x)


@pytest.mark.parametrize("change", [set_small, set_other_values])
@pytest.mark.parametrize("name", SAVERS)
def test_data_of_an_input_set_between_the_passes_does_not_change_gradients(name, change):
    make, *shapes = SAVERS[name]
    expected, got = backward_of(change, make(), *shapes)
    assert got and all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SAVERS)
def test_freed_memory_of_an_input_raises(name, dtype):
    make, *shapes = SAVERS[name]
    op = make().to(dtype)
    inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    y = op(*inputs)
    inputs[0].untyped_storage().resize_(0)
    with pytest.raises((ValueError, RuntimeError), match="its storage was freed|not allocated|out of bounds"):
        y.sum().backward()
    with pytest.raises((ValueError, RuntimeError), match="its storage was freed|not allocated|out of bounds"):
        op(*inputs)


def test_data_set_before_a_delayed_weight_gradient_does_not_change_it():
    linear = ops.Linear(1024, 512, delay_wgrad_compute=True)
    x = torch.randn(640, 1024, requires_grad=True)
    linear(x).sum().backward()
    expected = torch.ones(512, 640) @ x.detach()
    x.data = torch.zeros(1, 1)
    linear.backward_dw()
    torch.testing.assert_close(linear.weight.grad, expected, rtol=1e-4, atol=1e-4)


class ShortGradient(ops.FusedOperation):
    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        return torch.zeros(1), [()], [()]


class ShortStatistic(ops.FusedOperation):
    def fuser_forward(self, basic_op_ctxs, input_, **_):
        basic_op_ctxs[0].save_for_backward(torch.zeros_like(input_), torch.zeros(1, 1))
        return torch.zeros_like(input_), [()]


@pytest.mark.parametrize("norm", [ops.RMSNorm, ops.LayerNorm])
def test_wrong_sizes_from_a_fusion_in_python_raise(norm):
    def replace(kind, by):
        return lambda ops_, *, recipe: [by([op]) if isinstance(op, kind) else op for op in ops_]

    x, model = torch.randn(512, 1024, requires_grad=True), ops.Sequential(norm(1024), ops.GELU())
    with ops.register_backward_fusion(replace(ops.GELU, ShortGradient)):
        with pytest.raises(ValueError, match=r"the gradient has shape \[1\], expected 524288 elements"):
            model(x).sum().backward()
    with ops.register_forward_fusion(replace(norm, ShortStatistic)):
        with pytest.raises(ValueError, match=r"saved (statistic|mean) has shape \[(1, 1|0)\], expected 512 elements"):
            model(x).sum().backward()
