"""The dispatcher ops: arguments that do not match the pipeline text, dispatch modes, exporters and tracers."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from torchweft import _C, ops

ROOT = Path(__file__).resolve().parents[2]
forward, backward = torch.ops.weft.pipeline_forward, torch.ops.weft.pipeline_backward


def block(**options) -> ops.Sequential:
    return ops.Sequential(
        ops.RMSNorm(32, **options), ops.Linear(32, 64, **options), ops.GELU(), ops.Linear(64, 32, **options)
    )


def described(pipeline: str, count: int, word: str = "cpu:float32:gc") -> str:
    return f'{pipeline} @call(autocast=none, eval=0, tensors="{" ".join([word] * count)}")'


LINEAR = described("BasicLinear(in_features=8, out_features=8)", 2)
GELU = described("GELU()", 1)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (4, 8))


# ---- mismatched arguments ----

REJECTED_CALLS = {
    "no tensors": lambda: forward([], GELU),
    "too few parameters": lambda: forward([x()], LINEAR),
    "too many parameters": lambda: forward([x(), x(8, 8), x(8, 8)], LINEAR),
    "too many extra inputs": lambda: forward([x()] * 50, GELU),
    "too few extra inputs": lambda: forward([x()], described("AddExtraInput()", 2)),
    "weight of another shape": lambda: forward([x(), x(8, 4)], LINEAR),
    "weight of another dtype": lambda: forward([x(), x(8, 8).double()], LINEAR),
    "input of another dtype": lambda: forward([x().bfloat16(), x(8, 8)], LINEAR),
    "text of another dtype": lambda: forward([x(), x(8, 8)], LINEAR.replace("float32", "bfloat16")),
    "text of another device": lambda: forward([x()], GELU.replace("cpu", "meta")),
    "input of another width": lambda: forward([x(4, 7), x(8, 8)], LINEAR),
    "scalar input": lambda: forward([torch.tensor(1.0), torch.ones(8)], described("RMSNorm(normalized_shape=[8])", 2)),
    "scalar input of a linear": lambda: forward([torch.tensor(1.0), x(8, 8)], LINEAR),
    "odd columns": lambda: forward([x(4, 7)], described("SwiGLU()", 1)),
    "extra input of another shape": lambda: forward([x(), x(3, 8)], described("AddExtraInput()", 2)),
    "scales of another length": lambda: forward([x(), x(3)], described("ScaledSwiGLU()", 2)),
    "reshape that does not fit": lambda: forward([x()], described("Reshape(shape=[5, 7])", 1)),
    "reshape that overflows": lambda: forward([x()], described("Reshape(shape=[9223372036854775807, 4])", 1)),
    "gradient of another shape": lambda: backward([x(1)], [x(), x()], GELU),
    "gradient of another dtype": lambda: backward([x().double()], [x(), x()], GELU),
    "gradient with more rows": lambda: backward([x(400000, 8)], [x(), x(8, 8), x(0), x(0)], LINEAR),
    "no gradients": lambda: backward([], [x(), x()], GELU),
    "too many gradients": lambda: backward([x(), x()], [x(), x()], GELU),
    "nothing saved": lambda: backward([x()], [x()], GELU),
    "too much saved": lambda: backward([x()], [x()] * 5000, GELU),
    "saved of another shape": lambda: backward(
        [x()], [x(), torch.ones(8), x(0), x(1)], described("RMSNorm(normalized_shape=[8])", 2)
    ),
    "saved of another dtype": lambda: backward(
        [x()], [x(), torch.ones(8), x(0), x(4, 1).double()], described("RMSNorm(normalized_shape=[8])", 2)
    ),
    "backward without parameters": lambda: backward([x()], [x(), x()], LINEAR),
    "backward, weight of another shape": lambda: backward([x()], [x(), x(8, 4), x(0), x(0)], LINEAR),
    "backward, scales of another length": lambda: backward(
        [x(4, 4)], [x(), x(3), x(), x(3)], described("ScaledSwiGLU()", 2)
    ),
    "sizes without parameters": lambda: _C.infer(LINEAR, [((4, 8), torch.float32)]),
    "sizes of too many tensors": lambda: _C.infer(GELU, [((4, 8), torch.float32)] * 2000),
    "nested lists": lambda: _C.normalize_text("Reshape(shape=" + "[" * 200_000),
    "nested lists in the call": lambda: forward([x()], "GELU() @call(autocast=none, eval=0, tensors=" + "[" * 200_000),
    "channel that is a number": lambda: _C.normalize_text("AddExtraInput() <5"),
    "call that is a number": lambda: forward([x()], "GELU() @call(autocast=none, eval=0, tensors=5)"),
    "negative mask": lambda: forward([x()], GELU.replace("eval=0", "eval=-1")),
    "too many groups": lambda: _C.normalize_text("GroupedLinear(num_groups=2000000000, in_features=8, out_features=8)"),
}


@pytest.mark.parametrize("case", REJECTED_CALLS)
def test_call_that_contradicts_its_text_raises(case):
    with pytest.raises((ValueError, RuntimeError)):
        REJECTED_CALLS[case]()


def test_noncontiguous_tensors_are_made_contiguous():
    wide, weight = x(64, 128)[:, ::2], x(64, 64).t()
    text = described("BasicLinear(in_features=64, out_features=64); Bias(size=64); GELU()", 3)
    got = forward([wide, weight, x(64) * 0], text)[0]
    torch.testing.assert_close(got, torch.nn.functional.gelu(wide @ weight.t(), approximate="tanh"))


def test_64_operations_in_evaluation_mode_have_a_text():
    model = ops.Sequential(*(ops.Dropout(0.5) for _ in range(64))).eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    given = x()
    assert torch.equal(compiled(given), given)


# ---- dispatch modes ----


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def gradients(model, given):
    given = given.clone().requires_grad_()
    model.zero_grad()
    model(given).square().sum().backward()
    return [given.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_dispatch_mode_sees_one_call_with_same_results(dtype):
    model, given = block(dtype=dtype), torch.randn(40, 32, dtype=dtype)
    want = gradients(model, given)
    with Seen() as seen:
        got = gradients(model, given)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    assert seen.calls.count("weft.pipeline_forward.default") == 1
    assert seen.calls.count("weft.pipeline_backward.default") == 1
    assert not any("mm" in call for call in seen.calls)


class Twice(ops.BasicOperation):
    def op_forward(self, ctx, input_, **_):
        return 2 * input_

    def op_backward(self, ctx, grad_output):
        return 2 * grad_output, ()


def save_products(ctx, op, *args, **kwargs):
    products = (torch.ops.aten.mm.out, torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = {
    "block": block,
    "operation written in Python": lambda: ops.Sequential(ops.Linear(32, 64), Twice(), ops.GELU(), ops.Linear(64, 32)),
    "one linear": lambda: ops.Linear(32, 32),
    "plain modules between": lambda: ops.Sequential(ops.Linear(32, 64), torch.nn.Tanh(), ops.Linear(64, 32)),
}


@pytest.mark.parametrize("name", SELECTIVE)
def test_selective_checkpointing_keeps_gradients(name):
    model, given = SELECTIVE[name](), torch.randn(40, 32)
    want = gradients(model, given)
    context = functools.partial(create_selective_checkpoint_contexts, save_products)

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, t):
            return checkpoint(self.model, t, use_reentrant=False, context_fn=context)

    for a, b in zip(gradients(Checkpointed(), given), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_selective_checkpointing_into_main_grad():
    model, given = ops.Linear(32, 32, bias=False, accumulate_into_main_grad=True), torch.randn(40, 32)
    twin = torch.nn.Linear(32, 32, bias=False)
    twin.weight.data.copy_(model.weight)
    model.weight.main_grad = torch.ones(32, 32)
    context = functools.partial(create_selective_checkpoint_contexts, save_products)
    checkpoint(model, given.requires_grad_(), use_reentrant=False, context_fn=context).square().sum().backward()
    twin(given.detach()).square().sum().backward()
    torch.testing.assert_close(model.weight.main_grad, twin.weight.grad + 1)
    assert model.weight.grad is None


def test_main_grad_of_a_call_with_dropout():
    model = ops.Sequential(
        ops.RMSNorm(32),
        ops.Linear(32, 32, accumulate_into_main_grad=True),
        ops.Dropout(1e-9),
        ops.Linear(32, 32, bias=False, accumulate_into_main_grad=True),
    )
    given, found = torch.randn(40, 32, requires_grad=True), []
    for mode in (contextlib.nullcontext(), Seen()):
        for i in (1, 3):
            model[i].weight.main_grad = torch.ones(32, 32)
        with mode:
            model(given).square().sum().backward()
        found.append([model[i].weight.main_grad for i in (1, 3)])
    assert mode.calls.count("weft.pipeline_forward_random.default") == 1
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("flag", (None, False))
def test_main_grad_is_mutated_argument(flag):
    model = ops.Sequential(ops.Linear(32, 64, accumulate_into_main_grad=True), ops.GELU(), ops.Linear(64, 32))
    given = torch.randn(40, 32)
    weight = model[0].weight
    weight.main_grad = torch.ones(64, 32)
    if flag is not None:
        weight.grad_added_to_main_grad = flag
    model(given).square().sum().backward()
    expected, weight.main_grad = weight.main_grad, torch.ones(64, 32)
    version = weight.main_grad._version
    model.zero_grad()
    with Seen() as seen, FlopCounterMode(display=False) as counter:
        model(given).square().sum().backward()
    torch.testing.assert_close(weight.main_grad, expected)
    assert weight.main_grad._version > version
    assert seen.calls.count("weft.pipeline_backward_into.default") == 1
    assert counter.get_total_flops() == 2 * 40 * 32 * 64 * (2 + 3)
    assert (weight.grad is None) == (flag is None)
    if flag is not None:
        assert weight.grad_added_to_main_grad is True


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_flops_are_counted_as_for_torch(dtype):
    def count(model, given):
        with FlopCounterMode(display=False) as counter:
            model(given).sum().backward()
        return counter.get_total_flops()

    torch_block = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)).to(dtype)
    block = ops.Sequential(ops.Linear(64, 128, dtype=dtype), ops.GELU(), ops.Linear(128, 64, dtype=dtype))
    given = torch.randn(256, 64, dtype=dtype)
    assert count(block, given) == count(torch_block, given) > 0
    for first in (block[0], torch_block[0]):
        first.requires_grad_(False)
    assert count(block, given) == count(torch_block, given)
    grouped = ops.GroupedLinear(2, 64, 32)
    with FlopCounterMode(display=False) as counter:
        grouped(torch.randn(10, 64), torch.tensor([4, 6])).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 10 * 64 * 32


# ---- tracers and exporters ----


def test_make_fx_records_pipeline():
    model, given = block(), torch.randn(40, 32)
    traced = make_fx(lambda t: model(t))(given)
    other = torch.randn(40, 32)
    torch.testing.assert_close(traced(other), model(other))
    with pytest.raises(NotImplementedError, match="make_fx"):
        make_fx(lambda t: ops.Sequential(ops.GELU(), Twice())(t))(given)


@pytest.mark.parametrize("model", (lambda: ops.Linear(32, 32), block), ids=("linear", "block"))
def test_jit_trace_is_rejected(model):
    with pytest.raises(NotImplementedError, match="torch.jit.trace"):
        torch.jit.trace(model().requires_grad_(False), (torch.randn(4, 32),))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(32, 32), block()

    def forward(self, t):
        return self.b(self.a(t))


def test_program_exported_without_gradients_rejects_training():
    net, given = Net(), torch.randn(8, 32)
    with torch.no_grad():
        exported = torch.export.export(net, (given,)).module()
    torch.testing.assert_close(exported(given), net(given))
    with pytest.raises(RuntimeError, match="gradient of the input is needed, but the program was exported"):
        exported(given).square().mean().backward()


def test_program_exported_with_gradients_trains_and_is_one_call():
    net, given = Net(), torch.randn(8, 32)
    graph = str(torch.export.export(net, (given,)).graph)
    assert graph.count("torch.ops.weft.pipeline_forward.default") == 1
    net(given).square().mean().backward()
    want = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    exported = torch.export.export(net, (given,)).module()
    exported(given).square().mean().backward()
    for p, grad in zip(exported.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_parameter_unfrozen_after_export_is_named():
    net, given = Net().requires_grad_(False), torch.randn(8, 32)
    exported = torch.export.export(net, (given,)).module()
    next(iter(exported.b.get_submodule("1").parameters())).requires_grad_(True)
    with pytest.raises(RuntimeError, match="parameter 'weight' of operation 1 .BasicLinear."):
        exported(given).square().mean().backward()


def test_packaged_program_runs_in_python_and_cpp(tmp_path):
    model, given = block().requires_grad_(False).eval(), torch.linspace(-1, 1, 40 * 32).view(40, 32)
    with torch.no_grad():
        exported = torch.export.export(model, (given,))
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        want = model(given)
        torch.testing.assert_close(torch._inductor.aoti_load_package(package)(given), want)
    program = ROOT / "build/release/load_package"
    libraries = {"LD_LIBRARY_PATH": str(Path(torch.__file__).parent / "lib")}  # the package needs libtorch.so
    done = subprocess.run([program, package], env=os.environ | libraries, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(done.stdout) == pytest.approx(float(want.abs().sum()), rel=1e-5)


def test_packaged_program_with_dropout(tmp_path):
    model, given = ops.Dropout(0.5), torch.ones(40, 32)
    exported = torch.export.export(model, (given,))
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    first, second = loaded(given), loaded(given)
    assert not torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, 2.0}


MISNAMED_SLOTS = """
import ctypes, sys, torch
ctypes.CDLL(sys.argv[1])
from torchweft import ops

torch.manual_seed(0)
op, x = ops.MisnamedSlots(8).double(), torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
op.weight.data.uniform_(1, 2)
y = torch.compile(op, fullgraph=True, backend="aot_eager")(x)
found = torch.autograd.grad(y.square().sum(), [x, op.weight])
expected = torch.autograd.grad((op.weight * x * x).square().sum(), [x, op.weight])
torch.testing.assert_close(found, expected)
"""


def test_names_of_saved_slots_do_not_matter():
    """A slot called "input" may hold another tensor, and any slot may hold a parameter."""
    plugin = ROOT / "build/release/libmisnamed_slots.so"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, "-c", MISNAMED_SLOTS, plugin]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
