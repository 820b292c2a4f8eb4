"""Sequential: a list of modules, consecutive operations as pipelines, extra tensors and named channels."""

import pytest
import torch
from plain import apply

import torchweft
from torchweft import ops

WIDTH = 4


def rows(count: int = 3, **options) -> torch.Tensor:
    return torch.randn(count, WIDTH, **options)


def scales(*factors: float) -> list[ops.ConstantScale]:
    return [ops.ConstantScale(factor) for factor in factors]


def make_output(channel: str | None = None, to_caller: bool = True, **options) -> ops.MakeExtraOutput:
    return ops.MakeExtraOutput(**options).set_extra_output_channel(0, channel, output_to_caller=to_caller)


def add_input(channel: str | None = None, **options) -> ops.AddExtraInput:
    return ops.AddExtraInput(**options).set_extra_input_channel(0, channel)


def segment_kinds(seq: ops.Sequential) -> list[list[str]]:
    return [[type(module).__name__ for module in segment.modules] for segment in seq._program.segments]


# ---- a list of modules ----


def test_sequential_edits_like_list():
    a, b, c, d, e = modules = scales(1, 2, 3, 4, 5)
    seq, mirror = ops.Sequential(*modules), list(modules)

    def check():
        assert list(seq) == mirror and len(seq) == len(mirror)
        x = torch.ones(1)
        expected = torch.ones(1)
        for module in mirror:
            expected = expected * module.scale
        torch.testing.assert_close(seq(x), expected)

    check()
    assert seq[0] is a and seq[-1] is e and seq[-5] is a
    assert list(seq[1:4]) == mirror[1:4] and list(seq[::2]) == mirror[::2] and list(seq[::-1]) == mirror[::-1]
    for target in (seq, mirror):
        target[1] = d
        target[-1] = c
    check()
    for target in (seq, mirror):
        del target[0]
        del target[-2]
    check()
    for target in (seq, mirror):
        target.append(a)
        target.extend([b, b])
        target.insert(1, e)
        target.insert(0, a)
        target.insert(-1, c)
        target.insert(100, d)
    check()
    assert seq.pop() is mirror.pop() and seq.pop(1) is mirror.pop(1)
    check()
    for target in (seq, mirror):
        del target[1:3]
        target[0:2] = [e, a, d]
    check()
    seq += [b]
    mirror += [b]
    check()
    both = seq + ops.Sequential(a, c)
    assert list(both) == [*mirror, a, c] and list(seq) == mirror
    assert list(seq + [b]) == [*mirror, b]
    del seq[:]
    del mirror[:]
    check()


@pytest.mark.parametrize(
    "use",
    [
        lambda seq: seq[2],
        lambda seq: seq[-3],
        lambda seq: seq.__setitem__(2, ops.Identity()),
        lambda seq: seq.__delitem__(-3),
        lambda seq: seq.pop(2),
    ],
)
def test_index_out_of_range_raises_index_error(use):
    with pytest.raises(IndexError, match="out of range"):
        use(ops.Sequential(*scales(1, 2)))


def test_non_module_raises_type_error():
    seq = ops.Sequential()
    for edit in (lambda: seq.append(3), lambda: ops.Sequential("GELU"), lambda: seq.extend([lambda x: x])):
        with pytest.raises(TypeError):
            edit()
    assert len(seq) == 0


def test_dict_gives_names():
    first, last = scales(2, 3)
    seq = ops.Sequential({"first": first, "last": last})
    assert list(seq._modules) == ["first", "last"] and seq.first is first and seq[1] is last
    torch.testing.assert_close(seq(torch.ones(1)), torch.full((1,), 6.0))


def test_new_keys_follow_largest_and_deletion_keeps_keys():
    seq = ops.Sequential(*scales(1, 2, 3))
    del seq[1]
    assert list(seq._modules) == ["0", "2"]
    seq.append(ops.Identity())
    seq.add_module("tail", ops.Identity())
    seq.append(ops.Identity())
    assert list(seq._modules) == ["0", "2", "3", "tail", "4"]


def test_insert_shifts_modules():
    one, two, new = scales(1, 2, 3)
    seq = ops.Sequential(one, two)
    seq.insert(0, new)
    assert seq._modules == {"0": new, "1": one, "2": two}


