"""Operations and fusions written in Python."""

import traceback

import pytest
import torch
from plain import apply

from torchweft import ops

WIDTH = 4


def rows(count: int = 3, **options) -> torch.Tensor:
    return torch.randn(count, WIDTH, **options)


def plan_lengths(seq: ops.Sequential, *inputs: torch.Tensor) -> tuple[int, int]:
    plan = seq._runner.plan(*inputs)
    return len(plan.forward_rules), len(plan.backward_rules)


# ---- operations ----


class Square(ops.BasicOperation):
    """x², with a tensor and an attribute saved for backward."""

    def op_forward(self, ctx, input_, prev_op_grad_output_quantizer=None, next_op_input_quantizer=None):
        if ctx.requires_grad:
            ctx.save_for_backward(input_)
            ctx.factor = 2
        return input_.square()

    def op_backward(self, ctx, grad_output):
        return ctx.factor * ctx.saved_tensors[0] * grad_output, ()


class Gain(ops.BasicOperation):
    """x·gain + shift, with two parameters, one of them in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.randn(WIDTH))
        self.inner = torch.nn.Module()
        self.inner.shift = torch.nn.Parameter(torch.randn(WIDTH))

    def op_forward(self, ctx, input_, **_):
        ctx.save_for_backward(input_, self.gain)
        return input_ * self.gain + self.inner.shift

    def op_backward(self, ctx, grad_output):
        x, gain = ctx.saved_tensors
        return grad_output * gain, ((grad_output * x).sum(0), grad_output.sum(0))

    def plain(self, x):
        return x * self.gain + self.inner.shift


class MultiplyAndTap(ops.BasicOperation):
    """x·e with extra input e; also returns x as an extra output."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, basic_op_kwargs, **_):
        (extra,) = basic_op_extra_inputs[0]
        basic_op_ctxs[0].save_for_backward(input_, extra)
        return input_ * extra, [(input_ + basic_op_kwargs[0].get("shift", 0.0),)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        x, extra = basic_op_ctxs[0].saved_tensors
        (tap,) = basic_op_grad_extra_outputs[0]
        dx = grad_output * extra if tap is None else grad_output * extra + tap
        return dx, [()], [(grad_output * x,)]


def check_against(result: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(
        torch.autograd.grad(result.square().mean(), inputs),
        torch.autograd.grad(expected.square().mean(), inputs, retain_graph=True),
    )


def test_python_op_runs_alone():
    x = rows(requires_grad=True)
    check_against(Square()(x), x.square(), [x])


def test_python_op_runs_between_native_ops():
    seq, x = ops.Sequential(ops.Linear(WIDTH, WIDTH), Square(), Gain(), ops.GELU()), rows(requires_grad=True)
    inner = seq[2].plain(apply(seq[0], x)[0].square())
    check_against(seq(x), apply(seq[3], inner)[0], [x, *seq.parameters()])
    assert seq(x).grad_fn.next_functions[0][0].name() == "torch::autograd::AccumulateGrad", "one node in all"


def test_python_op_has_ordinary_parameters():
    op = Gain()
    assert [name for name, _ in op.named_parameters()] == ["gain", "inner.shift"]
    other = Gain()
    other.load_state_dict(op.state_dict())
    x = rows()
    torch.testing.assert_close(other(x), op(x))
    op.gain.requires_grad_(False)
    op(x).sum().backward()
    assert op.gain.grad is None and op.inner.shift.grad is not None
    op.gain = torch.nn.Parameter(torch.zeros(WIDTH))
    torch.testing.assert_close(op(x), op.inner.shift.expand_as(x))


def test_python_op_sees_requires_grad():
    seen = []

    class Watch(Square):
        def op_forward(self, ctx, input_, **kwargs):
            seen.append(ctx.requires_grad)
            return super().op_forward(ctx, input_, **kwargs)

    op = Watch()
    op(rows(requires_grad=True))
    op(rows())
    with torch.no_grad():
        op(rows(requires_grad=True))
    assert seen == [True, False, False]


def test_python_op_extra_tensors():
    seq = ops.Sequential(ops.ConstantScale(2.0), MultiplyAndTap(), ops.ConstantScale(3.0))
    x, e = rows(requires_grad=True), rows(requires_grad=True)
    y, tap = seq(x, e)
    check_against(y, 6 * x * e, [x, e])
    y, tap = seq(x, e)
    torch.testing.assert_close(tap, 2 * x)
    got = torch.autograd.grad(y.sum() + tap.square().sum(), [x, e])
    expected = torch.autograd.grad((6 * x * e).sum() + (2 * x).square().sum(), [x, e])
    torch.testing.assert_close(got, expected)


def test_python_op_extra_tensors_by_channel():
    op = MultiplyAndTap().set_extra_input_channel(0, "in").set_extra_output_channel(0, "out", output_to_caller=False)
    start = ops.MakeExtraOutput().set_extra_output_channel(0, "in", output_to_caller=False)
    seq = ops.Sequential(start, ops.ConstantScale(2.0), op, ops.AddExtraInput().set_extra_input_channel(0, "out"))
    x = rows(requires_grad=True)
    check_against(seq(x), 2 * x * x + 2 * x, [x])


def test_keywords_reach_op_with_extra_tensors():
    op, x = MultiplyAndTap(), rows()
    _, tap = op(x, x, shift=5.0)
    torch.testing.assert_close(tap, x + 5)


def test_unexpected_keyword_is_python_type_error():
    with pytest.raises(TypeError, match="speed"):
        Square()(rows(), speed=3)


def test_python_op_may_call_torch_and_weft():
    class Inner(ops.BasicOperation):
        """Uses torch autograd in backward and calls a weft pipeline in forward."""

        def __init__(self):
            super().__init__()
            self.tail = ops.Sequential(ops.ConstantScale(3.0), Square())

        def op_forward(self, ctx, input_, **_):
            ctx.save_for_backward(input_)
            assert not torch.is_grad_enabled()
            return self.tail(input_)

        def op_backward(self, ctx, grad_output):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                return torch.autograd.grad((3 * x).square(), x, grad_output)[0], ()

    seq, x = ops.Sequential(ops.ConstantScale(2.0), Inner(), ops.ConstantScale(5.0)), rows(requires_grad=True)
    check_against(seq(x), 5 * (6 * x).square(), [x])


def test_retained_graph_reruns_python_ops():
    seq, x = ops.Sequential(Square(), Gain(), MultiplyAndTap()), rows(requires_grad=True)
    y, _ = seq(x, x.detach())
    inputs = [x, *seq.parameters()]
    first = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), inputs, retain_graph=True), first, rtol=0, atol=0)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), inputs), first, rtol=0, atol=0)


