"""Strict mode: what the kernels of a GPU refuse raises, and is computed with strict=False."""

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common.recipe import NVFP4BlockScaling
from transformer_engine.pytorch import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from transformer_engine.pytorch.cpp_extensions import general_gemm

E4M3 = tex.DType.kFloat8E4M3
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def rand(*sizes, dtype=BF16):
    return torch.randn(*sizes, dtype=dtype, device="cuda")


def nvfp4(**options):
    return NVFP4Quantizer(columnwise=False, **options)


def rht(**options):
    return NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, **options)


def multiply(quantizer, m, n, k, dtype=BF16, other=None):
    left, right = quantizer(rand(m, k)), (other or quantizer)(rand(n, k))
    general_gemm(right, left, out_dtype=dtype)


def block(dimensions, **options):
    return Float8BlockQuantizer(E4M3, rowwise=True, columnwise=False, block_scaling_dim=dimensions, **options)


def current():
    return Float8CurrentScalingQuantizer(E4M3, torch.device("cuda"), columnwise=False)


def group(quantizer, rows, columns):
    quantizer.set_usage(rowwise=True, columnwise=True)
    sizes = torch.tensor(rows, device="cuda")
    tex.group_quantize(rand(sum(rows), columns), quantizer, len(rows), sizes)


def adam(moments=F32, gradients=(F32, F32)):
    params = [torch.zeros(16, dtype=torch.uint8, device="cuda") for _ in gradients]
    grads = [rand(16, dtype=dtype) for dtype in gradients]
    zeros = [[torch.zeros(16, dtype=dtype, device="cuda") for _ in gradients] for dtype in (moments, moments, F32)]
    ones = [[torch.ones(1, device="cuda") for _ in gradients] for _ in range(3)]
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    lists = [grads, params, *zeros, *ones]
    tex.multi_tensor_adam_fp8(1024, flag, lists, 1e-3, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0, E4M3)


def grouped_linear(bias=True, groups=2, width=24):
    ops = te.ops.GroupedLinear(groups, 32, width, bias=bias, device="cuda", dtype=BF16)
    ops(rand(32 * groups, 32), torch.full((groups,), 32, device="cuda"))


def fp8_linear_without_grad(dtype):
    linear = te.Linear(64, 64, params_dtype=dtype)
    with torch.no_grad(), te.autocast(recipe=NVFP4BlockScaling()):
        linear(rand(64, 64, dtype=dtype))


REFUSED = {
    "NVFP4, 48 products": (lambda: multiply(nvfp4(), 32, 32, 48), "leading dimension"),
    "NVFP4, float16": (lambda: multiply(nvfp4(), 32, 32, 64, F16), "FP16 output"),
    "NVFP4 times FP8": (lambda: multiply(nvfp4(), 32, 32, 64, other=current()), "compatible scaling modes"),
    "FP8 blocks, 18 rows": (lambda: multiply(block(1), 18, 128, 128, other=block(2)), "outer dimension"),
    "FP8 blocks, other scales": (lambda: block(1, force_pow_2_scales=False)(rand(128, 128)), "powers of two"),
    "group in MXFP8, 160 rows": (lambda: group(MXFP8Quantizer(E4M3), [64, 96], 64), "multiple of 128"),
    "group in NVFP4, 64 columns": (lambda: group(rht(), [64, 64], 64), "multiples of 128"),
    "group in NVFP4 without RHT": (lambda: group(nvfp4(), [64, 64], 128), "RHT"),
    "parts in NVFP4, 48 rows": (lambda: tex.split_quantize(rand(96, 128), [48, 48], [rht(), rht()]), "of 64"),
    "RHT, float32": (lambda: rht(columnwise=False)(rand(64, 64, dtype=F32)), "require bfloat16"),
    "NVFP4 layer, float16": (lambda: fp8_linear_without_grad(F16), "require bfloat16"),
    "a bias of 20 elements": (lambda: grouped_linear(width=20), "multiple of 16"),
    "65 groups": (lambda: grouped_linear(groups=65), "at most 64"),
    "gates of 16 columns": (
        lambda: te.ops.ScaledSwiGLU(glu_interleave_size=16)(rand(8, 64), torch.ones(8, device="cuda")),
        "glu_interleave_size",
    ),
    "logits by columns": (
        lambda: tex.fused_topk_with_score_function_fwd(
            rand(8, 4, dtype=F32).t(), 2, False, None, None, None, "softmax", None, 0, None
        ),
        "contiguous",
    ),
    "offsets of int64": (
        lambda: tex.thd_get_partitioned_indices(torch.tensor([0, 8, 16], device="cuda"), 16, 2, 0),
        "int32",
    ),
    "dropout of nothing": (lambda: tex.dropout_fwd(rand(0, 16), 0.5), "without elements"),
    "moments of bfloat16": (lambda: adam(moments=BF16), "moments in float32"),
    "gradients of two dtypes": (lambda: adam(gradients=(F32, BF16)), "one dtype"),
}


@pytest.fixture
def relaxed():
    tex._set_strict(False)
    yield
    tex._set_strict(True)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gpu_refuses_raises(name):
    call, message = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError), match=message) as raised:
        call()
    assert "strict=False" in str(raised.value)


@pytest.mark.parametrize("name", REFUSED)
def test_without_strict_it_is_computed(name, relaxed):
    REFUSED[name][0]()


def test_what_a_gpu_accepts_runs():
    multiply(nvfp4(), 16, 48, 64)
    multiply(block(1), 20, 128, 128, other=block(2))
    group(MXFP8Quantizer(E4M3), [32, 96], 64)
    group(rht(), [64, 192], 128)
    tex.split_quantize(rand(192, 128), [64, 128], [rht(), rht()])
    tex.split_quantize(rand(96, 64), [48, 48], [rht(), rht()])  # other columns: one by one
    grouped_linear()
    grouped_linear(groups=64)
    fp8_linear_without_grad(BF16)
    adam()