def test_slice_shares_modules():
    seq = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU())
    part = seq[:1]
    assert isinstance(part, ops.Sequential) and part[0] is seq[0]
    part(rows()).sum().backward()
    assert seq[0].weight.grad is not None


def test_empty_sequential_returns_input():
    x = rows()
    assert ops.Sequential()(x) is x


# ---- segments ----


def test_consecutive_ops_are_one_segment():
    seq = ops.Sequential(
        *scales(1, 2), torch.nn.Tanh(), ops.Identity(), torch.nn.Identity(), torch.nn.ReLU(), *scales(3, 4), ops.GELU()
    )
    seq(rows())
    assert segment_kinds(seq) == [
        ["ConstantScale", "ConstantScale"],
        ["Tanh"],
        ["Identity"],
        ["Identity"],
        ["ReLU"],
        ["ConstantScale", "ConstantScale", "GELU"],
    ]


def test_consecutive_ops_are_one_autograd_node():
    seq = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.RMSNorm(WIDTH))
    x = rows(requires_grad=True)
    node = seq(x).grad_fn
    parents = {type(parent).__name__ for parent, _ in node.next_functions if parent is not None}
    assert "Weft" in node.name() and parents == {"AccumulateGrad"}


def test_mixed_modules_match_one_by_one_calls():
    seq = ops.Sequential(ops.Linear(WIDTH, 6), torch.nn.Tanh(), ops.LayerNorm(6), ops.GELU(), torch.nn.Linear(6, WIDTH))
    x = rows(requires_grad=True)
    y = seq(x)
    expected = torch.tanh(apply(seq[0], x)[0])
    expected = seq[4](apply(seq[3], apply(seq[2], expected)[0])[0])
    torch.testing.assert_close(y, expected)
    inputs = [x, *seq.parameters()]
    torch.testing.assert_close(torch.autograd.grad(y.sum(), inputs), torch.autograd.grad(expected.sum(), inputs))


# ---- extra tensors by position ----


def test_extra_tensors_follow_op_order():
    seq = ops.Sequential(
        ops.AddExtraInput(),
        ops.MakeExtraOutput(),
        torch.nn.Identity(),
        ops.ConstantScale(2.0),
        ops.MakeExtraOutput(),
        ops.AddExtraInput(),
    )
    x, a, b = rows(), rows(), rows()
    y, first, second = seq(x, a, b)
    torch.testing.assert_close(first, x + a)
    torch.testing.assert_close(second, 2 * (x + a))
    torch.testing.assert_close(y, 2 * (x + a) + b)
    assert (seq.num_extra_inputs, seq.num_extra_outputs) == (2, 2)


def test_bias_shared_by_two_segments_gets_both_gradients():
    bias = ops.Bias(WIDTH)
    torch.nn.init.normal_(bias.bias)
    seq = ops.Sequential(bias, ops.MakeExtraOutput(), torch.nn.Tanh(), ops.AddExtraInput(in_place=True), bias)
    x, extra = rows(requires_grad=True), rows(requires_grad=True)
    y, middle = seq(x, extra)
    before = x + bias.bias
    expected = extra + torch.tanh(before) + bias.bias
    torch.testing.assert_close((y, middle), (expected, before))
    inputs = [x, extra, bias.bias]
    got = torch.autograd.grad(y.square().sum() + 3 * middle.sum(), inputs)
    torch.testing.assert_close(got, torch.autograd.grad(expected.square().sum() + 3 * before.sum(), inputs))


def test_in_place_ops_keep_caller_tensors():
    seq = ops.Sequential(ops.MakeExtraOutput(in_place=True), ops.Linear(WIDTH, WIDTH), ops.AddExtraInput(in_place=True))
    x, extra = rows(requires_grad=True), rows()
    kept = x.detach().clone(), extra.clone()
    y, out = seq(x, extra)
    weights = [torch.randn_like(y), torch.randn_like(out)]
    copies = [w.clone() for w in weights]
    torch.autograd.backward([y, out], weights)
    torch.testing.assert_close((x.detach(), extra), kept, rtol=0, atol=0)
    torch.testing.assert_close(weights, copies, rtol=0, atol=0)