def test_calls_have_separate_contexts():
    op = Square()
    x, z = rows(requires_grad=True), rows(requires_grad=True)
    first, second = op(x), op(z)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], 2 * x)
    torch.testing.assert_close(torch.autograd.grad(second.sum(), z)[0], 2 * z)


def test_training_mode_reaches_python_op():
    class Mode(ops.BasicOperation):
        def op_forward(self, ctx, input_, **_):
            return input_ * (1.0 if self.training else 0.0)

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    seq, x = ops.Sequential(ops.Identity(), Mode()), rows()
    torch.testing.assert_close(seq(x), x)
    torch.testing.assert_close(seq.eval()(x), 0 * x)


def test_python_op_sees_autocast():
    class Product(ops.BasicOperation):
        def op_forward(self, ctx, input_, **_):
            return input_ @ torch.eye(WIDTH)

        def op_backward(self, ctx, grad_output):
            return grad_output, ()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        dtype = (rows() @ torch.eye(WIDTH)).dtype
        assert Product()(rows()).dtype in (dtype, torch.float32)
        assert ops.Sequential(ops.Identity(), Product())(rows()).dtype == Product()(rows()).dtype


# ---- errors of operations ----


class Oops(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Fails(ops.BasicOperation):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def op_forward(self, ctx, input_, **_):
        if self.where == "forward":
            self.deep_inside()
        return input_.clone()

    def op_backward(self, ctx, grad_output):
        if self.where == "backward":
            self.deep_inside()
        return grad_output, ()

    def deep_inside(self):
        raise Oops(42, "from user code")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "around",
    [lambda op: op, lambda op: ops.Sequential(ops.Linear(WIDTH, WIDTH), op, ops.GELU())],
    ids=["alone", "in the middle"],
)
def test_exception_keeps_type_value_and_traceback(where, around):
    module = around(Fails(where))
    with pytest.raises(Oops, match="from user code") as caught:
        module(rows(requires_grad=True)).sum().backward()
    assert caught.value.code == 42
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert f"op_{where}" in names and names[-1] == "deep_inside"


