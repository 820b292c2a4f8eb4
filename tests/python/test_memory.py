"""Memory: a call frees what it allocated, and unreferenced objects are freed."""

import gc
import os
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch

import torchweft
from torchweft import ops

WIDTH = 8


def in_fresh_process(script: str) -> list[int]:
    """Runs a script that can call `resident()` (resident set size in bytes); returns the integers it prints."""
    prelude = """
        import gc, os, torch
        from torchweft import ops
        torch.set_num_threads(1)
        torch.manual_seed(0)

        def resident():
            gc.collect()
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    """
    package = os.path.dirname(os.path.dirname(torchweft.__file__))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


TRAINING = """
    model = {model}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, target = torch.randn(32, 64), torch.randn(32, 64)
    for step in range(1, 1001):
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            first = loss.item()
        if step in (100, 1000):
            print(resident())
    assert loss.item() < first
"""
MODELS = {
    "operations": """ops.Sequential(
        ops.Linear(64, 128), ops.GELU(), ops.Linear(128, 128), ops.GELU(), ops.Linear(128, 64))""",
    "residual channel": """ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False), ops.RMSNorm(64),
        ops.Linear(64, 128), ops.GELU(), ops.Linear(128, 64), ops.AddExtraInput().set_extra_input_channel(0, "r"))""",
    "plain modules between": """ops.Sequential(
        ops.Linear(64, 128), torch.nn.GELU(), ops.Linear(128, 128), torch.nn.GELU(), ops.Linear(128, 64))""",
}


@pytest.mark.parametrize("model", MODELS)
def test_1000_training_steps_do_not_grow_memory(model):
    at_100, at_1000 = in_fresh_process(TRAINING.format(model=MODELS[model]))
    print(f"resident {at_100 / 2**20:.1f} MiB after 100 steps, {at_1000 / 2**20:.1f} MiB after 1,000")
    assert abs(at_1000 - at_100) <= 0.01 * at_100


def test_1000_token_counts_do_not_grow_memory():
    before, after = in_fresh_process("""
        model = ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 128), ops.GELU(), ops.Linear(128, 64))
        x = torch.randn(1100, 64)
        for count in range(1100, 1000, -1):
            model(x[:count]).sum().backward()
        print(resident())
        for count in range(1000, 0, -1):
            model(x[:count]).sum().backward()
        print(resident())
        assert model._runner.plans_made <= 2
    """)
    assert after - before <= 0.01 * before


def test_creating_and_dropping_modules_does_not_grow_memory():
    before, after = in_fresh_process("""
        x = torch.randn(4, 64)
        def use():
            model = ops.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64))
            model[1].register_forward_hook(lambda *_: None)
            model(x).sum().backward()
        for count in range(500):
            use()
            if count == 99:
                print(resident())
        print(resident())
    """)
    assert after - before <= 0.01 * before


# ---- modules ----


class Doubled(ops.BasicOperation):
    """2x, in Python. Saves a tensor and an attribute for backward."""

    def op_forward(self, ctx, input_, **_):
        ctx.save_for_backward(input_)
        ctx.operation = self
        return 2 * input_

    def op_backward(self, ctx, grad_output):
        return 2 * grad_output, ()


class Negated(ops.BasicOperation):
    """-x, in Python. Saves no tensor."""

    def op_forward(self, ctx, input_, **_):
        return -input_

    def op_backward(self, ctx, grad_output):
        return -grad_output, ()


def hooked() -> ops.Sequential:
    seq = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.RMSNorm(WIDTH))
    seq[1].register_forward_hook(lambda *_: seq.training and None)  # the hook references the Sequential that holds it
    return seq


MODULES = {
    "operation": lambda: ops.GELU(),
    "operation with parameters": lambda: ops.RMSNorm(WIDTH),
    "Linear": lambda: ops.Linear(WIDTH, WIDTH),
    "Sequential": lambda: ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU()),
    "Sequential with hooks": hooked,
    "nested Sequential": lambda: ops.Sequential(ops.Identity(), ops.Sequential(ops.Linear(WIDTH, WIDTH))),
    "operation in Python": Doubled,
    "Sequential with an operation in Python": lambda: ops.Sequential(ops.Linear(WIDTH, WIDTH), Doubled(), ops.GELU()),
}