@pytest.mark.parametrize("given", [0, 1, 3])
@pytest.mark.parametrize("split", [False, True], ids=["one group", "two groups"])
def test_wrong_number_of_extra_inputs_is_reported(given, split):
    middle = [torch.nn.Identity()] if split else []
    seq = ops.Sequential(ops.AddExtraInput(), *middle, ops.AddExtraInput())
    for _ in range(2):  # the first call builds, the second does not
        with pytest.raises(ValueError, match=rf"2 extra inputs.*, got {given}"):
            seq(rows(), *[rows()] * given)
        seq(rows(), rows(), rows())


def test_extra_input_of_wrong_shape_is_reported():
    with pytest.raises(ValueError, match=r"AddExtraInput.*\[3, 4\].*\[2, 4\]"):
        ops.Sequential(ops.AddExtraInput())(rows(3), rows(2))


@pytest.mark.parametrize("wrong", [None, 3, "x", [1.0]])
def test_non_tensor_raises_type_error(wrong):
    with pytest.raises(TypeError, match=f"Tensor.*{type(wrong).__name__}"):
        ops.Sequential(ops.GELU())(wrong)
    with pytest.raises(TypeError, match=f"Tensor.*{type(wrong).__name__}"):
        ops.Sequential(ops.AddExtraInput())(rows(), wrong)


# ---- channels ----


@pytest.mark.parametrize("residual_grad", [True, False], ids=["residual used", "residual unused"])
@pytest.mark.parametrize("in_place", [False, True])
def test_residual_connection_by_channel(residual_grad, in_place):
    bias = ops.Bias(WIDTH)
    torch.nn.init.normal_(bias.bias)
    seq = ops.Sequential(make_output("r", in_place=in_place), bias, add_input("r", in_place=in_place))
    x, dy, dres = rows(requires_grad=True), rows(), rows()
    y, residual = seq(x)
    torch.testing.assert_close(y, 2 * x + bias.bias)
    torch.testing.assert_close(residual, x)
    torch.autograd.backward([y, residual] if residual_grad else [y], [dy, dres] if residual_grad else [dy])
    torch.testing.assert_close(x.grad, 2 * dy + (dres if residual_grad else 0))
    torch.testing.assert_close(bias.bias.grad, dy.sum(0))


def test_unread_channel():
    seq, x = ops.Sequential(make_output("unused", True), ops.ConstantScale(3.0)), rows(requires_grad=True)
    seq(x)[0].sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 3.0))
    seq[0].set_extra_output_channel(0, "unused", output_to_caller=False)
    with pytest.raises(ValueError, match="Channel 'unused' has no reader"):
        seq(x)


@pytest.mark.parametrize("to_caller", [True, False], ids=["public", "hidden"])
@pytest.mark.parametrize("boundary", [False, True], ids=["one pipeline", "across a plain module"])
def test_one_channel_feeds_many_inputs(to_caller, boundary):
    middle = [torch.nn.Identity()] if boundary else []
    seq = ops.Sequential(make_output("r", to_caller), add_input("r"), *middle, add_input("r"))
    x, dy, dres = rows(requires_grad=True), rows(), rows()
    out = seq(x)
    y = out[0] if to_caller else out
    torch.testing.assert_close(y, 3 * x)
    torch.autograd.backward(list(out) if to_caller else [y], [dy, dres] if to_caller else [dy])
    torch.testing.assert_close(x.grad, 3 * dy + (dres if to_caller else 0))


def test_channels_and_positional_extras_mix():
    """Public and hidden outputs, inputs by channel and by position: each keeps its index in the order of operations."""
    seq = ops.Sequential(
        make_output("hidden", False),
        ops.ConstantScale(2.0),
        make_output("named"),
        ops.AddExtraInput(),
        make_output(),
        add_input("hidden"),
        add_input("named"),
        ops.AddExtraInput(),
    )
    x, a, b = [rows(requires_grad=True) for _ in range(3)]
    outputs = seq(x, a, b)
    expected = (x + 2 * x + (2 * x + a) + b, 2 * x, 2 * x + a)
    torch.testing.assert_close(outputs, expected)
    weights = [rows() for _ in expected]

    def grads(results):
        return torch.autograd.grad([(r * w).sum() for r, w in zip(results, weights, strict=True)], [x, a, b])

    torch.testing.assert_close(grads(outputs), grads(expected))