def test_module_works_after_exception():
    op = Fails("backward")
    seq, x = ops.Sequential(ops.Linear(WIDTH, WIDTH), op, ops.GELU()), rows(requires_grad=True)
    for where in ("forward", "backward"):
        op.where = where
        with pytest.raises(Oops):
            seq(x).sum().backward()
    op.where = "nowhere"
    seq(x).sum().backward()
    assert x.grad is not None


def test_keyboard_interrupt_propagates():
    class Interrupted(Square):
        def op_backward(self, ctx, grad_output):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Interrupted()(rows(requires_grad=True)).sum().backward()


class NoForward(ops.BasicOperation):
    pass


class NoBackward(ops.BasicOperation):
    def op_forward(self, ctx, input_, **_):
        return input_.clone()


class ForgotExtras(Square):
    num_extra_inputs = 1


def returns(forward=None, backward=None):
    """An operation whose forward and backward return the given values."""

    class Returns(ops.BasicOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            return forward(input_) if forward else (input_.clone(), [()])

        def fuser_backward(self, basic_op_ctxs, grad_output, **_):
            return backward(grad_output) if backward else (grad_output, [()], [()])

    return Returns()


WRONG = {
    "no forward": (NoForward, NotImplementedError, "NoForward"),
    "no backward": (NoBackward, NotImplementedError, "NoBackward"),
    "extra tensors without fuser_forward": (ForgotExtras, RuntimeError, "ForgotExtras.*1 extra input"),
    "output is not a tensor": (lambda: returns(lambda x: ("y", [()])), TypeError, "str"),
    "output is None": (
        lambda: returns(lambda x: (None, [()])),
        (TypeError, RuntimeError, ValueError),
        "Returns|tensor",
    ),
    "too many extra outputs": (
        lambda: returns(lambda x: (x, [(x,)])),
        RuntimeError,
        "Returns.*1 extra output.*expected 0",
    ),
    "extra outputs of another operation": (
        lambda: returns(lambda x: (x, [(), ()])),
        RuntimeError,
        "Returns.*2 operations, expected 1",
    ),
    "too many parameter gradients": (
        lambda: returns(backward=lambda dy: (dy, [(dy,)], [()])),
        RuntimeError,
        "Returns.*1 parameter gradient.*expected 0",
    ),
    "gradient is not a tensor": (lambda: returns(backward=lambda dy: (3.0, [()], [()])), TypeError, "float"),
    "not a pair": (lambda: returns(lambda x: x[0, 0]), Exception, "."),
}


@pytest.mark.parametrize("kind", WRONG)
def test_faulty_python_op_gives_clear_error(kind):
    make, error, message = WRONG[kind]
    op = make()
    inputs = [rows(requires_grad=True)] + [rows()] * op.num_extra_inputs
    with pytest.raises(error, match=message):
        ops.Sequential(ops.Identity(), op)(*inputs).sum().backward()


NATIVE = {
    "GELU": lambda: ops.GELU(),
    "SwiGLU": lambda: ops.SwiGLU(),
    "RMSNorm": lambda: ops.RMSNorm(512),
    "LayerNorm": lambda: ops.LayerNorm(512),
    "Linear": lambda: ops.Linear(512, 64),
    "L2Normalization": lambda: ops.L2Normalization(),
}


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("shape", [(1,), (1, 1), (64, 1), (1, 64), (65, 64), (64, 64, 1)])
def test_gradient_of_wrong_shape_reaches_no_native_op(native, shape):
    """The kernels of the operation before it would read past its end."""
    op = returns(backward=lambda dy: (torch.ones(shape), [()], [()]))
    x = torch.randn(64, 512, requires_grad=True)
    y = ops.Sequential(NATIVE[native](), op)(x)
    with pytest.raises(
        RuntimeError, match=r"Returns: backward returned a gradient of shape .* for the input, expected"
    ):
        y.sum().backward()


def test_gradient_of_wrong_shape_for_an_extra_input_is_rejected():
    class Tap(ops.BasicOperation):
        num_extra_inputs = 1

        def fuser_forward(self, basic_op_ctxs, input_, **_):
            return input_.clone(), [()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **_):
            return grad_output, [()], [(torch.ones(1),)]

    fork = ops.MakeExtraOutput().set_extra_output_channel(0, "c", output_to_caller=False)
    model = ops.Sequential(ops.GELU(), fork, Tap().set_extra_input_channel(0, "c"))
    y = model(torch.randn(64, 512, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"Tap: backward returned .* \[1\] for extra input 0, expected \[64, 512\]"):
        y.sum().backward()


def test_gradient_of_wrong_shape_is_rejected():
    op = returns(backward=lambda dy: (dy[:, :1].expand(-1, 7), [()], [()]))
    with pytest.raises(RuntimeError, match="shape"):
        op(rows(requires_grad=True)).sum().backward()


@pytest.mark.parametrize("method", ["op_forward", "fuser_forward", "op_backward", "fuser_backward"])
def test_native_op_passes_cannot_be_overridden(method):
    """Users of Transformer Engine change operations by overriding them; weft must not ignore such an override."""
    with pytest.raises(TypeError, match=f"Changed.*{method}"):
        type("Changed", (ops.GELU,), {method: lambda self, *args, **kwargs: None})


# ---- fusions ----


class Joined(ops.FusedOperation):
    """Fuses two ConstantScales. Counts its calls; saves nothing, as ConstantScale does."""

    forwards = backwards = 0

    def factor(self):
        return self.basic_ops[0].scale * self.basic_ops[1].scale

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, basic_op_kwargs, **_):
        type(self).forwards += 1
        assert len(basic_op_ctxs) == len(basic_op_extra_inputs) == len(basic_op_kwargs) == 2
        return input_ * self.factor(), [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        type(self).backwards += 1
        assert len(basic_op_ctxs) == len(basic_op_grad_extra_outputs) == 2
        return grad_output * self.factor(), [(), ()], [(), ()]


def join_scales(made, fused_type=Joined):
    def function(ops_, *, recipe):
        assert recipe is None
        out = []
        for op in ops_:
            if out and isinstance(op, ops.ConstantScale) and isinstance(out[-1], ops.ConstantScale):
                out.append(fused_type([out.pop(), op]))
                made.append(out[-1])
            else:
                out.append(op)
        return out

    return function


REGISTER = {
    "forward": (ops.register_forward_fusion, (1, 0), (2, 3)),
    "backward": (ops.register_backward_fusion, (0, 1), (3, 2)),
    "joint": (ops.register_forward_backward_fusion, (1, 1), (2, 2)),
}


@pytest.mark.parametrize("kind", REGISTER)
def test_fusion_replaces_its_ops_in_its_pass(kind):
    register, runs, lengths = REGISTER[kind]
    made = []
    fused_type = type("Joined", (Joined,), {})
    seq, x = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0), ops.GELU()), rows(requires_grad=True)
    expected, _ = apply(ops.GELU(), 6 * x)
    with register(join_scales(made, fused_type)):
        check_against(seq(x), expected, [x])
        assert (fused_type.forwards, fused_type.backwards) == runs
        assert plan_lengths(seq, x) == lengths
        assert len(made) == 1, "one object, even if it serves both passes"
    check_against(seq(x), expected, [x])
    assert (fused_type.forwards, fused_type.backwards) == runs
    assert plan_lengths(seq, x) == (3, 3)


