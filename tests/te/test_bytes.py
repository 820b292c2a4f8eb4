"""Codes and scales that Transformer Engine's quantizers write, against the NumPy reference of tests/python."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te

sys.path.insert(0, str(Path(__file__).parent.parent / "python"))

import quantization_reference as reference  # noqa: E402

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
FIELDS = {
    "amax_epsilon": 0.0,
    "power_of_2_scales": False,
    "two_dimensional": False,
    "random_hadamard_transform": False,
    "stochastic_rounding": False,
    "row_scaled": False,
    "four_over_six": "none",
    "four_over_six_e4m3_use_256": False,
}


def special_values(rows: int, columns: int) -> torch.Tensor:
    """Values of many magnitudes, signed zeros and rows of zeros; NaN and infinity in one corner."""
    torch.manual_seed(0)
    x = torch.randn(rows, columns) * 2.0 ** torch.randint(-12, 12, (rows, 1))
    x[1] = 0
    x[2, ::2] = -0.0
    return x.bfloat16()


def codes(t: torch.Tensor) -> np.ndarray:
    return t.view(torch.uint8).cpu().numpy()


def assert_same(buffer: torch.Tensor, expected: np.ndarray) -> None:
    """The buffer starts with the expected bytes, row by row; the rest is padding."""
    found = buffer.detach().cpu().numpy()
    expected = expected.reshape(expected.shape if expected.ndim == found.ndim else found.shape)
    found = found[tuple(slice(0, n) for n in expected.shape)]
    assert found.tobytes() == np.ascontiguousarray(expected).astype(found.dtype).tobytes()


@pytest.mark.parametrize("dtype", (E4M3, E5M2), ids=str)
def test_delayed_and_current_scaling(dtype):
    x = special_values(48, 64)
    fields = {**FIELDS, "format": "e4m3" if dtype == E4M3 else "e5m2"}
    scale, amax = torch.full((1,), 0.75, device="cuda"), torch.zeros(1, device="cuda")
    delayed = te.Float8Quantizer(scale=scale, amax=amax, fp8_dtype=dtype)(x.cuda())
    expected, _ = reference.quantize(x, {**fields, "scaling": "delayed"}, scale=0.75)
    assert_same(delayed._data, expected.data)
    assert amax.item() == expected.amax[0]
    current = te.Float8CurrentScalingQuantizer(fp8_dtype=dtype, device=torch.device("cuda"))(x.cuda())
    expected, _ = reference.quantize(x, {**fields, "scaling": "current"})
    assert_same(current._data, expected.data)
    assert_same(current._scale_inv, expected.scales)


@pytest.mark.parametrize("sizes", ((64, 64), (128, 256), (32, 160)))
def test_mxfp8(sizes):
    x = special_values(*sizes)
    q = te.MXFP8Quantizer(fp8_dtype=E4M3)(x.cuda())
    rowwise, columnwise = reference.quantize(x, {**FIELDS, "scaling": "mxfp8", "format": "e4m3", "block": 32})
    assert_same(q._rowwise_data, rowwise.data)
    assert_same(q._rowwise_scale_inv, rowwise.scales)
    assert_same(q._columnwise_data, columnwise.data)
    assert_same(q._columnwise_scale_inv, columnwise.scales)


@pytest.mark.parametrize("two_dimensional", (False, True))
def test_nvfp4(two_dimensional):
    x = special_values(64, 128)
    q = te.NVFP4Quantizer(with_rht=False, stochastic_rounding=False, with_2d_quantization=two_dimensional)(x.cuda())
    fields = {**FIELDS, "scaling": "nvfp4", "format": "e2m1", "two_dimensional": two_dimensional}
    rowwise, columnwise = reference.quantize(x, fields)
    assert_same(q._rowwise_data, rowwise.data)
    assert_same(q._columnwise_data, columnwise.data)
    assert_same(q._amax_rowwise, rowwise.amax)


def test_nvfp4_gemm_rounds_as_a_gpu():
    """One float32 factor multiplies the sum, amax · amax / (6 · 6 · 448 · 448). With these maxima it is nearly
    1 / (7 · 2**16), so that many results lie between two numbers of bfloat16."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 64).clamp(-3, 3), torch.randn(128, 64).clamp(-3, 3)
    x[0, 0], w[0, 0] = 4.0, 3.9375
    quantizer = te.NVFP4Quantizer(columnwise=False)
    qx, qw = quantizer(x.bfloat16().cuda()), quantizer(w.bfloat16().cuda())
    inverse = np.float32(1) / np.float32(6 * 6 * 448 * 448)
    factor = np.float32(4) * np.float32(3.9375) * inverse

    def products(q, amax):  # codes times E4M3 scales: exact
        return torch.round(q.dequantize(dtype=torch.float32).cpu().double() * (6 * 448 / amax) * 2**10) / 2**10

    total = (products(qx, 4.0) @ products(qw, 3.9375).T).float()
    expected = (total * float(factor)).bfloat16()
    found = te.cpp_extensions.general_gemm(qw, qx, out_dtype=torch.bfloat16)[0].cpu()
    assert torch.equal(found, expected)
    one_by_one = total * float(np.float32(4) / np.float32(2688)) * float(np.float32(3.9375) / np.float32(2688))
    assert one_by_one.bfloat16().ne(expected).sum() > 10, "the factor makes no difference"


def test_a_maximum_that_nobody_asks_for():
    x = torch.randn(32, 32).cuda()
    scale = torch.full((1,), 0.75, device="cuda")
    found = te.Float8Quantizer(scale=scale, amax=torch.Tensor(), fp8_dtype=E4M3)(x)
    recorded = te.Float8Quantizer(scale=scale, amax=torch.zeros(1, device="cuda"), fp8_dtype=E4M3)(x)
    assert torch.equal(found._data, recorded._data)


def test_row_scaled_matrix_without_rows():
    quantizer = te.NVFP4Quantizer(columnwise=False, row_scaled_nvfp4=True)
    empty = quantizer(torch.empty(0, 64, device="cuda", dtype=torch.bfloat16))
    assert empty._amax_rowwise.shape == (0,)
    weight = te.NVFP4Quantizer(columnwise=False)(torch.randn(32, 64, device="cuda", dtype=torch.bfloat16))
    y = te.cpp_extensions.general_gemm(weight, empty, out_dtype=torch.bfloat16)[0]
    assert y.shape == (0, 32)


def test_block_scaling():
    x = special_values(128, 256)
    q = te.Float8BlockQuantizer(fp8_dtype=E4M3, rowwise=True, columnwise=True, block_scaling_dim=2)(x.cuda())
    fields = {**FIELDS, "scaling": "block", "format": "e4m3", "two_dimensional": True, "power_of_2_scales": True}
    rowwise, _ = reference.quantize(x, fields)
    assert_same(q._rowwise_data, rowwise.data)
    assert_same(q._rowwise_scale_inv, rowwise.scales)
