"""Quantized matrices: FP8, MXFP8 and NVFP4 codes with their scales, their GEMM, and the errors of both.

Example:
    >>> import torch
    >>> from torchweft.quantization import Quantizer, gemm
    >>> mxfp8 = Quantizer("mxfp8")
    >>> x, w = mxfp8.quantize(torch.ones(1, 32)), mxfp8.quantize(torch.full((2, 32), 0.5))
    >>> x.rowwise_scales, x.rowwise_data[0, :2]
    (tensor([[119]], dtype=torch.uint8), tensor([120, 120], dtype=torch.uint8))
    >>> gemm(x, w)
    tensor([[16., 16.]])
"""

from __future__ import annotations

import torch

from . import _C
from ._C import QuantizedMatrix, Quantizer
from ._gemm_error import GemmError, ReducedAccumulator, gemm_error
from ._inspector import QuantizationInspector, TensorStatistics

__all__ = [
    "GemmError",
    "QuantizationInspector",
    "QuantizedMatrix",
    "Quantizer",
    "ReducedAccumulator",
    "TensorStatistics",
    "gemm",
    "gemm_error",
]


def gemm(
    a: QuantizedMatrix,
    b: QuantizedMatrix,
    *,
    a_columnwise: bool = False,
    b_columnwise: bool = False,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiplies quantized matrices: A Bᵀ + bias.

    The GEMM reduces over the dimension along which the blocks of a copy run. A rowwise copy of a matrix [M, K] is the
    operand [M, K], a columnwise copy is [K, M]. The three GEMMs of a linear y = x wᵀ, with a gradient dy, are therefore

    - ``gemm(x, w)`` for y,
    - ``gemm(dy, w, b_columnwise=True)`` for the gradient of x,
    - ``gemm(dy, x, a_columnwise=True, b_columnwise=True)`` for the gradient of w.

    Products of codes are exact, their sums are float32, and the result is rounded once.

    Args:
        a: the left operand.
        b: the right operand, multiplied transposed.
        a_columnwise: uses the columnwise copy of ``a``.
        b_columnwise: uses the columnwise copy of ``b``.
        bias: added to each row.
        out: receives the result.
        accumulate: adds to ``out`` instead of overwriting it.
        dtype: of the result; that of ``a`` before quantization by default.

    Returns:
        The product, or ``out``.
    """
    return _C.quantized_gemm(
        a,
        b,
        a_columnwise=a_columnwise,
        b_columnwise=b_columnwise,
        bias=bias,
        out=out,
        accumulate=accumulate,
        dtype=dtype,
    )