def test_channels_work_without_grad():
    seq, x = ops.Sequential(make_output("r", False), ops.ConstantScale(2.0), add_input("r")), rows()
    y = seq(x)
    torch.testing.assert_close(y, 3 * x)
    assert not y.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(seq(x), 3 * x)


def test_channel_from_new_tensor_carries_gradients():
    seq = ops.Sequential(ops.Linear(WIDTH, WIDTH), make_output("r", False), ops.GELU(), add_input("r"))
    x = rows()
    (weight,) = torch.autograd.grad(seq(x).square().sum(), seq[0].weight)
    hidden, _ = apply(seq[0], x)
    expected = apply(seq[2], hidden)[0] + hidden
    torch.testing.assert_close(weight, torch.autograd.grad(expected.square().sum(), seq[0].weight)[0])


def test_channels_cross_plain_modules_and_hooked_ops():
    seq = ops.Sequential(
        make_output("r", False), ops.ConstantScale(2.0), torch.nn.Tanh(), ops.ConstantScale(5.0), add_input("r")
    )
    x = rows(requires_grad=True)
    expected = 5 * torch.tanh(2 * x) + x
    torch.testing.assert_close(seq(x), expected)
    seen = []
    for index in (0, 3, 4):
        seq[index].register_forward_hook(lambda *_: seen.append(1))
    y = seq(x)
    torch.testing.assert_close(y, expected)
    assert seen == [1, 1, 1]
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(expected.sum(), x))


WIRING_ERRORS = {
    "no producer": ([add_input("r")], "has no producer"),
    "no producer, wrong name": ([make_output("s"), add_input("r")], "has no producer"),
    "consumer first": ([add_input("r"), make_output("r")], "has no earlier producer"),
    "two producers": ([make_output("r"), make_output("r"), add_input("r")], "multiple producers"),
}


@pytest.mark.parametrize("kind", WIRING_ERRORS)
@pytest.mark.parametrize("split", [False, True], ids=["one group", "split"])
def test_unconnected_channel_raises_at_call(kind, split):
    modules, message = WIRING_ERRORS[kind]
    if split:
        modules = [piece for module in modules for piece in (module, torch.nn.Identity())]
    seq = ops.Sequential(*modules)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            seq(rows())


class TwoOutputs(ops.BasicOperation):
    num_extra_outputs = 2

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        return input_, [(input_ + 1, input_ + 2)]

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        grads = [g for g in basic_op_grad_extra_outputs[0] if g is not None]
        return sum(grads, grad_output), [()], [()]


def test_two_outputs_of_one_op_cannot_share_channel():
    op = TwoOutputs().set_extra_output_channel(0, "r").set_extra_output_channel(1, "r")
    with pytest.raises(ValueError, match="multiple producers"):
        ops.Sequential(op, add_input("r"))(rows())


def test_outputs_of_one_op_are_distinct():
    op = TwoOutputs().set_extra_output_channel(1, "second", output_to_caller=False)
    seq, x = ops.Sequential(op, add_input("second")), rows(requires_grad=True)
    y, first = seq(x)
    torch.testing.assert_close((y, first), (2 * x + 2, x + 1))
    (y.sum() + 5 * first.sum()).backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 7.0))


@pytest.mark.parametrize(
    "bind, error, message",
    [
        (lambda: ops.AddExtraInput().set_extra_input_channel(1, "r"), IndexError, "out of range"),
        (lambda: ops.AddExtraInput().set_extra_input_channel(-1, "r"), IndexError, "out of range"),
        (lambda: ops.GELU().set_extra_output_channel(0, "r"), IndexError, "out of range"),
        (lambda: ops.AddExtraInput().set_extra_input_channel(0, ""), ValueError, "non-empty string"),
        (lambda: ops.MakeExtraOutput().set_extra_output_channel(0, 3), ValueError, "non-empty string"),
        (
            lambda: ops.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=1),
            TypeError,
            "must be a bool",
        ),
        (lambda: ops.MakeExtraOutput().set_extra_output_channel(1, "", output_to_caller=1), IndexError, "out of range"),
        (lambda: ops.MakeExtraOutput().set_extra_output_channel(0, "", output_to_caller=1), ValueError, "non-empty"),
    ],
)
def test_binding_checks_index_name_and_flag_in_order(bind, error, message):
    with pytest.raises(error, match=message):
        bind()