def test_handle_removes_only_its_function():
    first, second = [], []
    one = ops.register_forward_fusion(join_scales(first))
    two = ops.register_forward_fusion(lambda ops_, *, recipe: second.append(1) or ops_)
    try:
        seq, x = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0)), rows()
        seq(x)
        one.remove()
        one.remove()
        seq(x)
        assert (len(first), len(second)) == (1, 2)
    finally:
        one.remove()
        two.remove()


def test_fusions_run_in_registration_order_prepended_first():
    order = []

    def named(name):
        return lambda ops_, *, recipe: order.append(name) or ops_

    with (
        ops.register_forward_fusion(named("second")),
        ops.register_forward_fusion(named("third")),
        ops.register_forward_fusion(named("first"), prepend=True),
    ):
        ops.Sequential(ops.GELU())(rows())
    assert order == ["first", "second", "third"]


def test_registered_fusions_run_before_those_of_the_library():
    """A function in any pass sees the operations that a joint rule of the library would take."""
    block = ops.Sequential(ops.RMSNorm(8), ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8))
    seen, x = [], torch.randn(4, 8)
    assert [step["name"] for step in block.explain(x).data[0]["forward"]] == ["mlp_block"]

    class OwnGelu(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            basic_op_ctxs[0].save_for_backward(input_)
            return torch.nn.functional.gelu(input_, approximate="tanh"), [()]

    def fuse(ops_, *, recipe):
        seen.append([type(op).__name__ for op in ops_])
        return [OwnGelu([op]) if isinstance(op, ops.GELU) else op for op in ops_]

    expected = block(x)
    with ops.register_forward_fusion(fuse):
        torch.testing.assert_close(block(x), expected)
        plan = block.explain(x).data[0]
        assert seen[0] == ["RMSNorm", "BasicLinear", "Bias", "GELU", "BasicLinear", "Bias"]
        assert [step["name"] for step in plan["forward"]] == ["RMSNorm", "linear_bias", "OwnGelu", "linear_bias"]
        assert {"rule": "mlp_block", "reason": "a registered rule fuses one of the matched operations in one pass"} in [
            {key: rejection[key] for key in ("rule", "reason")} for rejection in plan["rejected"]
        ]
        assert plan["backward"] != plan["forward"]  # rules of the library still fuse backward
    assert torch.equal(block(x), expected)


def test_fused_op_is_hidden_from_later_fusions():
    taken, left = [], []

    def watch(ops_, *, recipe):
        left.extend(type(op).__name__ for op in ops_ if isinstance(op, ops.BasicOperation))
        return ops_

    with ops.register_forward_fusion(join_scales(taken)), ops.register_forward_fusion(watch):
        x = rows()
        seq = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0), ops.GELU())
        torch.testing.assert_close(seq(x), apply(ops.GELU(), 6 * x)[0])
    assert len(taken) == 1 and left == ["GELU"]


