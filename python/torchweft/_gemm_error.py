"""The error of a quantized GEMM, split into that of its operands and that of its sums."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from . import _C

_ELEMENTS = 1 << 24  # of products that are in memory at once


@dataclass(frozen=True)
class ReducedAccumulator:
    """Sums of a tensor core that keeps fewer bits than float32.

    A step adds `products` products to the accumulator: all terms are aligned to the largest exponent among them,
    truncated to `fraction_bits` bits after its leading bit, and added. The defaults are what measurements found for FP8
    on Hopper GPUs.

    Args:
        fraction_bits: of the aligned terms.
        products: number of products of a step.
        promote_every: number of products after which the accumulator is added to a float32 sum, and starts at 0; a
            multiple of `products`. 0: never.
    """

    fraction_bits: int = 13
    products: int = 32
    promote_every: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.fraction_bits <= 50 or self.products < 1:
            raise ValueError(f"{self}: expected 1 to 50 fraction_bits and at least 1 product.")
        if self.promote_every < 0 or self.promote_every % self.products:
            raise ValueError(f"{self}: promote_every must be a multiple of products, or 0.")

    def gemm(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Returns A Bᵀ of float64 matrices."""
        rows = max(1, _ELEMENTS // max(1, len(b) * (self.products + 1)))
        parts = [self._gemm(part, b) for part in a.split(rows)]
        return torch.cat(parts) if parts else a.new_empty(0, len(b))

    def _gemm(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        promoted = accumulator = a.new_zeros(len(a), len(b))
        for k in range(0, a.shape[1], self.products):
            if self.promote_every and k and k % self.promote_every == 0:
                promoted = (promoted + accumulator).float().double()
                accumulator = torch.zeros_like(accumulator)
            terms = a[:, None, k : k + self.products] * b[None, :, k : k + self.products]
            accumulator = self._sum(torch.cat([accumulator[..., None], terms], -1))
        return (promoted + accumulator).float().double() if self.promote_every else accumulator

    def _sum(self, terms: torch.Tensor) -> torch.Tensor:
        _, exponent = torch.frexp(terms.abs().amax(-1, keepdim=True))
        unit = torch.ldexp(torch.ones_like(terms[..., :1]), exponent - 1 - self.fraction_bits)
        return (torch.trunc(terms / unit) * unit).sum(-1)


@dataclass(frozen=True)
class GemmError:
    """Relative errors of a quantized GEMM, in Frobenius norms. The two parts are of the same result, but not
    orthogonal, so their squares need not add up to that of the total.

    Args:
        operands: from quantized operands, multiplied exactly.
        accumulation: from sums that are not exact, and the rounding of the result to float32.
        total: of both.
    """

    operands: float
    accumulation: float
    total: float


def gemm_error(
    a: torch.Tensor,
    b: torch.Tensor,
    quantizer: _C.Quantizer,
    *,
    accumulator: ReducedAccumulator | None = None,
) -> GemmError:
    """Returns the error of A Bᵀ with quantized operands, against the product of the operands themselves in float64.

    Args:
        a: a matrix of float32, bfloat16 or float16.
        b: a matrix, multiplied transposed.
        quantizer: of both matrices. Stochastic rounding takes seed 0.
        accumulator: how products are added; None: in float32, as weft's GEMM does.

    Example::

        >>> from torchweft.quantization import Quantizer, ReducedAccumulator, gemm_error
        >>> x, w = torch.randn(64, 4096), torch.randn(64, 4096)
        >>> exact_sums = gemm_error(x, w, Quantizer("current"))
        >>> hopper = gemm_error(x, w, Quantizer("current"), accumulator=ReducedAccumulator())
        >>> exact_sums.accumulation < 1e-5 < hopper.accumulation
        True
    """
    seed = 0 if quantizer.fields()["stochastic_rounding"] else None
    q_a, q_b = quantizer.quantize(a, seed=seed), quantizer.quantize(b, seed=seed)
    exact = a.double() @ b.double().T
    if quantizer.fields()["scaling"] == "current":  # one scale, by which hardware multiplies the sums
        left, right = q_a.codes().double(), q_b.codes().double()
        assert q_a.rowwise_scales is not None and q_b.rowwise_scales is not None
        scale = q_a.rowwise_scales.double() * q_b.rowwise_scales.double()
    else:
        left, right = (q.dequantize(dtype=torch.float32).double() for q in (q_a, q_b))
        scale = torch.ones(1, dtype=torch.float64)
    rounded = left @ right.T * scale
    if accumulator is None:
        result = _C.quantized_gemm(q_a, q_b, dtype=torch.float32).double()
    else:
        result = accumulator.gemm(left, right) * scale
    size = exact.norm().item() or math.nan  # no relative error of zero
    errors = ((rounded - exact).norm(), (result - rounded).norm(), (result - exact).norm())
    operands, accumulation, total = (error.item() / size if error else 0.0 for error in errors)
    return GemmError(operands, accumulation, total)