def test_last_binding_wins_and_none_unbinds():
    seq = ops.Sequential(make_output("a"), ops.ConstantScale(2.0), make_output("b"), add_input("a"))
    x = rows()
    torch.testing.assert_close(seq(x)[0], 3 * x)
    seq[3].set_extra_input_channel(0, "b")
    torch.testing.assert_close(seq(x)[0], 4 * x)
    seq[3].set_extra_input_channel(0, None)
    torch.testing.assert_close(seq(x, 10 * x)[0], 12 * x)
    seq[0].set_extra_output_channel(0, "a", output_to_caller=False)
    seq[3].set_extra_input_channel(0, "a")
    assert len(seq(x)) == 2
    seq[3].set_extra_input_channel(0, None)
    seq[0].set_extra_output_channel(0, None, output_to_caller=False)
    assert len(seq(x, x)) == 3


def test_op_called_alone_ignores_its_channels():
    add, out = add_input("r"), make_output("r", False)
    x, e = rows(), rows()
    torch.testing.assert_close(add(x, e), x + e)
    torch.testing.assert_close(out(x), (x, x))
    torch.testing.assert_close(ops.Sequential(out, ops.ConstantScale(2.0), add)(x), 3 * x)


# ---- nested ----


def residual_block(seed: int = 0) -> ops.Sequential:
    torch.manual_seed(seed)
    return ops.Sequential(
        make_output("residual", False), ops.RMSNorm(WIDTH), ops.Linear(WIDTH, WIDTH), ops.GELU(), add_input("residual")
    )


def test_nested_sequential_has_own_node():
    seq = ops.Sequential(ops.ConstantScale(2.0), ops.Sequential(*scales(3, 5)), ops.ConstantScale(7.0))
    x = rows(requires_grad=True)
    y = seq(x)
    torch.testing.assert_close(y, 210 * x)
    assert segment_kinds(seq) == [["ConstantScale"], ["Sequential"], ["ConstantScale"]]
    nodes, node = 0, y.grad_fn
    while "Weft" in node.name():
        nodes, node = nodes + 1, node.next_functions[0][0]
    assert nodes == 3


def with_extras(fuse_nested: bool) -> ops.Sequential:
    inner = ops.Sequential(ops.AddExtraInput(), ops.ConstantScale(3.0), ops.MakeExtraOutput())
    return ops.Sequential(
        ops.MakeExtraOutput(),
        ops.AddExtraInput(),
        inner,
        ops.ConstantScale(2.0),
        ops.AddExtraInput(),
        fuse_nested=fuse_nested,
    )


@pytest.mark.parametrize("fuse_nested", [False, True])
def test_nested_sequential_keeps_extra_tensor_order(fuse_nested):
    seq = with_extras(fuse_nested)
    x, a, b, c = [rows(requires_grad=True) for _ in range(4)]
    inner = 3 * (x + a + b)
    expected = (2 * inner + c, x, inner)
    outputs = seq(x, a, b, c)
    torch.testing.assert_close(outputs, expected)
    assert (seq.num_extra_inputs, seq.num_extra_outputs) == (3, 2)
    weights = [rows() for _ in expected]
    torch.testing.assert_close(
        torch.autograd.grad(outputs, [x, a, b, c], weights), torch.autograd.grad(expected, [x, a, b, c], weights)
    )
    with pytest.raises(ValueError, match="3 extra inputs.*, got 2"):
        seq(x, a, b)