@pytest.mark.parametrize("kind", MODULES)
def test_dropped_module_is_freed(kind):
    module = MODULES[kind]()
    module(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
    with torch.no_grad():
        module(torch.randn(2, WIDTH))
    watched = [weakref.ref(each) for each in [*module.modules(), *module.parameters()]]
    del module
    gc.collect()
    assert [ref() for ref in watched if ref() is not None] == []


def test_removed_op_is_freed_after_next_call():
    seq = ops.Sequential(ops.Identity(), ops.Linear(WIDTH, WIDTH))
    seq(torch.randn(2, WIDTH))
    removed = weakref.ref(seq[1])
    del seq[1]
    seq(torch.randn(2, WIDTH))
    gc.collect()
    assert removed() is None


def test_removed_fusion_function_is_freed():
    class Fused(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            return input_, [()]

    def function(ops_, *, recipe):
        made.append(weakref.ref(fused := Fused(ops_[:1])))
        return [fused, *ops_[1:]]

    made: list[weakref.ref] = []
    seq = ops.Sequential(ops.Identity())
    watched = weakref.ref(function)
    with ops.register_forward_fusion(function):
        seq(torch.randn(2, WIDTH))
    seq(torch.randn(2, WIDTH))
    del function
    gc.collect()
    assert watched() is None and len(made) == 1 and made[0]() is None


# ---- the graph ----


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("python_op", [False, True], ids=["native", "with an operation in Python"])
def test_saved_tensors_are_released_by_backward(python_op):
    seq = ops.Sequential(ops.Linear(WIDTH, WIDTH), *([Doubled()] if python_op else []), ops.GELU())
    saved = []

    def pack(tensor):
        saved.append(weakref.ref(holder := Holder(tensor)))
        return holder

    x = torch.randn(2, WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        y = seq(x).sum()
    assert saved and all(ref() is not None for ref in saved)
    y.backward()
    gc.collect()
    assert all(ref() is None for ref in saved), "y is alive, but the graph must have released it"


def test_second_backward_without_saved_tensors_raises():
    x = torch.randn(2, WIDTH, requires_grad=True)
    y = ops.Sequential(Negated(), Negated())(x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


@pytest.mark.parametrize("kind", ["Linear", "Sequential", "operation in Python"])
def test_input_is_freed_after_backward(kind):
    module = MODULES[kind]()
    x = torch.randn(2, WIDTH)
    scale = torch.ones((), requires_grad=True)
    watched = weakref.ref(inner := x * scale)
    y = module(inner).sum()
    del inner
    gc.collect()
    assert watched() is not None, "backward needs it"
    y.backward()
    gc.collect()
    assert watched() is None


def test_call_without_grad_saves_nothing():
    module = MODULES["Sequential with an operation in Python"]()
    x = torch.randn(2, WIDTH)
    watched = weakref.ref(x)
    with torch.no_grad():
        y = module(x)
    del x
    gc.collect()
    assert watched() is None and y.grad_fn is None


def test_dropping_output_frees_graph():
    module = ops.Sequential(ops.Linear(WIDTH, WIDTH), Doubled(), ops.GELU())
    x = torch.randn(2, WIDTH)
    watched = weakref.ref(x)
    y = module(x)
    del x, y
    gc.collect()
    assert watched() is None


def test_op_that_keeps_its_output_is_freed():
    """The output's graph references the operation's context, and the operation references the output."""

    class Keeps(Doubled):
        def op_forward(self, ctx, input_, **_):
            return 2 * input_

    module = Keeps()
    module.last = module(torch.randn(2, WIDTH, requires_grad=True))
    module.last.sum().backward()
    watched = weakref.ref(module)
    del module
    gc.collect()
    assert watched() is None