def test_forward_fusion_fills_contexts_of_python_ops():
    """Forward is fused, backward is not: the fused forward saves what each operation's backward reads."""

    class SquareThenGain(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            middle = input_.square()
            gain = self.basic_ops[1]
            basic_op_ctxs[0].save_for_backward(input_)
            basic_op_ctxs[0].factor = 2
            basic_op_ctxs[1].save_for_backward(middle, gain.gain)
            return gain.plain(middle), [(), ()]

    def function(ops_, *, recipe):
        return [SquareThenGain(ops_)] if [type(op) for op in ops_] == [Square, Gain] else ops_

    seq, x = ops.Sequential(Square(), Gain()), rows(requires_grad=True)
    with ops.register_forward_fusion(function):
        y = seq(x)
        assert plan_lengths(seq, x) == (1, 2)
        check_against(y, seq[1].plain(x.square()), [x, *seq.parameters()])


def test_joint_fusion_over_native_ops_keeps_own_state():
    class LinearSquare(ops.FusedOperation):
        """(x Wᵀ)²; saves x Wᵀ instead of what the basic operations save."""

        def fuser_forward(self, basic_op_ctxs, input_, **_):
            weight = self.basic_ops[0].weight
            product = input_ @ weight.t()
            basic_op_ctxs[0].save_for_backward(input_, weight, product)
            basic_op_ctxs[0].note = "mine"
            return product.square(), [(), ()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **_):
            x, weight, product = basic_op_ctxs[0].saved_tensors
            assert basic_op_ctxs[0].note == "mine"
            inner = 2 * product * grad_output
            return inner @ weight, [(inner.t() @ x,), ()], [(), ()]

    def function(ops_, *, recipe):
        match = len(ops_) == 2 and isinstance(ops_[0], ops.BasicLinear) and isinstance(ops_[1], Square)
        return [LinearSquare(ops_)] if match else ops_

    seq, x = ops.Sequential(ops.BasicLinear(WIDTH, WIDTH), Square()), rows(requires_grad=True)
    with ops.register_forward_backward_fusion(function):
        y = seq(x)
        check_against(y, (x @ seq[0].weight.t()).square(), [x, seq[0].weight])
        y = seq(x)
        first = torch.autograd.grad(y.sum(), x, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x), first)


