"""Every registered operation by itself: gradients, precision, shapes and strides, autocast, errors."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import plain
import pytest
import torch
from tolerances import assert_close

import torchweft
from torchweft import ops

LOW = (torch.float16, torch.bfloat16)
DERIVED = ("tensor_parallel_size", "process_group_size", "fan_in")


@dataclass(frozen=True)
class Case:
    """An operation to build in any dtype, and the trailing sizes of its input."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    row: tuple[int, ...] = (8,)

    def __str__(self) -> str:
        return self.name + "".join(f"-{k}={v}".replace(" ", "") for k, v in self.options.items())

    @property
    def scaled(self) -> bool:
        return self.name.startswith("Scaled")

    def build(self, dtype: torch.dtype):
        """Builds the operation with random Parameters, equal in every dtype up to rounding."""
        cls = getattr(ops, self.name)
        dtypes = {"dtype": dtype} if "dtype" in inspect.signature(cls).parameters else {}
        op = cls(**self.options, **dtypes)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for param in op.parameters():
                param.copy_(torch.rand(param.shape, generator=generator, dtype=torch.float64) * 2 - 1)
        return op

    def inputs(self, lead: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """Returns x and the extra inputs as leaves that require grad."""
        shapes = [lead + self.row]
        if self.scaled:
            shapes.append(shapes[0][:-1])
        if self.name == "AddExtraInput":
            shapes.append(shapes[0])
        if self.name == "CrossDotProductAttention":
            groups = self.options.get("num_gqa_groups", self.options["num_attention_heads"])
            shapes += [(*lead, groups * self.options["kv_channels"])] * 2
        if self.name == "GroupedLinear" and self.options["bias"] and self.options["scale_bias"]:
            shapes.append(lead)
        inputs = [values(shape, seed).to(dtype).requires_grad_() for seed, shape in enumerate(shapes)]
        if self.name == "GroupedLinear":
            inputs.insert(1, plain.some_splits(self.options["num_groups"], math.prod(lead)))
        if self.name.endswith("DotProductAttention") and self.options.get("qkv_format") == "thd":
            inputs += [plain.packed_sequences(math.prod(lead))] * (2 if self.name.startswith("Cross") else 1)
        if self.name == "RotaryEmbedding":
            inputs += self.rotary_inputs(lead, dtype)
        if self.name == "CrossEntropy":
            inputs.append(some_classes(lead, *self.row, self.options.get("ignore_index", -100)))
        return inputs

    def rotary_inputs(self, lead: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """Returns cos and sin with more rows than there are positions, and the offsets of packed sequences."""
        given = []
        if self.options.get("rotary_base", 1) is None:
            shape = (math.prod(lead) + 2, self.options.get("rotary_dim", self.options["kv_channels"]) // 2)
            given += [values(shape, seed).to(dtype).requires_grad_() for seed in (21, 22)]
        return given + [plain.packed_sequences(math.prod(lead))] * (self.options.get("qkv_format") == "thd")


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Values of both signs up to 1.35, none near a kink: 0 of relu, ±0.75 of the clamped samples."""
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(shape, generator=generator, dtype=torch.float64)
    magnitude = torch.where(u < 0.5, u * 1.1 + 0.1, u + 0.35)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, magnitude, -magnitude)


def some_classes(lead: tuple[int, ...], count: int, ignore_index: int) -> torch.Tensor:
    """Returns class indices; if there are several rows, one is ignored."""
    targets = torch.arange(math.prod(lead)) * 3 % count
    targets[1:2] = ignore_index
    return targets.reshape(lead)


def floats(tensors) -> list[torch.Tensor]:
    """Returns the tensors that can have a gradient."""
    return [t for t in tensors if t.is_floating_point()]


def leaf(t: torch.Tensor) -> torch.Tensor:
    return t.requires_grad_(t.is_floating_point())


def row_of(options: dict[str, Any]) -> tuple[int, ...]:
    if "normalized_shape" in options:
        return tuple(options["normalized_shape"])
    if "shape" in options:
        return (12,)
    return (options.get("in_features", options.get("size", 8)),)


def samples() -> list[Case]:
    """Returns the sample of each registered operation, so that every new operation is tested."""
    cases = []
    for name, _, _, sample in torchweft._C.op_types():
        options = {k: v for k, v in sample.fields().items() if k not in DERIVED and k != "dtype" and v is not None}
        cases.append(Case(name, options, row_of(options)))
    return cases


HEADS = {"num_attention_heads": 4, "kv_channels": 6, "qkv_format": "sbhd"}
PACKED_HEADS = HEADS | {"qkv_layout": "group_interleaved"}
MORE = [
    Case("Linear", {"in_features": 8, "out_features": 6}),
    Case("Linear", {"in_features": 8, "out_features": 6, "bias": False}),
    Case("Linear", {"in_features": 8, "out_features": 1}),
    *(
        Case("GroupedLinear", {"num_groups": 3, "in_features": 8, "out_features": 6, **options})
        for options in (
            {"bias": False, "scale_bias": True},
            {"bias": True, "scale_bias": False, "single_grouped_weight": True},
            {"bias": True, "scale_bias": True, "single_grouped_bias": True, "split_path": True},
        )
    ),
    Case("Bias", {"size": 1}, (1,)),
    Case("CrossEntropy", {"reduction": "sum"}),
    Case("CrossEntropy", {"reduction": "sum", "label_smoothing": 0.5, "z_loss": 0.1, "ignore_index": 3}, (37,)),
    Case("CrossEntropy", {"reduction": "none"}, (1,)),
    Case("GELU", {"approximate": "none"}),
    Case("SwiGLU"),
    Case("SwiGLU", {"glu_interleave_size": 4}, (16,)),
    Case("SiTUGLU"),
    Case("SiTUGLU", {"beta1": 0.5, "beta2": 2.0, "glu_interleave_size": 2}),
    Case("ClampedSwiGLU"),
    Case("ClampedSwiGLU", {"limit": 0.75, "alpha": 1.0, "glu_linear_offset": 0.0, "glu_interleave_size": 2}),
    Case("ScaledTanhSReLU", {"tanh_clamp_scale": 0.5}),
    Case("ScaledSwiGLU"),
    Case("ScaledSiTUGLU", {"glu_interleave_size": 4}),
    Case("ScaledClampedQGeGLU", {"glu_interleave_size": 2, "limit": 0.75, "glu_linear_offset": 0.0}),
    Case("LayerNorm", {"normalized_shape": 8}),
    Case("LayerNorm", {"normalized_shape": (2, 4), "zero_centered_gamma": True}, (2, 4)),
    Case("LayerNorm", {"normalized_shape": (3, 1, 4), "eps": 0.3}, (3, 1, 4)),
    Case("LayerNorm", {"normalized_shape": 8, "bias": False}),
    Case("RMSNorm", {"normalized_shape": 19}, (19,)),
    Case("RMSNorm", {"normalized_shape": (2, 4), "eps": 0.3}, (2, 4)),
    Case("RMSNorm", {"normalized_shape": (3, 1, 4), "zero_centered_gamma": True}, (3, 1, 4)),
    Case("L2Normalization", {"eps": 0.3}),
    Case("ConstantScale", {"scale": 0.0}),
    Case("ConstantScale", {"scale": 1.0}),
    Case("Dropout", {"p": 0.0}),
    Case("Dropout", {"p": 0.3}),
    Case("Dropout", {"p": 1.0}),
    Case("AddExtraInput", {"in_place": True}),
    Case("MakeExtraOutput", {"in_place": True}),
    Case("Quantize", {"forward": False, "backward": True}),
    *(
        Case("RotaryEmbedding", {**HEADS, **options}, (row,))
        for row, options in (
            (72, {"qkv_layout": "group_interleaved", "interleaved": True}),
            (48, {"num_gqa_groups": 2, "qkv_layout": "concatenated", "qkv_format": "bshd", "rotary_dim": 4}),
            (24, {"qkv_layout": None, "interleaved": True, "rotary_dim": 2, "rotary_base": 100.0}),
            (36, {"num_gqa_groups": 1, "qkv_layout": "concatenated", "rotary_base": None, "qkv_format": "bshd"}),
            (48, {"num_gqa_groups": 2, "qkv_layout": "group_interleaved", "qkv_format": "thd"}),
            (24, {"qkv_layout": None, "rotary_base": None, "qkv_format": "thd", "interleaved": True}),
        )
    ),
    *(
        Case("DotProductAttention", {**PACKED_HEADS, **options}, (row,))
        for row, options in (
            (72, {}),
            (48, {"num_gqa_groups": 2, "qkv_format": "bshd"}),
            (48, {"num_gqa_groups": 2, "qkv_layout": "concatenated", "attn_mask_type": "no_mask"}),
            (36, {"num_gqa_groups": 1, "attn_mask_type": "causal_bottom_right", "softmax_scale": 0.7}),
            (48, {"num_gqa_groups": 2, "attn_mask_type": "no_mask", "window_size": (1, 2), "qkv_format": "bshd"}),
            (48, {"num_gqa_groups": 2, "qkv_format": "thd"}),
            (72, {"qkv_format": "thd", "window_size": (0, 0), "qkv_layout": "concatenated"}),
        )
    ),
    *(
        Case("CrossDotProductAttention", {**HEADS, **options}, (24,))
        for options in (
            {},
            {"num_gqa_groups": 2, "qkv_format": "bshd", "attn_mask_type": "causal"},
            {"num_gqa_groups": 2, "attn_mask_type": "causal_bottom_right"},
            {"num_gqa_groups": 1, "qkv_format": "thd", "window_size": (1, 2), "softmax_scale": 0.7},
        )
    ),
    Case("Reshape", {"shape": (-1,)}, (12,)),
    Case("Reshape", {"shape": (2, 2, -1)}, (12,)),
]
CASES = samples() + MORE
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def call(op, inputs, run=None):
    """Returns all outputs as a tuple. Dropout masks are drawn from the same seed each time."""
    torch.manual_seed(77)
    if run is not None:
        y, extra = run(op, *inputs)
        return (y, *extra)
    out = op(*inputs)
    return out if isinstance(out, tuple) else (out,)


def rounded(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return t.detach().to(dtype if t.is_floating_point() else t.dtype).requires_grad_(t.requires_grad)


def compare_with_plain(op, inputs: list[torch.Tensor]) -> None:
    """Compares outputs and all gradients of `op` with float64, and with eager where `assert_close` allows it."""
    params = list(op.parameters())
    held = [t.detach().clone() for t in (*inputs, *params)]
    outputs = call(op, inputs)
    grads_in = [values(tuple(y.shape), 40 + i).to(y.dtype) for i, y in enumerate(outputs)]
    held_grads = [g.clone() for g in grads_in]
    grad_inputs = (*floats(inputs), *params)
    grads = torch.autograd.grad(outputs, grad_inputs, grads_in, allow_unused=True)

    def truth(dtype):
        leaves = [rounded(t, dtype) for t in (*inputs, *params)]
        of = dict(zip(map(id, params), leaves[len(inputs) :], strict=True))
        ys = call(op, leaves[: len(inputs)], lambda *a: plain.apply(*a, of=lambda p: of[id(p)]))
        return ys, torch.autograd.grad(ys, floats(leaves), [g.to(y.dtype) for g, y in zip(grads_in, ys, strict=True)])

    exact_outputs, exact_grads = truth(torch.float64)
    eager_outputs, eager_grads = truth(inputs[0].dtype)
    names = ["x"] + [f"extra {i}" for i in range(len(floats(inputs)) - 1)] + [n for n, _ in op.named_parameters()]
    for i, (y, exact, eager) in enumerate(zip(outputs, exact_outputs, eager_outputs, strict=True)):
        assert y.dtype == (eager.dtype if isinstance(op, ops.CrossEntropy) else inputs[0].dtype)
        assert_close(y, exact, eager, f"output {i}")
    for name, t, g, exact, eager in zip(names, grad_inputs, grads, exact_grads, eager_grads, strict=True):
        assert g is not None, f"no gradient of {name}"
        assert g.dtype == t.dtype
        assert_close(g, exact, eager, f"gradient of {name}")
    for before, after in zip((*held, *held_grads), (*inputs, *params, *grads_in), strict=True):
        assert torch.equal(before, after), "a tensor of the caller was changed"


@every_case
def test_gradients_match_finite_differences_in_float64(case):
    op = case.build(torch.float64)
    inputs = case.inputs((2,), torch.float64)
    if case.name == "ConstantScale" and case.options["scale"] == 0 or case.options.get("p") == 1:
        inputs = case.inputs((1,), torch.float64)  # everything is zero: one row suffices
    tried = (*floats(inputs), *op.parameters())
    assert torch.autograd.gradcheck(lambda *_: call(op, inputs), tried, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("dtype", (torch.float32, *LOW))
@every_case
def test_values_and_gradients_match_float64(case, dtype):
    compare_with_plain(case.build(dtype), case.inputs((6, 16), dtype))


LEADS = {"1-D": (), "3-D": (2, 3), "4-D": (2, 1, 3), "no-rows": (0,), "no-rows-3-D": (2, 0)}


@pytest.mark.parametrize("lead", LEADS.values(), ids=LEADS)
@every_case
def test_any_leading_dimensions_work(case, lead):
    compare_with_plain(case.build(torch.float64), case.inputs(lead, torch.float64))


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.detach().transpose(0, -1).contiguous().transpose(0, -1)


def every_other_column(t: torch.Tensor) -> torch.Tensor:
    return t.detach().repeat_interleave(2, -1)[..., ::2]


def from_the_middle(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.detach()] * 3)[t.shape[0] : 2 * t.shape[0]]


@pytest.mark.parametrize("layout", (transposed, every_other_column, from_the_middle))
@every_case
def test_input_strides_do_not_matter(case, layout):
    inputs = [leaf(layout(t)) for t in case.inputs((3, 4), torch.float64)]
    compare_with_plain(case.build(torch.float64), inputs)


@every_case
def test_output_gradient_strides_do_not_matter(case):
    op, inputs = case.build(torch.float64), case.inputs((3, 4), torch.float64)
    outputs = call(op, inputs)
    grad_inputs = (*floats(inputs), *op.parameters())
    dense = [values(tuple(y.shape), 3) for y in outputs]
    expected = torch.autograd.grad(outputs, grad_inputs, dense, retain_graph=True)
    strided = torch.autograd.grad(outputs, grad_inputs, [transposed(g) for g in dense], retain_graph=True)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(strided, expected, strict=True))
    of_sum = torch.autograd.grad(sum(y.sum() for y in outputs), grad_inputs, retain_graph=True)
    ones = torch.autograd.grad(outputs, grad_inputs, [torch.ones_like(y) for y in outputs])
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(of_sum, ones, strict=True))


@every_case
def test_values_are_same_without_grad(case):
    op, inputs = case.build(torch.float32), case.inputs((3,), torch.float32)
    expected = call(op, inputs)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs = call(op, inputs)
            as_torch = call(op, inputs, plain.apply)
        assert [y.requires_grad for y in outputs] == [
            y.requires_grad for y in as_torch
        ]  # x itself and views of it are allowed
        assert all(torch.equal(y, e) for y, e in zip(outputs, expected, strict=True))


@every_case
def test_frozen_tensors_get_no_grad_and_change_no_other(case):
    op, inputs = case.build(torch.float64), case.inputs((3,), torch.float64)
    tensors = (*floats(inputs), *op.parameters())
    if len(tensors) == 1:
        return
    y = call(op, inputs)[0]
    dy = values(tuple(y.shape), 3)
    expected = torch.autograd.grad(y, tensors, dy)
    for part in frozen_together(case, floats(inputs), list(op.parameters())):
        frozen = set(map(id, part))
        for t in part:
            t.requires_grad_(False)
        y = call(op, inputs)[0]
        y.backward(dy)
        for t, expected_grad in zip(tensors, expected, strict=True):
            assert (t.grad is None) == (id(t) in frozen)
            if id(t) not in frozen:
                torch.testing.assert_close(t.grad, expected_grad, rtol=1e-12, atol=1e-12)
            t.grad = None
        for t in part:
            t.requires_grad_()


def frozen_together(case: Case, inputs: list, params: list) -> list[list]:
    """Yields parameters one by one; those of a grouped operation, which must agree, all at once."""
    alike = [params] if case.name == "GroupedLinear" else [[p] for p in params]
    return [*([t] for t in inputs), *alike]


# ---- dtypes -------------------------------------------------------------------------------------------------------

WEIGHT = ("BasicLinear", "Linear", "GroupedLinear", "LayerNorm", "RMSNorm")  # compute in the dtype of the weight
PROMOTING = ("Bias", "ConstantScale", "AddExtraInput")  # torch's type promotion; under autocast a bias follows x
UNTOUCHED = (
    "L2Normalization",
    "RotaryEmbedding",
    "Identity",
    "Reshape",
    "MakeExtraOutput",
    "Quantize",
    "AllGather",
    "AllReduce",
    "ReduceScatter",
)


def expected_dtype(case: Case, x: torch.dtype, param: torch.dtype, autocast: torch.dtype | None) -> torch.dtype:
    if case.name == "CrossEntropy":
        return torch.float32
    if case.name in UNTOUCHED or case.options.get("p") == 0:
        return x
    if case.name in PROMOTING:
        return torch.promote_types(x, param) if case.name == "Bias" and autocast is None else x
    if autocast is not None:
        return autocast
    return param if case.name in WEIGHT else x


@pytest.mark.parametrize("autocast", (None, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("param", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@every_case
def test_output_and_gradient_dtypes(case, dtype, param, autocast):
    op, inputs = case.build(param), case.inputs((4,), dtype)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        outputs = call(op, inputs)
    for y in outputs:
        assert y.dtype == expected_dtype(case, dtype, param, autocast)
    sum(y.float().sum() for y in outputs).backward()
    for t in (*floats(inputs), *op.parameters()):
        assert t.grad.dtype == t.dtype


@every_case
def test_autocast_equals_low_precision_op(case):
    op, inputs = case.build(torch.float32), case.inputs((4,), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = call(op, inputs)
    if outputs[0].dtype == torch.float32:
        low = call(op, inputs)
    else:
        low = call(case.build(torch.bfloat16), [inputs[0].bfloat16(), *inputs[1:]])
    for y, expected in zip(outputs, low, strict=True):
        torch.testing.assert_close(y, expected, rtol=1.6e-2, atol=1e-2)


def test_dtype_defaults_to_torch_default():
    torch.set_default_dtype(torch.float64)
    assert ops.Linear(2, 3).weight.dtype == torch.float64
    assert ops.LayerNorm(2).bias.dtype == torch.float64


# ---- dropout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.float32, *LOW))
@pytest.mark.parametrize("shape", ((101,), (2, 4, 16), (128, 128)), ids=str)
@pytest.mark.parametrize("p", (1 / 16, 0.3, 0.5, 0.75))
def test_dropout_drops_fraction_p_and_scales_rest(p, shape, dtype):
    x = (torch.rand(shape) + 0.5).to(dtype).requires_grad_()
    y = ops.Dropout(p)(x)
    mask = (y != 0).double() / (1 - p)
    torch.testing.assert_close(y.double(), x.double() * mask, rtol=1.6e-2 if dtype in LOW else 1e-6, atol=0)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad.double(), mask, rtol=1.6e-2 if dtype in LOW else 1e-6, atol=0)
    n = x.numel()
    dropped = (y == 0).sum().item()
    assert abs(dropped - n * p) < 4 * math.sqrt(n * p * (1 - p))


def test_dropout_does_nothing_in_eval_mode():
    x = torch.rand(4, 16, requires_grad=True)
    y = ops.Dropout(0.5).eval()(x)
    assert torch.equal(y, x)
    y.backward(torch.full_like(y, 3))
    assert torch.equal(x.grad, torch.full_like(x, 3))


def test_dropout_uses_torch_generator():
    x, op = torch.rand(64, 64), ops.Dropout(0.5)
    torch.manual_seed(3)
    first = op(x)
    second = op(x)
    torch.manual_seed(3)
    assert torch.equal(op(x), first)
    assert not torch.equal(second, first)


# ---- errors -------------------------------------------------------------------------------------------------------

GATED = ("GLU", "GEGLU", "QGEGLU", "ReGLU", "SReGLU", "SwiGLU", "SiTUGLU", "ClampedSwiGLU")
SCALED_GLU = ("ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU")

REJECTED_AT_CONSTRUCTION = [
    (lambda: ops.SiTUGLU(beta1=0.0), ValueError, "beta1"),
    (lambda: ops.SiTUGLU(beta2=float("inf")), ValueError, "beta2"),
    (lambda: ops.SiTUGLU(beta1=float("nan")), ValueError, "beta1"),
    (lambda: ops.ScaledSiTUGLU(beta1=-1.0), ValueError, "beta1"),
    (lambda: ops.ScaledSiTUGLU(beta2=0.0), ValueError, "beta2"),
    (lambda: ops.SwiGLU(glu_interleave_size=0), ValueError, "glu_interleave_size"),
    (lambda: ops.ScaledSwiGLU(-2), ValueError, "glu_interleave_size"),
    (lambda: ops.Dropout(-0.1), ValueError, "p is -0.1"),
    (lambda: ops.Dropout(1.5), ValueError, "p is 1.5"),
    (lambda: ops.Dropout(float("nan")), ValueError, "p is nan"),
    (lambda: ops.BasicLinear(4, 4, dtype=torch.int32), ValueError, "dtype"),
    (lambda: ops.Linear(-1, 4), ValueError, "in_features"),
    (lambda: ops.Linear(4, 4, tensor_parallel_mode="diagonal"), ValueError, "'column' or 'row'"),
    (lambda: ops.LayerNorm(()), ValueError, "normalized_shape is empty"),
    (lambda: ops.RMSNorm((2, -3)), ValueError, "normalized_shape"),
    (lambda: ops.LayerNorm(4, dtype=torch.int64), ValueError, "dtype"),
    (lambda: ops.Reshape((-1, -1)), ValueError, "one -1"),
    (lambda: ops.Reshape((-2, 3)), ValueError, "Reshape"),
    (lambda: ops.Bias(-1), ValueError, "size"),
    (lambda: ops.GELU("erf"), ValueError, 'GELU: approximate is "erf", expected one of tanh, none.'),
    (lambda: ops.ScaledTanhSReLU(), TypeError, "tanh_clamp_scale"),
    (lambda: ops.ScaledTanhSReLU(tanh_clamp_scale=0.0), ValueError, "tanh_clamp_scale is 0"),
    (lambda: ops.RMSNorm(4, bias=False), TypeError, "bias"),
    (lambda: ops.SiLU(True), TypeError, "positional"),
    (lambda: ops.GELU(gain=2), TypeError, "gain"),
    (lambda: ops.Bias(), TypeError, "size"),
    (lambda: ops.ConstantScale("two"), (TypeError, ValueError), "scale"),
    (lambda: ops.RotaryEmbedding(0, 8), ValueError, "num_attention_heads is 0"),
    (lambda: ops.RotaryEmbedding(4, 8, num_gqa_groups=3), ValueError, "num_attention_heads is 4, num_gqa_groups 3"),
    (lambda: ops.RotaryEmbedding(4, 8, rotary_dim=10), ValueError, "rotary_dim is 10, expected .* 8"),
    (lambda: ops.RotaryEmbedding(4, 7), ValueError, "rotary_dim is 7, expected an even number"),
    (lambda: ops.RotaryEmbedding(4, 8, rotary_base=-1.0), ValueError, "rotary_base is -1"),
    (lambda: ops.RotaryEmbedding(4, 8, qkv_format="hd"), ValueError, "expected one of sbhd, bshd, thd"),
    (lambda: ops.DotProductAttention(4, 8, num_gqa_groups=3), ValueError, "num_attention_heads is 4, num_gqa_groups 3"),
    (lambda: ops.DotProductAttention(4, 8, attention_dropout=1.5), ValueError, "attention_dropout is 1.5"),
    (lambda: ops.DotProductAttention(4, 8, window_size=(1,)), ValueError, r"window_size is \[1\], expected two"),
    (lambda: ops.DotProductAttention(4, 8, window_size=(-2, 0)), ValueError, r"window_size is \[-2, 0\]"),
    (lambda: ops.DotProductAttention(4, 8, softmax_scale=float("inf")), ValueError, "softmax_scale is inf"),
    *[
        (lambda name=name: getattr(ops, name)(activation_recompute_in_mlp=True), ValueError, "activation recomputation")
        for name in SCALED_GLU
    ],
]


@pytest.mark.parametrize(
    "build, error, fragment", REJECTED_AT_CONSTRUCTION, ids=lambda v: v if isinstance(v, str) else ""
)
def test_invalid_options_are_rejected_at_construction(build, error, fragment):
    with pytest.raises(error, match=fragment):
        build()


X = torch.rand(2, 8)
REJECTED_AT_CALL = [
    (lambda: ops.Linear(6, 4)(X), ValueError, r"\[2, 8\].*6"),
    (lambda: ops.Linear(6, 4)(torch.tensor(1.0)), ValueError, "Linear"),
    (lambda: ops.BasicLinear(1, 4)(torch.tensor(1.0)), ValueError, "Linear"),
    (lambda: ops.Bias(6)(X), ValueError, r"Bias: .*\[2, 8\].*6"),
    (lambda: ops.Bias(1)(X), ValueError, "Bias"),
    (lambda: ops.LayerNorm(6)(X), ValueError, r"LayerNorm: .*\[2, 8\].*\[6\]"),
    (lambda: ops.RMSNorm((8, 2))(X), ValueError, r"RMSNorm: .*\[8, 2\]"),
    (lambda: ops.RMSNorm((3, 2, 8))(X), ValueError, "RMSNorm"),
    (lambda: ops.L2Normalization()(torch.tensor(1.0)), ValueError, "L2Normalization"),
    (lambda: ops.Reshape((3, -1))(X), ValueError, "shape"),
    (lambda: ops.SwiGLU(glu_interleave_size=3)(X), ValueError, "glu_interleave_size 3"),
    (lambda: ops.GELU()(torch.ones(2, 8, dtype=torch.int64)), TypeError, "GELU: input is int64, expected float32"),
    (lambda: ops.SwiGLU()(torch.ones(2, 8, dtype=torch.complex64)), TypeError, "SwiGLU is complex64; expected"),
    (lambda: ops.AddExtraInput()(X, torch.rand(2, 7)), ValueError, r"\[2, 7\]"),
    (lambda: ops.AddExtraInput()(X, torch.rand(8)), ValueError, r"\[8\]"),
    (lambda: ops.AddExtraInput()(X), ValueError, r"1 extra input \(AddExtraInput\), got 0"),
    (lambda: ops.GELU()(X, X), ValueError, "0 extra inputs, got 1"),
    (lambda: ops.GELU()(X, gain=2), TypeError, "unexpected keyword argument 'gain'"),
    (lambda: ops.Linear(8, 4)(X, gain=2), TypeError, "unexpected keyword argument 'gain'"),
    (lambda: ops.GELU()("x"), TypeError, "input"),
    (lambda: ops.AddExtraInput()(X, None), TypeError, "extra input"),
    (lambda: ops.ScaledSReLU(activation_recompute_in_mlp=True)(X, torch.rand(2)), RuntimeError, "recompute_in_mlp"),
    *[(lambda name=name: getattr(ops, name)()(X[:, :7]), ValueError, f"{name}: .*7 columns") for name in GATED],
    *[(lambda name=name: getattr(ops, name)()(torch.tensor(1.0)), ValueError, name) for name in GATED],
    *[
        (lambda name=name: getattr(ops, name)()(X[:, :7], X[:, 0]), ValueError, f"{name}: .*7 columns")
        for name in SCALED_GLU
    ],
    *[
        (lambda name=name: getattr(ops, name)()(X, torch.rand(3)), ValueError, r"\[3\].*2 rows")
        for name in (*SCALED_GLU, "ScaledSReLU")
    ],
]


@pytest.mark.parametrize("run, error, fragment", REJECTED_AT_CALL, ids=lambda v: v if isinstance(v, str) else "")
def test_invalid_calls_report_given_and_expected(run, error, fragment):
    with pytest.raises(error, match=fragment):
        run()


def test_scales_may_have_any_shape_with_one_value_per_row():
    x, scales = values((2, 3, 8), 0), values((2, 3), 1)
    expected = ops.ScaledSwiGLU()(x, scales)
    for shape in ((6,), (2, 3, 1), (3, 2)):
        given = scales.reshape(shape).requires_grad_()
        y = ops.ScaledSwiGLU()(x, given)
        assert torch.equal(y, expected)
        y.sum().backward()
        assert given.grad.shape == shape
        given = given.detach()


def test_set_field_takes_effect_at_next_call():
    op = ops.ConstantScale(2.0)
    x = torch.ones(3)
    assert op.scale == 2.0
    assert torch.equal(op(x), 2 * x)
    op.scale = -1.5
    assert op.scale == -1.5
    assert torch.equal(op(x), -1.5 * x)
