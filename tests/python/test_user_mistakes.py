# ruff: noqa: E501  (one row per line)
"""What users get wrong, with the message each mistake gets.

Each row is (id, call, exception, pattern). The id is "who: mistake". Every message names who, contains what was given
and what is expected or the cure, ends with a period, and shows no C++ frames.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import warnings
from unittest import mock

import numpy
import pytest
import torch

import torchweft
from torchweft import fusion, ops
from torchweft.convert import __main__ as convert_command

X = torch.rand(4, 8)
SPLITS = torch.tensor([1, 3])
CLASSES = torch.arange(4)
CURE = re.compile(
    r"expected|Did you mean|Arguments:|It takes none|does not divide|not supported|Missing key|Unexpected key|"
    r"shape in current model|invalid choice|required|does not exist|must|Registered:|"
    r"\b(Call|Pass|Use|Set|Create|Put|Convert|Unpack|Give|Leave|Move|Choose|Specify|Subclass|Turn|Copy|Hint|Define|Remove)\b",
    re.IGNORECASE,
)


class BadIndex:
    def __index__(self) -> int:
        raise RuntimeError("no index today")


class Unfinished(ops.BasicOperation):
    pass


class TwoOutputs(ops.BasicOperation):
    num_extra_outputs = 1

    def op_forward(self, ctx, input_, **unused):
        return input_


class ReturnsList(ops.BasicOperation):
    def op_forward(self, ctx, input_, **unused):
        return [input_]


class ReturnsNone(ops.BasicOperation):
    def op_forward(self, ctx, input_, **unused):
        return None


def fork(channel):
    return ops.MakeExtraOutput().set_extra_output_channel(0, channel, output_to_caller=False)


def join(channel):
    return ops.AddExtraInput().set_extra_input_channel(0, channel)


def fork_and_wait():
    yield fork("residual")


def chain(*modules):
    return torchweft.Sequential(*modules)(X)


def third(op, *extra):
    """Calls a pipeline whose operation 2 is `op`."""
    return torchweft.Sequential(ops.Linear(8, 8), ops.GELU(), op)(X, *extra)


def attention():
    return ops.DotProductAttention(2, 4, qkv_layout="concatenated")


def grouped(x=X, splits=SPLITS, **options):
    return ops.GroupedLinear(2, 8, 4, **options)(x, splits)


def main_grad(value, **options):
    linear = ops.Linear(8, 4, accumulate_into_main_grad=True, **options)
    if value is not None:
        linear.weight.main_grad = value
    linear(X).sum().backward()
    if options:
        linear.backward_dw()


def adam(values, main_grad=None, **options):
    param = torch.nn.Parameter(values.clone())
    param.main_grad = main_grad
    return torchweft.optim.FusedAdam([param], **options)


def load_adam(other, **options):
    param = torch.nn.Parameter(X.clone())
    param.grad = X.clone()
    optimizer = other([param], lr=0.1, **options)
    optimizer.step()
    adam(X).load_state_dict(optimizer.state_dict())


def scaled_main_grad():
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(X)
    scaler.step(adam(X, main_grad=X))


def backward_twice():
    y = third(ops.Linear(8, 2)).sum()
    y.backward()
    y.backward()


def changed_in_place():
    x = X.clone().requires_grad_()
    y = torchweft.Sequential(ops.GELU())(x * 1)
    saved = x * 2
    z = torchweft.Sequential(ops.GELU())(saved)
    with torch.no_grad():
        saved.add_(1)
    (y.sum() + z.sum()).backward()


def double_backward():
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(ops.GELU()(x).sum(), x, create_graph=True)
    grad.sum().backward()


def delayed_input_changed():
    linear, x = ops.Linear(8, 4, delay_wgrad_compute=True), X.clone()
    linear(x).sum().backward()
    x.add_(1)
    linear.backward_dw()


def set_weight(value):
    linear = ops.Linear(8, 4)
    linear.weight = value if value is None else torch.nn.Parameter(value, requires_grad=False)
    return torchweft.Sequential(linear)(X)


def load(**changes):
    state = {"weight": torch.rand(4, 8), "bias": torch.rand(4)} | changes
    ops.Linear(8, 4).load_state_dict({key: value for key, value in state.items() if value is not None})


def load_state(state):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.Linear(8, 4).load_state_dict(ops.Linear(8, 4).state_dict() | {"_extra_state": state})


def ddp_warning():
    module = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    torch.nn.Module.__init__(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.module = ops.Linear(8, 4, accumulate_into_main_grad=True)


def layout_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.DotProductAttention(2, 4, qkv_format="bshd")


def command(*arguments):
    """Runs `python -m torchweft.convert`; raises SystemExit with what it prints."""
    printed = io.StringIO()
    try:
        with mock.patch.object(sys, "argv", ["convert", *arguments]), mock.patch.object(sys, "stderr", printed):
            with mock.patch.object(sys, "stdout", io.TextIOWrapper(io.BytesIO())):
                convert_command.main()
    except SystemExit as exit:
        raise SystemExit(exit.code if isinstance(exit.code, str) else printed.getvalue()) from None


def convert_hugging_face():
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"model.layers.0.self_attn.q_proj.weight": X}, f"{folder}/hf.pt")
        command(f"{folder}/hf.pt", f"{folder}/out", "--to", "torch_dist")


def environment(name, value, code="torchweft.ops.Linear(8, 8)(torch.ones(2, 8)); torchweft.packing_limit()"):
    """Runs `code` in a process with the variable set; raises RuntimeError with the last line it prints."""
    env = os.environ | {name: value, "PYTHONPATH": os.path.dirname(os.path.dirname(torchweft.__file__))}
    run = subprocess.run([sys.executable, "-c", f"import torch, torchweft; {code}"], env=env, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(run.stderr.strip().splitlines()[-1])


def compiled(module, x=X):
    torch.compiler.reset()
    return torch.compile(module, backend="eager", fullgraph=True)(x)


CONSTRUCTORS = [
    ("Linear: misspelled bias", lambda: ops.Linear(8, 8, bais=True), TypeError, "'bais'.*Did you mean 'bias'"),
    ("Linear: missing size", lambda: ops.Linear(8), TypeError, "'out_features'"),
    ("Linear: no arguments", lambda: ops.Linear(), TypeError, "'in_features'"),
    ("Linear: positional bias", lambda: ops.Linear(8, 8, False), TypeError, "too many positional"),
    ("Linear: negative in", lambda: ops.Linear(-1, 8), ValueError, "in_features is -1, expected 0 or more"),
    ("Linear: negative out", lambda: ops.Linear(8, -2), ValueError, "out_features is -2"),
    ("Linear: float size", lambda: ops.Linear(8.0, 8), TypeError, r"in_features is 8\.0, expected an int"),
    ("Linear: numpy float size", lambda: ops.Linear(numpy.float32(8), 8), TypeError, "in_features is 8"),
    ("Linear: str size", lambda: ops.Linear("8", 8), TypeError, 'in_features is "8", expected an int'),
    ("Linear: bool size", lambda: ops.Linear(True, 8), TypeError, "in_features is true, expected an int"),
    ("Linear: None size", lambda: ops.Linear(None, 8), TypeError, "in_features is none, expected an int"),
    ("Linear: tuple size", lambda: ops.Linear((8,), 8), TypeError, r"in_features is \[8\], expected an int"),
    ("Linear: huge size", lambda: ops.Linear(2**70, 8), ValueError, "in_features is 1180591620717411303424"),
    ("Linear: failing __index__", lambda: ops.Linear(BadIndex(), 8), TypeError, "a BadIndex.*no index today"),
    ("Linear: tensor size", lambda: ops.Linear(torch.ones(2), 8), TypeError, "in_features is a Tensor, expected an int"),
    ("Linear: dict size", lambda: ops.Linear({"a": 1}, 8), TypeError, "in_features contains 'a', expected ints"),
    ("Linear: int32", lambda: ops.Linear(8, 8, dtype=torch.int32), ValueError, "dtype is int32, expected float32"),
    ("Linear: float8", lambda: ops.Linear(8, 8, dtype=torch.float8_e4m3fn), ValueError, "dtype is float8_e4m3fn"),
    ("Linear: complex", lambda: ops.Linear(8, 8, dtype=torch.complex64), ValueError, "dtype is complex64"),
    ("Linear: dtype name", lambda: ops.Linear(8, 8, dtype="flaot32"), ValueError, 'dtype is "flaot32", expected float32'),
    ("Linear: python float as dtype", lambda: ops.Linear(8, 8, dtype=float), TypeError, "dtype.*a type, expected"),
    ("Linear: number as dtype", lambda: ops.Linear(8, 8, dtype=32), TypeError, "dtype is 32, expected float32"),
    ("Linear: unknown device", lambda: ops.Linear(8, 8, device="gpu"), ValueError, "device is 'gpu', expected 'cpu'"),
    ("Linear: device is a number", lambda: ops.Linear(8, 8, device=1.5), ValueError, r"device is 1\.5"),
    ("Linear: mode", lambda: ops.Linear(8, 8, tensor_parallel_mode="colum"), ValueError, "'colum', expected None"),
    ("Linear: no group", lambda: ops.Linear(8, 8, tensor_parallel_mode="row"), ValueError, "init_process_group"),
    ("Linear: userbuffers", lambda: ops.Linear(8, 8, userbuffers_options="x"), TypeError, "'x', expected a dict"),
    ("Linear: overlap", lambda: ops.Linear(8, 8, overlap="yes"), TypeError, 'overlap is "yes", expected True or False or'),
    ("Linear: delay", lambda: ops.Linear(8, 8, delay_wgrad_compute=1), TypeError, "is 1, expected True or False"),
    ("Linear: bias assigned", lambda: setattr(ops.Linear(8, 8, bias=False), "bias", X), ValueError, "bias=False"),
    ("BasicLinear: misspelled", lambda: ops.BasicLinear(8, 8, dytpe=None), TypeError, "Did you mean 'dtype'"),
    ("BasicLinear: negative", lambda: ops.BasicLinear(8, -8), ValueError, "out_features is -8"),
    ("BasicLinear: both options",
     lambda: ops.BasicLinear(8, 8, delay_wgrad_compute=True, userbuffers_options={"comm_name": "fc1"}),
     NotImplementedError, "cannot be combined. Set only one"),
    ("Bias: missing", lambda: ops.Bias(), TypeError, "'size'"),
    ("Bias: negative", lambda: ops.Bias(-1), ValueError, "size is -1, expected 0 or more"),
    ("Bias: int64", lambda: ops.Bias(8, dtype=torch.int64), ValueError, "dtype is int64, expected float32"),
    ("Bias: no group", lambda: ops.Bias(8, tensor_parallel=True), ValueError, "init_process_group"),
    ("LayerNorm: misspelled", lambda: ops.LayerNorm(8, epsilon=1e-5), TypeError, "'epsilon'.*Arguments: normalized_shape"),
    ("LayerNorm: elementwise_affine", lambda: ops.LayerNorm(8, elementwise_affine=True), TypeError, "Arguments:"),
    ("LayerNorm: empty", lambda: ops.LayerNorm(()), ValueError, "normalized_shape is empty"),
    ("LayerNorm: float", lambda: ops.LayerNorm(8.0), TypeError, r"normalized_shape is 8\.0, expected an int or a seq"),
    ("LayerNorm: floats", lambda: ops.LayerNorm((8, 2.0)), TypeError, r"contains 2\.0, expected ints"),
    ("LayerNorm: eps", lambda: ops.LayerNorm(8, eps="1e-5"), TypeError, 'eps is "1e-5", expected a number'),
    ("RMSNorm: negative", lambda: ops.RMSNorm((2, -3)), ValueError, r"normalized_shape is \[2, -3\]"),
    ("RMSNorm: bool", lambda: ops.RMSNorm(8, dtype=torch.bool), ValueError, "dtype is bool"),
    ("RMSNorm: missing", lambda: ops.RMSNorm(), TypeError, "'normalized_shape'"),
    ("RMSNorm: device", lambda: ops.RMSNorm(8, device="cup"), ValueError, "device is 'cup'"),
    ("Dropout: p", lambda: ops.Dropout(1.5), ValueError, r"p is 1\.5, expected 0 to 1"),
    ("Dropout: str p", lambda: ops.Dropout("0.1"), TypeError, 'p is "0.1", expected a number'),
    ("Dropout: inplace", lambda: ops.Dropout(0.1, inplace=True), TypeError, "'inplace'"),
    ("GELU: positional", lambda: ops.GELU("tanh", False), TypeError, "too many positional"),
    ("GELU: approximate", lambda: ops.GELU(approximate="erf"), ValueError, "is \"erf\", expected one of tanh, none"),
    ("GELU: float64 saved in FP8", lambda: ops.GELU(cache_quantized_input=True)(X.double().requires_grad_()), TypeError, "input is float64, expected float32, float16 or bfloat16"),
    ("RMSNorm: eps", lambda: ops.RMSNorm(8, eps=-1), ValueError, "eps is -1, expected a finite number, 0 or more"),
    ("LayerNorm: eps is NaN", lambda: ops.LayerNorm(8, eps=float("nan")), ValueError, "eps is nan, expected a finite number"),
    ("Sequential: channel without a reader", lambda: chain(fork("residual"), ops.Linear(8, 8)), ValueError, r"Channel 'residual' has no reader: Sequential\[0\] MakeExtraOutput produces it with output_to_caller=false.*Read it with set_extra_input_channel"),
    ("Sequential: misspelt channel", lambda: chain(fork("residual"), ops.Linear(8, 8), fork("b"), join("b")), ValueError, "Channel 'residual' has no reader"),
    ("Linear: float64 input", lambda: ops.Linear(8, 4)(X.double()), TypeError, r"input is float64, the weight float32; expected a weight of float64. Convert the module with .double\(\), or the input"),
    ("RMSNorm: float64 input", lambda: ops.RMSNorm(8)(X.double()), TypeError, "RMSNorm: input is float64, the weight float32"),
    ("DotProductAttention: format", lambda: ops.DotProductAttention(4, 2, num_gqa_groups=1, qkv_layout="concatenated")(torch.rand(2, 3, 12)), ValueError, r"shape \[2, 3, 12\], which is more than one sequence, and qkv_format is not given. Pass qkv_format=.bshd"),
    ("DotProductAttention: assumed layout", layout_warning, UserWarning, "qkv_layout is not given; assuming 'group_interleaved'.*Pass it, or pass 'concatenated' for torch.cat"),
    ("RotaryEmbedding: no format", lambda: ops.RotaryEmbedding(4, 2)(torch.rand(2, 3, 8)), ValueError, "more than one sequence, and qkv_format is not given"),
    ("LayerNorm: bias of bias=False", lambda: setattr(ops.LayerNorm(8, bias=False), "bias", torch.nn.Parameter(torch.ones(8))), ValueError, "created with bias=False. Create it with bias=True"),
    ("Sequential: None", lambda: torchweft.Sequential(ops.GELU(), None), TypeError, "module '1' is None, expected a torch.nn.Module"),
    ("Sequential: modules keyword", lambda: torchweft.Sequential(modules=[ops.GELU()]), TypeError, r"'modules'.*Arguments: \*modules, fuse_nested"),
    ("ReLU: inplace", lambda: ops.ReLU(inplace=True), TypeError, "'inplace'"),
    ("SwiGLU: interleave", lambda: ops.SwiGLU(glu_interleave_size=0), ValueError, "glu_interleave_size is 0, expected"),
    ("SwiGLU: float interleave", lambda: ops.SwiGLU(glu_interleave_size=2.0), TypeError, r"is 2\.0, expected an int or None"),
    ("SiTUGLU: beta", lambda: ops.SiTUGLU(beta1=0.0), ValueError, "beta1 is 0, expected"),
    ("ConstantScale: str", lambda: ops.ConstantScale("two"), TypeError, 'scale is "two", expected a number'),
    ("ConstantScale: None", lambda: ops.ConstantScale(None), TypeError, "scale is none, expected a number"),
    ("DotProductAttention: missing", lambda: ops.DotProductAttention(4), TypeError, "'kv_channels'"),
    ("DotProductAttention: head_dim", lambda: ops.DotProductAttention(4, head_dim=8), TypeError, "'head_dim'.*Arguments:.*kv_channels"),
    ("DotProductAttention: heads", lambda: ops.DotProductAttention(0, 8), ValueError, "num_attention_heads is 0, expected 1 or more"),
    ("DotProductAttention: groups", lambda: ops.DotProductAttention(4, 8, num_gqa_groups=3), ValueError, "num_gqa_groups 3; expected a number of groups that divides"),
    ("DotProductAttention: mask", lambda: ops.DotProductAttention(4, 8, attn_mask_type="padding"), ValueError, "expected one of causal, no_mask, causal_bottom_right"),
    ("DotProductAttention: window", lambda: ops.DotProductAttention(4, 8, window_size=128), ValueError, r"window_size is \[128\], expected two numbers"),
    ("DotProductAttention: dropout", lambda: ops.DotProductAttention(4, 8, attention_dropout=-0.1), ValueError, "attention_dropout is -0.1, expected 0 to 1"),
    ("DotProductAttention: scale", lambda: ops.DotProductAttention(4, 8, softmax_scale="auto"), TypeError, 'softmax_scale is "auto", expected a number or None'),
    ("DotProductAttention: layout", lambda: ops.DotProductAttention(4, 8, qkv_layout="sbh3d"), ValueError, "expected one of group_interleaved, concatenated"),
    ("CrossDotProductAttention: qkv_layout", lambda: ops.CrossDotProductAttention(4, 8, qkv_layout="concatenated"), TypeError, "'qkv_layout'"),
    ("CrossDotProductAttention: mask", lambda: ops.CrossDotProductAttention(4, 8, attn_mask_type="arbitrary"), ValueError, "expected one of causal, no_mask"),
    ("RotaryEmbedding: missing", lambda: ops.RotaryEmbedding(4), TypeError, "'kv_channels'"),
    ("RotaryEmbedding: groups", lambda: ops.RotaryEmbedding(4, 8, num_gqa_groups=3), ValueError, "num_attention_heads is 4, num_gqa_groups 3; expected"),
    ("RotaryEmbedding: rotary_dim", lambda: ops.RotaryEmbedding(4, 8, rotary_dim=3), ValueError, "rotary_dim is 3, expected an even number from 2 to kv_channels, 8"),
    ("RotaryEmbedding: base", lambda: ops.RotaryEmbedding(4, 8, rotary_base=0.0), ValueError, "rotary_base is 0, expected a positive"),
    ("RotaryEmbedding: layout", lambda: ops.RotaryEmbedding(4, 8, qkv_layout="qkv"), ValueError, "expected one of group_interleaved, concatenated or None"),
    ("RotaryEmbedding: format", lambda: ops.RotaryEmbedding(4, 8, qkv_format="bhsd"), ValueError, "expected one of sbhd, bshd, thd"),
    ("RotaryEmbedding: base is a name", lambda: ops.RotaryEmbedding(4, 8, base=100.0), TypeError, "Arguments:.*rotary_base"),
    ("Reshape: two -1", lambda: ops.Reshape((-1, -1)), ValueError, r"\[-1, -1\], expected at most one -1"),
    ("Reshape: str", lambda: ops.Reshape("ab"), TypeError, 'shape is "ab", expected an int or a sequence'),
    ("GroupedLinear: no groups", lambda: ops.GroupedLinear(0, 8, 8), ValueError, "num_groups is 0, expected 1 or more"),
    ("GroupedLinear: zero size", lambda: ops.GroupedLinear(2, 0, 8), ValueError, "in_features is 0, expected 1 or more"),
    ("GroupedLinear: dtype", lambda: ops.GroupedLinear(2, 8, 8, dtype=torch.int8), ValueError, "dtype is int8"),
    ("GroupedLinear: misspelled", lambda: ops.GroupedLinear(2, 8, 8, num_group=3), TypeError, "Did you mean 'num_groups'"),
    ("GroupedLinear: changed", lambda: setattr(ops.GroupedLinear(2, 8, 8), "num_groups", 3), ValueError, "Create a new"),
    ("CrossEntropy: label_smoothing", lambda: ops.CrossEntropy(label_smoothing=1.5), ValueError, "label_smoothing is 1.5, expected 0 to 1"),
    ("CrossEntropy: z_loss", lambda: ops.CrossEntropy(z_loss=-1.0), ValueError, "z_loss is -1, expected a finite number, 0 or more"),
    ("CrossEntropy: reduction", lambda: ops.CrossEntropy(reduction="avg"), ValueError, 'reduction is "avg", expected one of mean, sum, none'),
    ("CrossEntropy: no reduction", lambda: ops.CrossEntropy(reduction=None), TypeError, "reduction is none, expected one of"),
    ("CrossEntropy: misspelled", lambda: ops.CrossEntropy(ignore_idx=0), TypeError, "Did you mean 'ignore_index'"),
    ("AddExtraInput: in_place", lambda: ops.AddExtraInput(in_place="yes"), TypeError, 'in_place is "yes", expected True'),
    ("AllReduce: group", lambda: ops.AllReduce(process_group=3), TypeError, "group is 3, expected a ProcessGroup"),
    ("ScaledSwiGLU: recompute", lambda: ops.ScaledSwiGLU(activation_recompute_in_mlp=True), ValueError, "Leave it false"),
    ("Linear: field set", lambda: setattr(ops.BasicLinear(8, 8), "in_features", "x"), TypeError, 'in_features is "x"'),
]  # fmt: skip

CALLS = [
    ("Linear: width", lambda: ops.Linear(6, 4)(X), ValueError, r"input has shape \[4, 8\], expected 6 features"),
    ("Linear: scalar", lambda: ops.Linear(1, 4)(torch.tensor(1.0)), ValueError, r"input has shape \[\], expected 1"),
    ("Linear: empty", lambda: ops.Linear(8, 4)(torch.empty(0)), ValueError, r"shape \[0\], expected 8"),
    ("Linear: int64", lambda: ops.Linear(8, 4)(torch.ones(2, 8, dtype=torch.int64)), TypeError, r"int64, expected float32.*\.float\(\)"),
    ("Linear: bool", lambda: ops.Linear(8, 4)(X > 0), TypeError, "input is bool, expected float32"),
    ("Linear: float8", lambda: ops.Linear(8, 4)(X.to(torch.float8_e4m3fn)), TypeError, "input is float8_e4m3fn"),
    ("Linear: complex", lambda: ops.Linear(8, 4)(X + 0j), TypeError, "complex64; expected float32"),
    ("Linear: list", lambda: ops.Linear(8, 4)([1.0] * 8), TypeError, "the input must be a torch.Tensor, got list"),
    ("Linear: None", lambda: ops.Linear(8, 4)(None), TypeError, "must be a torch.Tensor, got NoneType"),
    ("Linear: numpy", lambda: ops.Linear(8, 4)(X.numpy()), TypeError, "must be a torch.Tensor, got numpy.ndarray"),
    ("Linear: keyword", lambda: ops.Linear(8, 4)(X, gain=2), TypeError, "'gain'. It takes none"),
    ("Linear: extra input", lambda: ops.Linear(8, 4)(X, X), ValueError, "expected 0 extra inputs, got 1"),
    ("Linear: sparse", lambda: ops.Linear(8, 4)(X.to_sparse()), TypeError, "sparse tensor; expected a dense"),
    ("Linear: meta input", lambda: ops.Linear(8, 4)(X.to("meta")), ValueError, "on meta.*is on cpu; expected the same"),
    ("GELU: int32", lambda: ops.GELU()(X.int()), TypeError, "input is int32, expected float32"),
    ("GELU: str", lambda: ops.GELU()("x"), TypeError, "must be a torch.Tensor, got str"),
    ("SiLU: float8", lambda: ops.SiLU()(X.to(torch.float8_e5m2)), TypeError, "input is float8_e5m2"),
    ("Dropout: int64", lambda: ops.Dropout(0.5)(X.long()), TypeError, "input is int64"),
    ("L2Normalization: int64", lambda: ops.L2Normalization()(X.long()), TypeError, "input is int64"),
    ("L2Normalization: scalar", lambda: ops.L2Normalization()(torch.tensor(1.0)), ValueError, "scalar, expected at least 1"),
    ("Bias: width", lambda: ops.Bias(6)(X), ValueError, r"\[4, 8\], expected last dimension 6"),
    ("Bias: int64", lambda: ops.Bias(8)(X.long()), TypeError, "input is int64"),
    ("LayerNorm: width", lambda: ops.LayerNorm(6)(X), ValueError, r"\[4, 8\], normalized_shape is \[6\]"),
    ("RMSNorm: rank", lambda: ops.RMSNorm((3, 2, 8))(X), ValueError, r"\[3, 2, 8\]; expected the trailing"),
    ("RMSNorm: uint8", lambda: ops.RMSNorm(8)(X.to(torch.uint8)), TypeError, "input is uint8"),
    ("DotProductAttention: width", lambda: ops.DotProductAttention(4, 2, num_gqa_groups=1)(X), ValueError, r"\[4, 8\], expected last dimension 12 = .*num_attention_heads 4, num_gqa_groups 1 and kv_channels 2"),
    ("DotProductAttention: separate q, k, v", lambda: ops.DotProductAttention(4, 2)(X, X, X), ValueError, "expected 0 extra inputs, got 2"),
    ("DotProductAttention: int64", lambda: ops.DotProductAttention(2, 2, num_gqa_groups=1)(X.long()), TypeError, "input is int64"),
    ("DotProductAttention: no offsets", lambda: ops.DotProductAttention(2, 2, num_gqa_groups=1, qkv_format="thd")(X), ValueError, "expected 1 extra input.*got 0"),
    ("DotProductAttention: float offsets", lambda: ops.DotProductAttention(2, 2, num_gqa_groups=1, qkv_format="thd")(X, X[0]), TypeError, "cu_seqlens is float32, expected int32 or int64"),
    ("DotProductAttention: offsets end early", lambda: ops.DotProductAttention(2, 2, num_gqa_groups=1, qkv_format="thd")(X, torch.tensor([0, 3])), ValueError, "cu_seqlens ends with 3, expected 4, the number of rows"),
    ("CrossDotProductAttention: width", lambda: ops.CrossDotProductAttention(4, 3)(X, X, X), ValueError, r"input has shape \[4, 8\], expected last dimension 12 = .*num_attention_heads 4 and kv_channels 3"),
    ("CrossDotProductAttention: width of keys", lambda: ops.CrossDotProductAttention(4, 2, num_gqa_groups=2)(X, X, X), ValueError, r"key has shape \[4, 8\], expected last dimension 4 = .*num_gqa_groups 2 and kv_channels 2"),
    ("CrossDotProductAttention: length of values", lambda: ops.CrossDotProductAttention(4, 2)(X, X, X[:3]), ValueError, r"value has shape \[3, 8\], expected that of the key, \[4, 8\]"),
    ("CrossDotProductAttention: no keys", lambda: ops.CrossDotProductAttention(4, 2)(X), ValueError, "expected 2 extra inputs.*got 0"),
    ("CrossDotProductAttention: batch", lambda: ops.CrossDotProductAttention(2, 4, qkv_format="sbhd")(X[:, None], torch.rand(5, 2, 8), torch.rand(5, 2, 8)), ValueError, "expected 1 sequences in all, got 2"),
    ("CrossDotProductAttention: int64 keys", lambda: ops.CrossDotProductAttention(2, 4)(X, X.long(), X), TypeError, "extra input 0 is int64"),
    ("CrossDotProductAttention: sequences", lambda: ops.CrossDotProductAttention(2, 4, qkv_format="thd")(X, X, X, torch.tensor([0, 4]), torch.tensor([0, 1, 4])), ValueError, "cu_seqlens_q has 1 sequences, cu_seqlens_kv 2; expected the same"),
    ("CrossDotProductAttention: offsets", lambda: ops.CrossDotProductAttention(2, 4, qkv_format="thd")(X, X, X, torch.tensor([0, 4]), torch.tensor([0, 3])), ValueError, "cu_seqlens_kv ends with 3, expected 4"),
    ("RotaryEmbedding: width", lambda: ops.RotaryEmbedding(4, 2, num_gqa_groups=1, qkv_layout="concatenated")(X), ValueError, r"\[4, 8\], expected last dimension 12 = .*num_attention_heads 4, num_gqa_groups 1 and kv_channels 2"),
    ("RotaryEmbedding: layout of packed heads", lambda: ops.RotaryEmbedding(2, 2)(torch.rand(4, 12)), ValueError, r"\[4, 12\], expected last dimension 4 = num_attention_heads·kv_channels.*set qkv_layout for packed queries, keys and values"),
    ("RotaryEmbedding: width of queries", lambda: ops.RotaryEmbedding(3, 2, qkv_layout=None)(X), ValueError, "expected last dimension 6 = num_attention_heads·kv_channels"),
    ("RotaryEmbedding: scalar", lambda: ops.RotaryEmbedding(4, 2)(torch.tensor(1.0)), ValueError, r"input has shape \[\], expected"),
    ("RotaryEmbedding: int64", lambda: ops.RotaryEmbedding(4, 2, qkv_layout=None)(X.long()), TypeError, "input is int64"),
    ("RotaryEmbedding: no tables", lambda: ops.RotaryEmbedding(4, 2, qkv_layout=None, rotary_base=None)(X), ValueError, "expected 2 extra inputs.*got 0"),
    ("RotaryEmbedding: short tables", lambda: ops.RotaryEmbedding(4, 2, qkv_layout=None, rotary_base=None)(X, X[:3, :1], X[:3, :1]), ValueError, r"cos has shape \[3, 1\], expected \[4 or more, 1\]"),
    ("RotaryEmbedding: full tables", lambda: ops.RotaryEmbedding(4, 2, qkv_layout=None, rotary_base=None)(X, X[:, :1], X[:, :2]), ValueError, r"sin has shape \[4, 2\], expected \[4 or more, 1\]"),
    ("RotaryEmbedding: float offsets", lambda: ops.RotaryEmbedding(4, 2, qkv_layout=None, qkv_format="thd")(X, torch.tensor([0.0, 4.0])), TypeError, "cu_seqlens is float32, expected int32 or int64"),
    ("RotaryEmbedding: lengths for offsets", lambda: ops.RotaryEmbedding(4, 2, qkv_layout=None, qkv_format="thd")(X, torch.tensor([2, 2])), ValueError, "cu_seqlens starts with 2, expected 0"),
    ("Reshape: count", lambda: ops.Reshape((3, -1))(X), ValueError, r"cannot reshape input of shape \[4, 8\] to \[3, -1\]"),
    ("SwiGLU: odd", lambda: ops.SwiGLU()(X[:, :7]), ValueError, "7 columns, expected an even number"),
    ("SwiGLU: interleave", lambda: ops.SwiGLU(glu_interleave_size=3)(X), ValueError, "expected a multiple of glu_interleave_size 3"),
    ("GEGLU: scalar", lambda: ops.GEGLU()(torch.tensor(1.0)), ValueError, "scalar, expected at least 1"),
    ("AddExtraInput: none", lambda: ops.AddExtraInput()(X), ValueError, "1 extra input.*got 0"),
    ("AddExtraInput: two", lambda: ops.AddExtraInput()(X, X, X), ValueError, "1 extra input.*got 2"),
    ("AddExtraInput: None", lambda: ops.AddExtraInput()(X, None), TypeError, "extra input must be a torch.Tensor, got NoneType"),
    ("AddExtraInput: shape", lambda: ops.AddExtraInput()(X, X[0]), ValueError, r"\[8\]; expected equal shapes"),
    ("AddExtraInput: int64", lambda: ops.AddExtraInput()(X, X.long()), TypeError, "extra input 0 is int64"),
    ("ScaledSwiGLU: scales", lambda: ops.ScaledSwiGLU()(X, torch.rand(3)), ValueError, r"\[3\].*expected one value per row"),
    ("ScaledSwiGLU: int scales", lambda: ops.ScaledSwiGLU()(X, SPLITS), TypeError, "extra input 0 is int64"),
    ("ScaledSReLU: recompute", lambda: ops.ScaledSReLU(activation_recompute_in_mlp=True)(X, X[:, 0]), RuntimeError, "Set it to false"),
    ("CrossEntropy: no targets", lambda: ops.CrossEntropy()(X), ValueError, "1 extra input.*got 0"),
    ("CrossEntropy: int64 logits", lambda: ops.CrossEntropy()(X.long(), CLASSES), TypeError, "input is int64"),
    ("CrossEntropy: float targets", lambda: ops.CrossEntropy()(X, CLASSES.float()), TypeError, r"float32, expected class indices.*targets\.long\(\)"),
    ("CrossEntropy: bool targets", lambda: ops.CrossEntropy()(X, CLASSES > 1), TypeError, "bool, expected class indices"),
    ("CrossEntropy: probabilities", lambda: ops.CrossEntropy()(X, X), TypeError, r"argmax\(-1\); class probabilities are not supported"),
    ("CrossEntropy: one-hot", lambda: ops.CrossEntropy()(X, X.long()), ValueError, r"\[4, 8\]; expected targets of shape \[4\].*argmax\(-1\)"),
    ("CrossEntropy: shape", lambda: ops.CrossEntropy()(X, CLASSES[:3]), ValueError, r"targets have shape \[3\].*\[4, 8\]; expected.*\[4\]"),
    ("CrossEntropy: flat targets", lambda: ops.CrossEntropy()(X[None], CLASSES), ValueError, r"expected targets of shape \[1, 4\]"),
    ("CrossEntropy: no classes", lambda: ops.CrossEntropy()(X[:, :0], CLASSES), ValueError, "at least 1 class"),
    ("CrossEntropy: scalar", lambda: ops.CrossEntropy()(X[0, 0], CLASSES[0]), ValueError, "scalar, expected logits"),
    ("CrossEntropy: class out of range", lambda: ops.CrossEntropy()(X, CLASSES + 5), IndexError, r"target 8 of row 3 is out of range; expected 0 to 7, or -100 \(ignore_index\)"),
    ("CrossEntropy: negative class", lambda: ops.CrossEntropy()(X, CLASSES - 1), IndexError, "target -1 of row 0"),
    ("CrossEntropy: int32 out of range", lambda: ops.CrossEntropy()(X, CLASSES.int() + 8), IndexError, "target 8 of row 0"),
    ("GroupedLinear: float splits", lambda: grouped(splits=torch.tensor([1.0, 3.0])), TypeError, "split sizes are float32, expected int"),
    ("GroupedLinear: split count", lambda: grouped(splits=torch.tensor([4])), ValueError, "expected 2 split sizes.*got 1"),
    ("GroupedLinear: negative split", lambda: grouped(splits=torch.tensor([3, -1])), ValueError, "-1"),
    ("GroupedLinear: too many rows", lambda: grouped(splits=torch.tensor([1, 9])), ValueError, "input has 4"),
    ("GroupedLinear: no splits", lambda: ops.GroupedLinear(2, 8, 4)(X), ValueError, "1 extra input.*got 0"),
    ("GroupedLinear: width", lambda: grouped(x=torch.rand(4, 7)), ValueError, r"\[4, 7\], expected 8 features"),
    ("GroupedLinear: buffer", lambda: ops.GroupedLinear(2, 8, 4)(X, SPLITS, output=torch.rand(3, 4)), ValueError, r"\[3, 4\].*expected float32 of shape \[4, 4\]"),
    ("GroupedLinear: buffer keyword", lambda: ops.GroupedLinear(2, 8, 4)(X, SPLITS, outputs=X), TypeError, "Did you mean 'output'"),
]  # fmt: skip

PIPELINES = [
    ("Sequential[2] Linear: width", lambda: third(ops.Linear(7, 4)), ValueError, r"input has shape \[4, 8\], expected 7"),
    ("Sequential[0] Linear: width in a fusion", lambda: torchweft.Sequential(ops.Linear(7, 8), ops.GELU())(X), ValueError, "expected 7"),
    ("Sequential[1] Linear: width after a norm", lambda: chain(ops.RMSNorm(8), ops.Linear(7, 8)), ValueError, "expected 7"),
    ("Sequential[0] RMSNorm: width before a linear", lambda: chain(ops.RMSNorm(7), ops.Linear(7, 8)), ValueError, r"normalized_shape is \[7\]"),
    ("Sequential[2] Bias: width", lambda: third(ops.Bias(3)), ValueError, "expected last dimension 3"),
    ("Sequential[2] RMSNorm: width", lambda: third(ops.RMSNorm(3)), ValueError, r"normalized_shape is \[3\]"),
    ("Sequential[2] AddExtraInput: shape", lambda: third(ops.AddExtraInput(), X[:, :3]), ValueError, r"\[4, 3\]; expected equal"),
    ("Sequential[2] AddExtraInput: none", lambda: third(ops.AddExtraInput()), ValueError, "1 extra input.*got 0"),
    ("Sequential[2] AddExtraInput: dtype", lambda: third(ops.AddExtraInput(), X.long()), TypeError, "extra input 0 is int64"),
    ("Sequential[2] ReGLU: odd", lambda: chain(ops.GELU(), ops.Linear(8, 7), ops.ReGLU()), ValueError, "7 columns"),
    ("Sequential[1][0] Linear: nested", lambda: torchweft.Sequential(ops.GELU(), torchweft.Sequential(ops.Linear(7, 8)), fuse_nested=True)(X), ValueError, "expected 7"),
    ("Sequential[1] Linear: after a torch module", lambda: chain(torch.nn.Tanh(), ops.Linear(7, 8)), ValueError, "expected 7"),
    ("Sequential[0] Linear: int64", lambda: torchweft.Sequential(ops.Linear(8, 8), ops.GELU())(X.long()), TypeError, "input is int64"),
    ("Sequential[1] GELU: int64 passes Identity", lambda: torchweft.Sequential(ops.Identity(), ops.GELU())(X.long()), TypeError, "input is int64"),
    ("Sequential[0] Linear: weight device", lambda: torchweft.Sequential(ops.Linear(8, 8), ops.GELU())(X.to("meta")), ValueError, "Move one"),
    ("Sequential[0] Linear: list", lambda: torchweft.Sequential(ops.Linear(8, 8), ops.GELU())([1]), TypeError, "got list"),
    ("Sequential: class", lambda: torchweft.Sequential(ops.GELU), TypeError, "Create an instance"),
    ("Sequential: list of modules", lambda: torchweft.Sequential([ops.GELU(), ops.SiLU()]), TypeError, "Unpack the list"),
    ("Sequential: function", lambda: torchweft.Sequential(torch.relu), TypeError, "expected a torch.nn.Module"),
    ("Sequential: append text", lambda: torchweft.Sequential().append("GELU"), TypeError, "'GELU', expected a torch.nn.Module"),
    ("Sequential: keyword", lambda: torchweft.Sequential(ops.GELU(), fuse_nestd=True), TypeError, "Did you mean 'fuse_nested'"),
    ("Sequential: index", lambda: torchweft.Sequential(ops.GELU())[3], IndexError, "index 3 is out of range, expected"),
    ("Sequential: name as index", lambda: torchweft.Sequential(ops.GELU())["gelu"], TypeError, "'gelu', expected an int"),
    ("Sequential: extra inputs", lambda: torchweft.Sequential(ops.GELU(), torch.nn.Tanh())(X, X), ValueError, "expected 0 extra inputs, got 1"),
    ("Sequential: op_kwargs index", lambda: torchweft.Sequential(ops.GELU())(X, op_kwargs={4: {}}), IndexError, "index 4"),
    ("Sequential: op_kwargs key", lambda: torchweft.Sequential(ops.GELU())(X, op_kwargs={"gelu": {}}), ValueError, "'gelu', expected an index"),
    ("Sequential: op_kwargs of torch", lambda: torchweft.Sequential(torch.nn.Tanh())(X, op_kwargs={0: {}}), ValueError, "Tanh, which is not a weft operation"),
    ("Sequential[1] AddExtraInput: unknown channel", lambda: chain(fork("residual"), join("residul")), ValueError, "'residul' has no producer.*Did you mean 'residual'"),
    ("Sequential[0] AddExtraInput: no channel", lambda: chain(join("r")), ValueError, "'r' has no producer.*Produced: none"),
    ("AddExtraInput: consumer first", lambda: chain(join("r"), fork("r")), ValueError, "no earlier producer.*Put the producer first"),
    ("Sequential[1] MakeExtraOutput: two producers", lambda: chain(fork("r"), fork("r")), ValueError, "'r' has multiple producers.*Give each"),
    ("MakeExtraOutput: order of arguments", lambda: ops.MakeExtraOutput().set_extra_output_channel("r", 0), TypeError, "'r', expected an int.*index comes first"),
    ("AddExtraInput: order of arguments", lambda: ops.AddExtraInput().set_extra_input_channel("r", 0), TypeError, "'r', expected an int"),
    ("AddExtraInput: index", lambda: ops.AddExtraInput().set_extra_input_channel(1, "r"), IndexError, "extra input 1.*expected"),
    ("GELU: no extra outputs", lambda: ops.GELU().set_extra_output_channel(0, "r"), IndexError, "extra output 0.*expected"),
    ("AddExtraInput: empty name", lambda: ops.AddExtraInput().set_extra_input_channel(0, ""), ValueError, "'', expected a non-empty"),
    ("MakeExtraOutput: to caller", lambda: ops.MakeExtraOutput().set_extra_output_channel(0, "r", output_to_caller=1), TypeError, "must be a bool, got int"),
    ("DotProductAttention: mask", lambda: attention()(X.expand(2, 4, 8).repeat(1, 1, 3), X > 0), ValueError, "expected 0 extra inputs, got 1.*takes no mask: set attn_mask_type or window_size"),
    ("Sequential[1] DotProductAttention: mask", lambda: torchweft.Sequential(ops.Linear(8, 24), attention())(X.expand(2, 4, 8), X > 0), ValueError, "expected 0 extra inputs, got 1.*takes no mask: set attn_mask_type"),
    ("Linear: in torch.nn.Sequential after an extra output", lambda: torch.nn.Sequential(fork("r"), ops.Linear(8, 8), join("r"))(X), TypeError, r"got a tuple of 2.*Put them .* into one torchweft\.Sequential, not torch\.nn\.Sequential"),
    ("AddExtraInput: in torch.nn.Sequential", lambda: torch.nn.Sequential(ops.Linear(8, 8), join("r"))(X), ValueError, r"expected 1 extra input \(AddExtraInput\), got 0.*'r' connects operations of one torchweft\.Sequential"),
    ("Sequential[1] AddExtraInput: no producer", lambda: chain(ops.Linear(8, 8), join("residual")), ValueError, "'residual' has no producer; extra input 0.*reads it.*Set one with set_extra_output_channel"),
    ("Sequential[0] MakeExtraOutput: reader without its channel", lambda: chain(fork("r"), ops.AddExtraInput()), ValueError, r"Channel 'r' has no reader: Sequential\[0\] MakeExtraOutput.*Read it with set_extra_input_channel"),
    ("Sequential[1] AddExtraInput: no channel", lambda: chain(ops.GELU(), ops.AddExtraInput()), ValueError, r"expected 1 extra input \(Sequential\[1\] AddExtraInput\), got 0. Pass extra inputs after the input"),
    ("torchweft.ops: Embedding", lambda: ops.Embedding(8, 8), AttributeError, r"no operation 'Embedding'. Use torch\.nn\.Embedding"),
    ("torchweft.ops: misspelled", lambda: ops.Linaer(8, 8), AttributeError, "no operation 'Linaer'. Did you mean 'Linear'"),
    ("Linear: explain width", lambda: torchweft.explain(ops.Linear(7, 8), X), ValueError, "expected 7"),
    ("Sequential[2] Linear: explain width", lambda: torchweft.Sequential(ops.GELU(), ops.SiLU(), ops.Linear(7, 8)).explain(X), ValueError, "expected 7"),
    ("explain: no inputs", lambda: torchweft.explain(ops.GELU()), TypeError, r"expected the inputs.*explain\(module, x\)"),
    ("explain: torch module", lambda: torchweft.explain(torch.nn.Linear(8, 8), X), TypeError, r"got torch\.nn\.Linear, expected a weft operation.*Use torchweft\.ops\.Linear instead.*from_torch_nn\.md"),
    ("explain: other torch module", lambda: torchweft.explain(torch.nn.Embedding(8, 8), X), TypeError, r"got torch\.nn\.Embedding.*Use operations of torchweft\.ops"),
    ("explain: class", lambda: torchweft.explain(ops.Linear, X), TypeError, r"got the class Linear.*Create an instance: Linear\(\.\.\.\)"),
    ("explain: function", lambda: torchweft.explain(torch.relu, X), TypeError, "expected a weft operation"),
    ("Explanation.save: suffix", lambda: torchweft.explain(ops.GELU(), X).save("x.badsuffix"), ValueError, r"'.badsuffix', expected one of .svg"),
    ("Explanation.save: folder", lambda: torchweft.explain(ops.GELU(), X).save("no/such/x.dot"), FileNotFoundError, "no folder 'no/such'"),
    ("autocast: dtype", lambda: torchweft.autocast(torch.bfloat16), TypeError, r"enabled is torch.bfloat16, expected True or False.*use torch\.autocast"),
    ("autocast: device", lambda: torchweft.autocast("cpu", torch.bfloat16), TypeError, r"enabled is 'cpu', expected True or False.*use torch\.autocast"),
    ("autocast: recipe as enabled", lambda: torchweft.autocast(torchweft.recipe.MXFP8BlockScaling()), TypeError, "expected True or False.*Pass a recipe by name"),
    ("autocast: no recipe", lambda: torchweft.autocast(), TypeError, r"recipe is None, expected a recipe of torchweft.recipe. Pass one"),
    ("autocast: text as recipe", lambda: torchweft.autocast(recipe="mxfp8"), TypeError, "recipe is 'mxfp8', expected a recipe"),
    ("autocast: decorates a generator", lambda: torchweft.autocast(recipe=torchweft.recipe.MXFP8BlockScaling())(fork_and_wait), TypeError, "fork_and_wait.*expected a function.*Open the region inside"),
    ("operation: text", lambda: torch.ops.weft.pipeline_forward([X], 'GELUU() @call(autocast=none, eval=0, tensors="cpu:float32:c")'), ValueError, "'GELUU'. Did you mean 'GELU'"),
    ("GELU: field in text", lambda: torch.ops.weft.pipeline_forward([X], 'GELU(cache=1) @call(autocast=none, eval=0, tensors="cpu:float32:c")'), TypeError, "'cache'"),
    ("Pipeline text: no call", lambda: torch.ops.weft.pipeline_forward([X], "GELU()"), ValueError, "expected '@call"),
    ("operation 1 (Bias): in text", lambda: torch.ops.weft.pipeline_forward([X, torch.rand(3)], 'GELU(); Bias(size=3) @call(autocast=none, eval=0, tensors="cpu:float32:c cpu:float32:c")'), ValueError, "expected last dimension 3"),
]  # fmt: skip

TRAINING = [
    ("backward: twice", backward_twice, RuntimeError, "Specify retain_graph=True"),
    ("inplace operation: saved tensor", changed_in_place, RuntimeError, "modified by an inplace operation"),
    ("pipeline: second derivative", double_backward, RuntimeError, "differentiating twice.*Use torch operations"),
    ("Linear: weight size", lambda: set_weight(torch.rand(4, 7)), ValueError, r"'weight'.*\[4, 7\], expected \[4, 8\].*create a new"),
    ("Linear: int weight", lambda: set_weight(torch.ones(4, 8, dtype=torch.int64)), TypeError, "int64; expected float32"),
    ("Linear: float8 weight", lambda: set_weight(torch.ones(4, 8).to(torch.float8_e4m3fn)), TypeError, "float8_e4m3fn; expected"),
    ("Linear: weight removed", lambda: set_weight(None), TypeError, "'weight' of Linear is None, expected a tensor. Set it"),
    ("Linear: no main_grad", lambda: main_grad(None), RuntimeError, "no main_grad. Set weight.main_grad"),
    ("Linear: main_grad shape", lambda: main_grad(torch.zeros(4, 7)), RuntimeError, r"\[4, 7\].*\[4, 8\]; expected"),
    ("Linear: main_grad integer", lambda: main_grad(torch.zeros(4, 8, dtype=torch.int32)), RuntimeError, "int32.*expected float32"),
    ("Linear: main_grad float8", lambda: main_grad(torch.zeros(4, 8).to(torch.float8_e4m3fn)), RuntimeError, "float8_e4m3fn.*expected float32"),
    ("Linear: main_grad strides", lambda: main_grad(torch.zeros(8, 4).t()), RuntimeError, "expected a contiguous"),
    ("Linear: main_grad delayed", lambda: main_grad(torch.zeros(4, 7), delay_wgrad_compute=True), RuntimeError, r"\[4, 7\]"),
    ("BasicLinear: delayed input changed", delayed_input_changed, RuntimeError, r"modified in place.*Call backward_dw\(\) before"),
    ("DistributedDataParallel: main_grad", ddp_warning, torchweft.MainGradNotReducedWarning, "go to main_grad.*Turn the option off"),
    ("Linear: bias assigned late", lambda: setattr(ops.Linear(8, 4, bias=False), "bias", torch.nn.Parameter(X)), ValueError, "Create it with bias=True"),
    ("GELU: torch.func.grad", lambda: torch.func.grad(lambda x: ops.GELU()(x).sum())(X), NotImplementedError, "function transforms|torch.func"),
    ("GELU: vmap", lambda: torch.vmap(ops.GELU())(X), NotImplementedError, "function transforms|torch.func"),
    ("torch.jit.trace: GELU", lambda: torch.jit.trace(ops.GELU(), X), NotImplementedError, "Use torch.export"),
    ("Linear: state missing key", lambda: load(weight=None), RuntimeError, 'Missing key.*"weight"'),
    ("Linear: state unexpected key", lambda: load(wieght=X), RuntimeError, 'Unexpected key.*"wieght"'),
    ("Linear: state size", lambda: load(weight=torch.rand(4, 7)), RuntimeError, r"size mismatch for weight.*\[4, 7\]"),
    ("_extra_state: in bfloat16", lambda: load_state(torch.ones(21).bfloat16()), UserWarning, "^_extra_state is ignored.*21 values of bfloat16, expected"),
    ("_extra_state: on meta", lambda: load_state(torch.ones(21, device="meta")), UserWarning, "on the meta device.*expected a tensor with values"),
    ("_extra_state: scale of 0", lambda: load_state(torch.tensor([7766561.0, 1, 0, *[1] * 5])), ValueError, "has a scale of 0, expected a finite number.*remove the key"),
    ("_extra_state: length", lambda: load_state(torch.tensor([7766561.0, 3, 1, 1])), ValueError, "4 values.*history of 3. Load a checkpoint of the same"),
    ("Linear: state of the query", lambda: ops.Linear(8, 24).load_state_dict({"weight": torch.rand(8, 8), "bias": torch.rand(24)}), RuntimeError, r"size mismatch for weight.*\[8, 8\].*\[24, 8\].*one by one, concatenate them: torch\.cat\(\[q, k, v\]\).*qkv_layout='concatenated'"),
    ("layout_of: mode name", lambda: torchweft.checkpoint.layout_of(torchweft.Sequential(ops.Linear(8, 8)), {"up": "column"}), ValueError, "contain up"),
    ("weight: split", lambda: torchweft.checkpoint.split({"weight": torch.rand(3, 8)}, {"weight": torchweft.checkpoint.Placement(0)}, 2), ValueError, r"\(3, 8\).*2 ranks"),
    ("prepack: not a module", lambda: torchweft.prepack(X), TypeError, "got Tensor, expected a torch.nn.Module"),
    ("set_packing_limit: text", lambda: torchweft.set_packing_limit("1GB"), ValueError, "'1GB', expected a number of bytes"),
    ("set_packing_limit: negative", lambda: torchweft.set_packing_limit(-1), ValueError, "-1, expected"),
    ("GLU interleaving: size", lambda: torchweft.interleave_glu(X, 3), ValueError, r"size 3.*\(4, 8\), expected"),
    ("RNGStatesTracker: unknown", lambda: torchweft.RNGStatesTracker().fork("rng").__enter__(), KeyError, r"'rng'. Call add\(\) first"),
    ("initialize_ub: shape", lambda: torchweft.initialize_ub([8], 1), ValueError, r"\[8\], expected \[tokens"),
    ("initialize_ub: ranks", lambda: torchweft.initialize_ub([8, 8], 0), ValueError, "tp_size is 0, expected 1"),
    ("initialize_ub: collective", lambda: torchweft.initialize_ub([8, 8], 1, ub_cfgs={"qkv_fpro": {}}), ValueError, "Did you mean 'qkv_fprop'"),
    ("initialize_ub: method", lambda: torchweft.initialize_ub([8, 8], 1, ub_cfgs={"qkv_fprop": {"method": "bulk"}}), ValueError, "'bulk', expected ring"),
    ("initialize_ub: FP8", lambda: torchweft.initialize_ub([8, 8], 1, use_fp8=True), NotImplementedError, "not supported"),
]  # fmt: skip

OTHERS = [
    ("fusion rule: misspelled", lambda: fusion.without_rules("linear_bais").__enter__(), ValueError, "Did you mean 'linear_bias'"),
    ("fusion rule: with_rules", lambda: fusion.with_rules("mlp_bloc").__enter__(), ValueError, "Did you mean 'mlp_block'"),
    ("fusion rule: number", lambda: fusion.without_rules(3).__enter__(), ValueError, "Unknown fusion rule 3. Registered"),
    ("register_forward_fusion: not a function", lambda: fusion.register_forward_fusion("fuse"), TypeError, "'fuse', expected a function"),
    ("register_backward_fusion: None", lambda: fusion.register_backward_fusion(None), TypeError, "None, expected a function"),
    ("Bad.op_forward: of a native operation", lambda: type("Bad", (ops.GELU,), {"op_forward": None}), TypeError, "Subclass torchweft.ops.BasicOperation"),
    ("Unfinished: no forward", lambda: Unfinished()(X), NotImplementedError, "does not implement op_forward"),
    ("TwoOutputs: no fuser_forward", lambda: TwoOutputs()(X), RuntimeError, "must implement fuser_forward"),
    ("operation written in Python: returns a list", lambda: ReturnsList()(X), TypeError, "list, expected a tensor"),
    ("ReturnsNone: returns None", lambda: ReturnsNone()(X), TypeError, "None, expected a tensor"),
    ("FusedOperation: empty", lambda: ops.FusedOperation([]), ValueError, "expected at least one"),
    ("FusedAdam: complex parameter", lambda: adam(torch.rand(2).cfloat()), TypeError, "parameter 0 of group 0 is torch.complex64, expected float32.*Convert"),
    ("FusedAdam: sparse parameter", lambda: adam(torch.eye(2).to_sparse()), TypeError, "layout torch.sparse_coo, expected torch.strided"),
    ("FusedAdam: float64 main_grad", lambda: adam(X, main_grad=X.double()).step(), TypeError, "the gradient of parameter 0 of group 0 is torch.float64"),
    ("FusedAdam: main_grad of another shape", lambda: adam(X, main_grad=X.t()).step(), ValueError, r"shape \[8, 4\], expected \[4, 8\].*zeros_like"),
    ("FusedAdam: learning rate", lambda: adam(X, lr=-1.0), ValueError, "lr is -1.0, expected 0 or more"),
    ("FusedAdam: state of SGD", lambda: load_adam(torch.optim.SGD), ValueError, "no betas, eps; expected the state of FusedAdam"),
    ("FusedAdam: state of Adamax", lambda: load_adam(torch.optim.Adamax), ValueError, "exp_avg, exp_inf; expected"),
    ("FusedAdam: state of Adam", lambda: load_adam(torch.optim.Adam, weight_decay=0.1), ValueError, "Create FusedAdam with adam_w_mode=False"),
    ("FusedAdam: state with amsgrad", lambda: load_adam(torch.optim.AdamW, amsgrad=True), NotImplementedError, "amsgrad=True, which is not supported"),
    ("FusedAdam: scaler and main_grad", scaled_main_grad, NotImplementedError, "GradScaler is not supported for main_grad.*Train in bfloat16"),
    ("convert: source", lambda: command("no/such/file", "out", "--to", "pt"), SystemExit, "no/such/file"),
    ("convert: format", lambda: command("a", "b", "--to", "onnx"), SystemExit, "invalid choice: 'onnx'"),
    ("convert: no target", lambda: command("a", "--to", "pt"), SystemExit, "required: TARGET"),
    ("convert: size", lambda: command("a", "b", "--to", "pt", "--shard-size", "big"), SystemExit, "'big' is not a size; expected"),
    ("convert: inspect", lambda: command("inspect", "no/such/file"), SystemExit, "no/such/file"),
    ("convert: verify", lambda: command("verify", "no/such/file"), SystemExit, "no/such/file"),
    ("convert: a text file", lambda: command(__file__, "out", "--to", "pt"), SystemExit, "test_user_mistakes.py"),
    ("convert: Hugging Face's names", convert_hugging_face, SystemExit, r"no rule matches 1 of the 1 tensors of .*hf.pt: model.layers.0.self_attn.q_proj.weight.*Expected names of torch"),
    ("WEFT_TIER: unknown", lambda: environment("WEFT_TIER", "avx51"), RuntimeError, "'avx51', expected amx.*Did you mean 'avx512'"),
    ("WEFT_PACKED_BYTES: unit", lambda: environment("WEFT_PACKED_BYTES", "1GB"), RuntimeError, "'1GB', expected a number"),
    ("torch.compile: width", lambda: compiled(torchweft.Sequential(ops.GELU(), ops.Linear(7, 8))), Exception, "expected 7 features"),
]  # fmt: skip

MISTAKES = CONSTRUCTORS + CALLS + PIPELINES + TRAINING + OTHERS


@pytest.mark.parametrize("who, call, error, pattern", [pytest.param(*row, id=row[0]) for row in MISTAKES])
def test_message_names_who_what_was_given_and_the_cure(who, call, error, pattern):
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value.args[0] if raised.value.args else raised.value).strip()
    assert re.search(pattern, message, re.DOTALL), message
    if "torch.compile" in who:  # Dynamo appends its own text
        return
    assert who.partition(":")[0] in message, message
    assert CURE.search(message), message
    # torch's message about in-place changes ends with "Good luck!", argparse's messages end without a period.
    assert message[-1] in ".!?" or message.startswith("usage:"), message
    assert not re.search(r"Exception raised from|\.cpp\b|\.h:\d", message), message


def test_table_has_at_least_150_mistakes():
    assert len(MISTAKES) >= 150


def test_explain_of_model_names_each_sequential():
    model = torch.nn.Sequential()
    model.add_module("first", torchweft.Sequential(ops.Linear(8, 8), ops.GELU()))
    model.add_module("plain", torch.nn.Tanh())
    model.add_module("last", ops.Linear(8, 2))
    plans = torchweft.explain(model, X)
    assert [section["pipeline"] for section in plans.data] == ["first: Linear, GELU", "last: Linear"]
    assert not model.first._forward_pre_hooks


def test_state_dict_has_only_floating_point_tensors():
    model = torchweft.Sequential(ops.RMSNorm(8), ops.Linear(8, 8), ops.GroupedLinear(2, 8, 8), ops.Dropout(0.1))
    assert all(value.is_floating_point() for value in model.state_dict().values())