def test_keywords_reach_fused_ops():
    seen = []

    class TwoTaps(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_kwargs, **_):
            seen.append([dict(given) for given in basic_op_kwargs])
            return input_, [(), ()]

    a, b = Square(), Square()
    seq = ops.Sequential(a, b)
    with ops.register_forward_fusion(lambda ops_, *, recipe: [TwoTaps(ops_)] if len(ops_) == 2 else ops_):
        seq(rows(), op_kwargs={b: {"depth": 2}})
    assert seen == [[{}, {"depth": 2}]]


# ---- fusions and channels ----


class TapBiasAdd(ops.FusedOperation):
    """Fuses MakeExtraOutput, Bias and AddExtraInput, and connects the channel between the first and last itself."""

    returns_tap = True

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        assert basic_op_extra_inputs == [(), (), (None,)], "an internal channel is not passed in"
        tap = input_ if self.returns_tap else None
        return 2 * input_ + self.basic_ops[1].bias, [(tap,), (), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (tap,), _, _ = basic_op_grad_extra_outputs
        dx = 2 * grad_output if tap is None else 2 * grad_output + tap
        return dx, [(), (grad_output.sum(0),), ()], [(), (), (grad_output,)]


class TapBiasAddSilent(TapBiasAdd):
    returns_tap = False


def residual_bias(to_caller: bool, extra_reader: bool = False) -> ops.Sequential:
    seq = ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=to_caller),
        ops.Bias(WIDTH),
        ops.AddExtraInput().set_extra_input_channel(0, "r"),
    )
    torch.nn.init.normal_(seq[1].bias)
    if extra_reader:
        seq.append(ops.AddExtraInput().set_extra_input_channel(0, "r"))
    return seq