@pytest.mark.parametrize("fuse_nested", [False, True])
def test_edit_of_nested_sequential_takes_effect(fuse_nested):
    inner = ops.Sequential(ops.ConstantScale(2.0))
    seq, x = ops.Sequential(ops.Identity(), inner, fuse_nested=fuse_nested), rows()
    torch.testing.assert_close(seq(x), 2 * x)
    inner.append(ops.ConstantScale(5.0))
    torch.testing.assert_close(seq(x), 10 * x)
    inner.append(ops.AddExtraInput())
    torch.testing.assert_close(seq(x, x), 11 * x)
    inner[0].scale = 3.0
    torch.testing.assert_close(seq(x, x), 16 * x)


def test_fuse_nested_gives_one_pipeline():
    seq = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.Sequential(ops.GELU(), ops.Sequential(ops.Linear(WIDTH, WIDTH))))
    x = rows(requires_grad=True)
    expected = seq(x)
    inputs = [x, *seq.parameters()]
    grads = torch.autograd.grad(expected.sum(), inputs)
    assert len(seq._program.segments) == 2
    seq.fuse_nested = True
    for each in seq.modules():
        if isinstance(each, ops.Sequential):
            each.fuse_nested = True
    y = seq(x)
    assert len(seq._program.segments) == 1
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), inputs), grads)
    assert [name for name, _ in seq.named_parameters()] == ["0.weight", "0.bias", "1.1.0.weight", "1.1.0.bias"]


@pytest.mark.parametrize("fuse_nested", [False, True])
def test_blocks_may_use_same_channel_names(fuse_nested):
    blocks = [residual_block(1), residual_block(2)]
    seq, x = ops.Sequential(*blocks, fuse_nested=fuse_nested), rows(requires_grad=True)
    expected = blocks[1](blocks[0](x))
    inputs = [x, *seq.parameters()]
    y = seq(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), inputs), torch.autograd.grad(expected.sum(), inputs))
    assert len(seq._program.segments) == (1 if fuse_nested else 2)


def test_block_used_twice_is_correct():
    block = residual_block()
    for fuse_nested in (False, True):
        seq, x = ops.Sequential(block, block, fuse_nested=fuse_nested), rows(requires_grad=True)
        y, expected = seq(x), block(block(x))
        torch.testing.assert_close(y, expected)
        inputs = [x, *block.parameters()]
        torch.testing.assert_close(torch.autograd.grad(y.sum(), inputs), torch.autograd.grad(expected.sum(), inputs))


def test_nested_sequential_with_hook_is_not_inlined():
    inner, seen = ops.Sequential(ops.ConstantScale(3.0)), []
    seq, x = ops.Sequential(ops.ConstantScale(2.0), inner, fuse_nested=True), rows()
    seq(x)
    assert len(seq._program.segments) == 1
    handle = inner.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(seq(x), 6 * x)
    assert seen == [1] and len(seq._program.segments) == 2
    handle.remove()
    seq(x)
    assert seen == [1] and len(seq._program.segments) == 1


@pytest.mark.parametrize("fuse_nested", [False, True])
def test_sequential_subclass_forward_is_called(fuse_nested):
    class Residual(ops.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    seq, x = ops.Sequential(ops.ConstantScale(2.0), Residual(ops.ConstantScale(3.0)), fuse_nested=fuse_nested), rows()
    torch.testing.assert_close(seq(x), 8 * x)


def test_op_subclass_forward_is_called():
    class Shifted(ops.ConstantScale):
        def forward(self, x):
            return super().forward(x) + 1

    op, x = Shifted(2.0), rows()
    torch.testing.assert_close(op(x), 2 * x + 1)
    torch.testing.assert_close(ops.Sequential(ops.Identity(), op)(x), 2 * x + 1)


# ---- hooks and keywords ----


def test_hooks_on_sequential_and_plain_modules_fire():
    seq, seen = ops.Sequential(ops.ConstantScale(2.0), torch.nn.Tanh(), ops.ConstantScale(3.0)), []
    seq.register_forward_pre_hook(lambda *_: seen.append("before"))
    seq[1].register_forward_hook(lambda *_: seen.append("tanh"))
    seq.register_forward_hook(lambda *_: seen.append("after"))
    seq.register_full_backward_hook(lambda *_: seen.append("backward"))
    seq(rows(requires_grad=True)).sum().backward()
    assert seen == ["before", "tanh", "after", "backward"]


def test_hooks_with_keywords_see_extra_inputs():
    seq, seen = ops.Sequential(ops.Identity(), ops.AddExtraInput()), []
    seq[1].register_forward_pre_hook(lambda op, args, kwargs: seen.append(len(args)), with_kwargs=True)
    x = rows()
    torch.testing.assert_close(seq(x, x), 2 * x)
    assert seen == [2]


class Power(ops.BasicOperation):
    """xⁿ; the exponent is an argument of the call."""

    def op_forward(self, ctx, input_, *, exponent=1, **_):
        ctx.exponent = exponent
        ctx.save_for_backward(input_)
        return input_**exponent

    def op_backward(self, ctx, grad_output):
        return grad_output * ctx.exponent * ctx.saved_tensors[0] ** (ctx.exponent - 1), ()


@pytest.mark.parametrize("by", ["index", "negative index", "module"])
def test_keywords_reach_named_op(by):
    power, other = Power(), Power()
    seq, x = ops.Sequential(ops.ConstantScale(2.0), other, power), rows(requires_grad=True)
    target = {"index": 2, "negative index": -1, "module": power}[by]
    y = seq(x, op_kwargs={target: {"exponent": 3}})
    torch.testing.assert_close(y, (2 * x) ** 3)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 6 * (2 * x) ** 2)
    torch.testing.assert_close(seq(x), 2 * x)


