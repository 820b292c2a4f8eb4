"""A plan is made once and reused until something it depends on changes; the next call then uses the change."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from plain import apply

from torchweft import ops

WIDTH = 8


def mlp(**options) -> ops.Sequential:
    return ops.Sequential(ops.Linear(WIDTH, 16, **options), ops.GELU(), ops.Linear(16, WIDTH, **options))


def plain_mlp(seq: ops.Sequential, x: torch.Tensor) -> torch.Tensor:
    for op in seq:
        x, _ = apply(op, x)
    return x


def rows(count: int = 4, **options) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count), **options)


class PlansMade:
    """Counts the plans of a module that runs as one pipeline, and detects when its runner was rebuilt."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.runner, self.at_start = module, module._runner, module._runner.plans_made

    def __call__(self) -> int:
        assert self.module._runner is self.runner, "the pipeline was rebuilt"
        return self.runner.plans_made - self.at_start


class Recorder(ops.BasicOperation):
    """The identity, written in Python; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = self.backwards = 0
        self.was_asked_for_gradients: bool | None = None

    def op_forward(self, ctx, input_, **_):
        object.__setattr__(self, "forwards", self.forwards + 1)
        object.__setattr__(self, "was_asked_for_gradients", ctx.requires_grad)
        return input_.clone()

    def op_backward(self, ctx, grad_output):
        object.__setattr__(self, "backwards", self.backwards + 1)
        return grad_output, ()


# ---- unchanged calls ----


@pytest.mark.parametrize("make", [mlp, lambda: ops.Linear(WIDTH, WIDTH), ops.GELU, lambda: ops.RMSNorm(WIDTH)])
def test_unchanged_training_steps_make_no_plan(make):
    module = make()
    module(rows(requires_grad=True)).sum().backward()
    made = PlansMade(module)
    assert made.at_start == 1
    for _ in range(100):
        module(rows(requires_grad=True)).sum().backward()
        for param in module.parameters():
            param.data.mul_(0.99)
    assert made() == 0


def test_1000_token_counts_share_one_plan():
    module = mlp()
    x = torch.randn(1000, WIDTH)
    module(x[:1])
    made = PlansMade(module)
    for count in range(1, 1001):
        module(x[:count])
    assert made() == 0
    torch.testing.assert_close(module(x[:777]), plain_mlp(module, x[:777]))


def test_attributes_of_other_modules_make_no_plan():
    module, other = mlp(), ops.ConstantScale(1.0)
    module(rows())
    made = PlansMade(module)
    for step in range(10):
        other.scale = float(step)
        other.note = step
        module(rows())
    assert made() == 0


def test_sequential_keeps_each_pipeline():
    module = ops.Sequential(ops.Linear(WIDTH, WIDTH), torch.nn.Tanh(), ops.Linear(WIDTH, WIDTH))
    module(rows())
    before = [segment.runner for segment in module._program.segments]
    for _ in range(20):
        module(rows())
    assert [segment.runner for segment in module._program.segments] == before
    assert [runner.plans_made for runner in before if runner is not None] == [1, 1]


def test_global_hook_does_not_replan_single_ops():
    op, seen = ops.GELU(), []
    op(rows())
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        op(rows())
        made = PlansMade(op)
        op(rows())
        assert made() == 0
    finally:
        handle.remove()
    assert seen == [op, op]


def test_training_and_inference_plans_are_both_kept():
    module = mlp()
    module(rows())
    with torch.no_grad():
        module(rows())
    made = PlansMade(module)
    for _ in range(5):
        assert module(rows()).requires_grad
        with torch.no_grad():
            assert not module(rows()).requires_grad
    assert made() == 0
    assert module._runner.plans_kept == 2


def test_number_of_kept_plans_is_bounded():
    module = ops.Sequential(*[ops.RMSNorm(WIDTH) for _ in range(5)])
    for frozen in itertools.product([False, True], repeat=5):
        for op, flag in zip(module, frozen, strict=True):
            op.weight.requires_grad_(not flag)
        module(rows())
    assert module._runner.plans_made == 32
    assert 2 <= module._runner.plans_kept <= 16


# ---- changes take effect at the next call ----


@pytest.mark.parametrize(
    "replace",
    [
        lambda op, new: setattr(op, "weight", new),
        lambda op, new: op.register_parameter("weight", new),
        lambda op, new: op._parameters.__setitem__("weight", new),
        lambda op, new: setattr(op.basic_ops[0], "weight", new),
        lambda op, new: op.load_state_dict({"weight": new, "bias": op.bias}, assign=True),
    ],
    ids=["attribute", "register_parameter", "_parameters", "attribute of the part", "load_state_dict(assign)"],
)
def test_replaced_parameter_is_used_and_trained(replace):
    module = mlp()
    module(rows()).sum().backward()
    old = module[0].weight
    old_grad = old.grad.clone()
    new = torch.nn.Parameter(torch.randn_like(old))
    replace(module[0], new)
    used = module[0].weight
    x = rows()
    y = module(x)
    torch.testing.assert_close(y, plain_mlp(module, x))
    torch.testing.assert_close(used, new)
    y.sum().backward()
    (expected,) = torch.autograd.grad(plain_mlp(module, x).sum(), used)
    torch.testing.assert_close(used.grad, expected)
    torch.testing.assert_close(old.grad, old_grad)


def test_data_written_into_parameter_is_used():
    module, x = mlp(), rows()
    module(x)
    made = PlansMade(module)
    module[0].weight.data.copy_(torch.randn(16, WIDTH))
    torch.testing.assert_close(module(x), plain_mlp(module, x))
    module[2].weight.data = torch.randn(WIDTH, 16)
    torch.testing.assert_close(module(x), plain_mlp(module, x))
    assert made() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_casting_module_changes_next_call(dtype):
    module, x = mlp(), rows()
    assert module(x).dtype == torch.float32
    module.to(dtype)
    y = module(x)
    assert y.dtype == dtype
    y.sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {dtype}


def test_frozen_weight_gets_no_grad():
    module = ops.Sequential(ops.Linear(WIDTH, WIDTH))
    saved = []

    def saves() -> int:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            module(rows()).sum().backward()
        return len(saved)

    assert saves() > 0 and module[0].weight.grad is not None
    module.zero_grad()
    module[0].weight.requires_grad_(False)
    assert saves() == 0
    assert module[0].weight.grad is None and module[0].bias.grad is not None
    module[0].weight.requires_grad_(True)
    assert saves() > 0 and module[0].weight.grad is not None


def test_no_gradient_below_last_tensor_that_requires_grad():
    below, between = Recorder(), Recorder()
    module = ops.Sequential(below, ops.Linear(WIDTH, WIDTH), between, ops.Linear(WIDTH, WIDTH))
    x = rows()

    def backwards(x: torch.Tensor) -> tuple[int, int]:
        before = below.backwards, between.backwards
        module(x).sum().backward()
        return below.backwards - before[0], between.backwards - before[1]

    assert backwards(x) == (0, 1)
    module[1].requires_grad_(False)
    assert backwards(x) == (0, 0)
    assert between.was_asked_for_gradients is False
    assert backwards(x.requires_grad_()) == (1, 1)
    assert x.grad is not None


def test_gradient_of_one_parameter_skips_ops_below():
    below = Recorder()
    module = ops.Sequential(ops.Linear(WIDTH, WIDTH), below, ops.Linear(WIDTH, WIDTH))
    y = module(rows(requires_grad=True))
    torch.autograd.grad(y.sum(), [module[2].weight], retain_graph=True)
    assert below.backwards == 0
    torch.autograd.grad(y.sum(), [module[0].weight])
    assert below.backwards == 1


def test_autocast_applies_inside_its_block_only():
    module, x = mlp(bias=False), rows()
    assert module(x).dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert module(x).dtype == dtype
            with torch.autocast("cpu", enabled=False):
                assert module(x).dtype == torch.float32
    assert module(x).dtype == torch.float32
    assert module._runner.plans_made == 3


HOOKS = {
    "forward": (lambda op, seen: op.register_forward_hook(lambda *_: seen.append(1)), False),
    "forward_pre": (lambda op, seen: op.register_forward_pre_hook(lambda *_: seen.append(1)), False),
    "full_backward": (lambda op, seen: op.register_full_backward_hook(lambda *_: seen.append(1)), True),
    "full_backward_pre": (lambda op, seen: op.register_full_backward_pre_hook(lambda *_: seen.append(1)), True),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_new_hook_fires_and_removal_restores_fusion(kind, index):
    register, needs_backward = HOOKS[kind]
    module, x, seen = mlp(), rows(requires_grad=True), []
    module(x)
    assert module._runner is not None
    handle = register(module[index], seen)
    y = module(x)
    torch.testing.assert_close(y, plain_mlp(module, x))
    if needs_backward:
        y.sum().backward()
    assert seen == [1]
    handle.remove()
    y = module(x)
    y.sum().backward()
    assert seen == [1]
    assert module._runner is not None and type(y.grad_fn.next_functions[0][0]).__name__ == "AccumulateGrad"


@pytest.mark.parametrize("which", ["register_module_forward_hook", "register_module_forward_pre_hook"])
def test_global_hook_sees_every_contained_op(which):
    module, seen = mlp(), []
    module(rows())
    handle = getattr(torch.nn.modules.module, which)(lambda m, *_: seen.append(m))
    try:
        module(rows())
    finally:
        handle.remove()
    assert {id(m) for m in seen} == {id(m) for m in [module, *module]}
    seen.clear()
    module(rows())
    assert not seen


def test_forward_hook_may_replace_output_of_contained_op():
    module, x = mlp(), rows()
    module(x)
    with_zeros = module[1].register_forward_hook(lambda op, args, output: torch.zeros_like(output))
    torch.testing.assert_close(module(x), module[2].bias.expand(4, -1))
    with_zeros.remove()
    torch.testing.assert_close(module(x), plain_mlp(module, x))


class TwiceTheScale(ops.FusedOperation):
    """Replaces one ConstantScale and applies its scale twice, to show that it ran."""

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        return input_ * self.basic_ops[0].scale ** 2, [()]


def square_scales(functions_seen):
    def function(ops_, *, recipe):
        functions_seen.append(len(ops_))
        return [TwiceTheScale([op]) if isinstance(op, ops.ConstantScale) else op for op in ops_]

    return function


def test_registering_or_removing_rule_takes_effect_at_next_call():
    module, x, seen = ops.Sequential(ops.ConstantScale(3.0), ops.Identity()), rows(), []
    torch.testing.assert_close(module(x), 3 * x)
    handle = ops.register_forward_fusion(square_scales(seen))
    try:
        torch.testing.assert_close(module(x), 9 * x)
        module(x)
        assert seen == [2], "an unchanged call must not run the rules again"
    finally:
        handle.remove()
    torch.testing.assert_close(module(x), 3 * x)


def test_plans_of_old_rules_are_dropped():
    module, x = mlp(), rows()
    for _ in range(5):
        with ops.register_forward_fusion(lambda ops_, *, recipe: ops_):
            module(x)
            assert module._runner.plans_kept == 1


@pytest.mark.parametrize("in_sequential", [True, False], ids=["in a Sequential", "alone"])
def test_every_new_scale_is_used(in_sequential):
    op = ops.ConstantScale(1.0)
    module, x = (ops.Sequential(op) if in_sequential else op), rows()
    module(x)
    for step in range(2, 30):
        # Several changes between calls: the last one counts, even if a new description reuses the memory of an old one.
        for scale in range(step % 4 + 1):
            op.scale = float(step + 10 * scale)
        torch.testing.assert_close(module(x), op.scale * x)


def test_train_and_eval_switch_dropout():
    module, x = ops.Sequential(ops.Identity(), ops.Dropout(0.5)), torch.ones(64, 64)
    kept = module(x)
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    module.eval()
    torch.testing.assert_close(module(x), x)
    module[1].train()
    assert set(module(x).unique().tolist()) == {0.0, 2.0}
    assert module._runner.plans_made == 2


def test_dropout_probability_can_change():
    module, x = ops.Sequential(ops.Dropout(0.5)), torch.ones(8, 8)
    module(x)
    module[0].p = 0.0
    torch.testing.assert_close(module(x), x)


def replace_by_key(seq, op):
    seq._modules["0"] = op


STRUCTURE = {
    "append": (lambda seq, op: seq.append(op), 6.0),
    "insert": (lambda seq, op: seq.insert(0, op), 6.0),
    "extend": (lambda seq, op: seq.extend([op, ops.Identity()]), 6.0),
    "+=": (lambda seq, op: seq.__iadd__([op]), 6.0),
    "setitem": (lambda seq, op: seq.__setitem__(0, op), 3.0),
    "setattr": (lambda seq, op: setattr(seq, "0", op), 3.0),
    "add_module": (lambda seq, op: seq.add_module("0", op), 3.0),
    "_modules": (replace_by_key, 3.0),
    "new attribute": (lambda seq, op: setattr(seq, "tail", op), 6.0),
    "del": (lambda seq, op: seq.__delitem__(0), 1.0),
    "delattr": (lambda seq, op: delattr(seq, "0"), 1.0),
    "pop": (lambda seq, op: seq.pop(0), 1.0),
    "plain module": (lambda seq, op: seq.append(torch.nn.Flatten(0)), 2.0),
}


@pytest.mark.parametrize("edit", STRUCTURE)
def test_container_edit_takes_effect_at_next_call(edit):
    change, factor = STRUCTURE[edit]
    seq, x = ops.Sequential(ops.ConstantScale(2.0), ops.Identity()), rows()
    torch.testing.assert_close(seq(x), 2 * x)
    change(seq, ops.ConstantScale(3.0))
    expected = factor * (x.flatten() if edit == "plain module" else x)
    torch.testing.assert_close(seq(x), expected)
    torch.testing.assert_close(seq(x), expected)


def test_swapping_two_ops_takes_effect():
    seq, x = ops.Sequential(ops.ConstantScale(-1.0), ops.ReLU()), rows()
    torch.testing.assert_close(seq(x), (-x).relu())
    seq[0], seq[1] = seq[1], seq[0]
    torch.testing.assert_close(seq(x), -(x.relu()))


def test_overridden_forward_of_op_is_called():
    seq, x = ops.Sequential(ops.Identity(), ops.ConstantScale(2.0)), rows()
    seq(x)
    seq[1].forward = lambda input_: input_ + 1
    torch.testing.assert_close(seq(x), x + 1)
    del seq[1].forward
    torch.testing.assert_close(seq(x), 2 * x)


# ---- threads ----


def in_threads(work, count: int = 2) -> list:
    """Runs `work(index)` in threads that start together; returns the results in order."""
    barrier = threading.Barrier(count)

    def start(index: int):
        barrier.wait()
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start, range(count)))


def test_concurrent_first_calls_work():
    for _ in range(20):
        module, x = mlp(), rows()
        expected = plain_mlp(module, x)
        for y in in_threads(lambda _, module=module, x=x: module(x), 4):
            torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("python_op", [False, True], ids=["native", "with an operation in Python"])
def test_threads_train_and_infer_with_one_module_at_once(python_op):
    module = mlp()
    if python_op:
        module.append(Recorder())
    x = [rows(3 + index) for index in range(4)]
    expected = [plain_mlp(module[:3], each).detach() for each in x]

    def work(index: int) -> None:
        for _ in range(100):
            with torch.set_grad_enabled(index % 2 == 0):
                y = module(x[index])
                torch.testing.assert_close(y, expected[index])
                if index % 2 == 0:
                    torch.autograd.grad(y.sum(), list(module.parameters()))

    in_threads(work, 4)
    assert module._runner.plans_kept <= 2


def test_threads_may_call_while_rules_change():
    module, x = mlp(), rows()
    expected = plain_mlp(module, x)
    done = threading.Event()

    def work(index: int) -> None:
        if index == 0:
            for _ in range(100):
                with ops.register_forward_fusion(lambda ops_, *, recipe: ops_):
                    module(x)
            done.set()
        while not done.is_set():
            torch.testing.assert_close(module(x), expected)

    in_threads(work, 3)


def test_backward_may_run_in_another_thread():
    module, x = mlp(), rows(requires_grad=True)
    y = module(x)
    (grad,) = in_threads(lambda _: torch.autograd.grad(y.sum(), x)[0], 1)
    torch.testing.assert_close(grad, torch.autograd.grad(plain_mlp(module, x).sum(), x)[0])


def test_threads_may_share_retained_graph():
    module, x = mlp().append(Recorder()), rows(16, requires_grad=True)
    y = module(x).sum()
    expected = torch.autograd.grad(y, x, retain_graph=True)

    def work(_: int) -> None:
        for _ in range(25):
            torch.testing.assert_close(torch.autograd.grad(y, x, retain_graph=True), expected, rtol=0, atol=0)

    in_threads(work, 4)