def fuse_first_three(fused_type):
    def function(ops_, *, recipe):
        if not isinstance(ops_[0], ops.MakeExtraOutput):
            return ops_
        return [fused_type(ops_[:3]), *ops_[3:]]

    return function


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("to_caller", [True, False], ids=["public", "hidden"])
@pytest.mark.parametrize("residual_grad", [True, False])
def test_fusion_connects_channels_between_its_ops(kind, to_caller, residual_grad):
    register, runs, _ = REGISTER[kind]
    fused_type = TapBiasAdd if to_caller else TapBiasAddSilent
    seq, x, dy, dres = residual_bias(to_caller), rows(requires_grad=True), rows(), rows()
    residual_grad = residual_grad and to_caller
    with register(fuse_first_three(fused_type)):
        out = seq(x)
        y = out[0] if to_caller else out
        torch.testing.assert_close(y, 2 * x + seq[1].bias)
        torch.autograd.backward([y, out[1]] if residual_grad else [y], [dy, dres] if residual_grad else [dy])
        assert plan_lengths(seq, x) == tuple(1 if ran else 3 for ran in runs)
    torch.testing.assert_close(x.grad, 2 * dy + (dres if residual_grad else 0))
    torch.testing.assert_close(seq[1].bias.grad, dy.sum(0))


@pytest.mark.parametrize("kind", REGISTER)
def test_channel_read_inside_and_outside_fusion(kind):
    seq, x = residual_bias(False, extra_reader=True), rows(requires_grad=True)
    with REGISTER[kind][0](fuse_first_three(TapBiasAdd)):
        check_against(seq(x), 3 * x + seq[1].bias, [x, seq[1].bias])


@pytest.mark.parametrize("kind", ["forward", "joint"])
@pytest.mark.parametrize("to_caller, message", [(True, "returned to the caller"), (False, "outside the fusion")])
def test_fusion_must_return_outputs_that_others_read(kind, to_caller, message):
    seq = residual_bias(to_caller, extra_reader=not to_caller)
    with REGISTER[kind][0](fuse_first_three(TapBiasAddSilent)), pytest.raises(RuntimeError, match=message) as caught:
        seq(rows())
    assert "TapBiasAddSilent" in str(caught.value)


# ---- invalid fusions ----


WRONG_LISTS = {
    "drops one": lambda ops_: ops_[:-1],
    "another order": lambda ops_: ops_[::-1],
    "another operation": lambda ops_: [ops.ConstantScale(1.0), *ops_[1:]],
    "one twice": lambda ops_: [*ops_, ops_[-1]],
    "nothing": lambda ops_: [],
    "not a list": lambda ops_: None,
    "a fused one over others": lambda ops_: [Joined([ops.ConstantScale(1.0), ops.ConstantScale(1.0)])],
}


@pytest.mark.parametrize("kind", WRONG_LISTS)
@pytest.mark.parametrize("which", REGISTER)
def test_fusion_function_must_keep_ops_and_order(kind, which):
    def spoils(ops_, *, recipe):
        return WRONG_LISTS[kind](ops_)

    seq, x = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(3.0)), rows()
    with REGISTER[which][0](spoils), pytest.raises((RuntimeError, TypeError), match="spoils|NoneType"):
        seq(x)
    torch.testing.assert_close(seq(x), 6 * x)


def test_exception_in_fusion_function_keeps_type():
    def broken(ops_, *, recipe):
        raise Oops(7, "in the function")

    with ops.register_forward_fusion(broken), pytest.raises(Oops, match="in the function"):
        ops.Sequential(ops.GELU())(rows())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception_in_fused_pass_keeps_type(where):
    class Broken(ops.FusedOperation):
        def fuser_forward(self, basic_op_ctxs, input_, **_):
            if where == "forward":
                raise Oops(7, "fused")
            return input_.clone(), [()]

        def fuser_backward(self, basic_op_ctxs, grad_output, **_):
            raise Oops(7, "fused")

    with (
        ops.register_forward_backward_fusion(lambda ops_, *, recipe: [Broken(ops_[:1]), *ops_[1:]]),
        pytest.raises(Oops, match="fused"),
    ):
        ops.Sequential(ops.GELU(), ops.ConstantScale(2.0))(rows(requires_grad=True)).sum().backward()


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_fused_op_without_required_pass_is_named(kind):
    class Lacks(ops.FusedOperation):
        pass

    with (
        REGISTER[kind][0](lambda ops_, *, recipe: [Lacks(ops_)]),
        pytest.raises(NotImplementedError, match="Lacks"),
    ):
        ops.Sequential(ops.GELU())(rows(requires_grad=True)).sum().backward()