def test_keywords_reach_ops_in_several_segments():
    first, last = Power(), Power()
    last.register_forward_hook(lambda *_: None)
    seq, x = ops.Sequential(first, torch.nn.Identity(), last), rows()
    torch.testing.assert_close(seq(x, op_kwargs={0: {"exponent": 2}, last: {"exponent": 3}}), x**6)


def test_op_called_alone_takes_keywords():
    x = rows()
    torch.testing.assert_close(Power()(x, exponent=2), x**2)


@pytest.mark.parametrize(
    "target, error",
    [(lambda seq: Power(), ValueError), (lambda seq: seq[1], ValueError), (lambda seq: 7, IndexError)],
    ids=["another operation", "plain module", "index out of range"],
)
def test_keywords_for_invalid_target_raise(target, error):
    seq = ops.Sequential(Power(), torch.nn.Tanh())
    with pytest.raises(error):
        seq(rows(), op_kwargs={target(seq): {"exponent": 2}})


@pytest.mark.parametrize("make", [ops.GELU, lambda: ops.Linear(WIDTH, WIDTH)], ids=["GELU", "Linear"])
def test_unknown_keyword_raises_type_error(make):
    op = make()
    with pytest.raises(TypeError, match="exponent"):
        ops.Sequential(ops.Identity(), op)(rows(), op_kwargs={op: {"exponent": 2}})
    with pytest.raises(TypeError, match="exponent"):
        op(rows(), exponent=2)


def test_fused_operation_with_hook_keeps_inner_channel():
    fork = ops.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=False)
    fused = ops.FusedOperation([fork, ops.SiLU(), ops.AddExtraInput().set_extra_input_channel(0, "r")])
    model, x = ops.Sequential(ops.Identity(), fused), rows(2)
    expected = model(x)
    fused.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(model(x), expected)


def test_call_on_meta_does_not_allocate_parameters():
    model = ops.Sequential(ops.Linear(4, 4, device="meta"))
    assert model(torch.empty(2, 4, device="meta")).is_meta
    assert model(torch.ones(2, 4)).device.type == "cpu"


def test_extra_inputs_are_counted_between_segments():
    model = ops.Sequential(ops.AddExtraInput(), torch.nn.Tanh(), ops.AddExtraInput())
    x = rows()
    for extras in ((x,), (x, x, x)):
        with pytest.raises(ValueError, match=f"expected 2 extra inputs, got {len(extras)}"):
            model.explain(x, *extras)


def test_explain_of_model_restores_its_state():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop, self.block = torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), ops.Linear(4, 4)

        def forward(self, x):
            return self.block(input=self.drop(self.norm(x)))

    model = Model()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    random = torch.get_rng_state()
    assert "linear_bias" in torchweft.explain(model, torch.randn(3, 4, generator=torch.Generator())).text
    assert torch.equal(torch.get_rng_state(), random)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