def test_fused_op_needs_basic_ops():
    with pytest.raises(ValueError, match="FusedOperation"):
        ops.FusedOperation([])


# ---- a fused operation as a module ----


def test_user_fused_op_runs_basic_ops_and_exposes_parameters():
    pair = ops.FusedOperation([ops.BasicLinear(WIDTH, WIDTH), ops.Bias(WIDTH)])
    x = rows(requires_grad=True)
    expected = x @ pair.basic_ops[0].weight.t() + pair.basic_ops[1].bias
    for module in (pair, ops.Sequential(ops.Identity(), pair)):
        check_against(module(x), expected, [x, pair.basic_ops[0].weight, pair.basic_ops[1].bias])
        assert {id(p) for p in module.parameters()} == {id(pair.basic_ops[0].weight), id(pair.basic_ops[1].bias)}
    assert "basic_ops.0.weight" in pair.state_dict()


# ---- what Python operations and fusions see --------------------------------------------------------------------------


class Split(ops.BasicOperation):
    """y = 2x; a new extra output 3x."""

    num_extra_outputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        return 2 * input_, [(3 * input_,)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        extra = basic_op_grad_extra_outputs[0][0]
        return 2 * grad_output + (0 if extra is None else 3 * extra), [()], [()]


class AddIfDifferentiable(ops.BasicOperation):
    """y = x + e; the gradient of e only if `e.requires_grad`."""

    num_extra_inputs = 1

    def fuser_forward(self, basic_op_ctxs, input_, *, basic_op_extra_inputs, **_):
        extra = basic_op_extra_inputs[0][0]
        basic_op_ctxs[0].needs_grad = extra.requires_grad
        return input_ + extra.detach(), [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        return grad_output, [()], [(grad_output if basic_op_ctxs[0].needs_grad else None,)]


def test_internal_channel_requires_grad():
    fork = Split().set_extra_output_channel(0, "c", output_to_caller=False)
    join = AddIfDifferentiable().set_extra_input_channel(0, "c")
    x = torch.randn(4, 8, requires_grad=True)
    y = ops.Sequential(fork, ops.Identity(), join)(x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 8), 5.0))
    with torch.no_grad():
        assert torch.allclose(ops.Sequential(fork, join)(x), 5 * x)


@pytest.mark.parametrize("autocast", (False, True))
def test_backward_fusion_sees_weight_and_dtype(autocast):
    seen = {}

    class Product(ops.FusedOperation):
        def fuser_backward(self, basic_op_ctxs, grad_output, **_):
            ctx = basic_op_ctxs[0]
            x, w = ctx.saved_tensors
            seen.update(dtype=ctx.dtype, x=ctx.input_requires_grad, w=ctx.weight_requires_grad)
            grad = grad_output.to(ctx.dtype)
            return grad @ w, [(grad.t() @ x,)], [()]

    linear, x = ops.BasicLinear(8, 4), torch.randn(5, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        want = torch.autograd.grad(linear(x).sum(), (x, linear.weight))
        with ops.register_backward_fusion(lambda ops_, *, recipe: [Product(ops_[:1])]):
            got = torch.autograd.grad(ops.Sequential(linear)(x).sum(), (x, linear.weight))
    assert seen == {"dtype": torch.bfloat16 if autocast else torch.float32, "x": True, "w": True}
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


class ToIntegers(ops.BasicOperation):
    def op_forward(self, ctx, input_, **unused):
        return input_.long()

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


@pytest.mark.parametrize("op", (ops.SiLU(), ops.Dropout(0.5), ops.QGELU(), ops.L2Normalization()), ids=repr)
def test_dtype_after_python_op_is_checked(op):
    with pytest.raises(TypeError, match=f"{type(op).__name__}: input is int64, expected float32"):
        ops.Sequential(ToIntegers(), op)(torch.ones(2, 8))
