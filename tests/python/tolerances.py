"""Tolerances by dtype, and the two rules that use them.

CPUs have no TF32, so float32 GEMMs must meet the float32 row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    rtol: float
    atol: float
    pipeline: float  # maximum error of a pipeline, relative to the largest value


TOLERANCES = {
    torch.float64: Tolerance(1e-7, 1e-7, 1e-10),
    torch.float32: Tolerance(1.3e-6, 1e-5, 1e-5),
    torch.float16: Tolerance(1e-3, 1e-5, 2e-3),
    torch.bfloat16: Tolerance(1.6e-2, 1e-5, 1.6e-2),
}


def distance(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Returns the largest absolute difference to the float64 reference; infinite for NaN."""
    if actual.shape != exact.shape:
        raise AssertionError(f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}")
    if exact.numel() == 0:
        return 0.0
    difference = (actual.detach().double() - exact.detach()).abs().max().item()
    return difference if difference == difference else float("inf")


def assert_close(actual: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor, what: str) -> None:
    """For one operation: every value must be within the table. A low-precision gradient that sums many rounded terms
    may instead have twice the error of eager torch in the same dtype."""
    row = TOLERANCES[actual.dtype]
    error = distance(actual, exact)
    if error <= 2 * distance(eager, exact) and actual.dtype in (torch.float16, torch.bfloat16):
        return
    torch.testing.assert_close(
        actual.detach().double(), exact.detach(), rtol=row.rtol, atol=row.atol, msg=lambda text: f"{what}: {text}"
    )


def allowed_in_a_pipeline(dtype: torch.dtype, eager_error: float) -> float:
    """Returns the maximum error of a pipeline, relative to the largest value of the tensor: the last column of the
    table, or, below float64, twice the largest error of eager torch in that pipeline and dtype."""
    bound = TOLERANCES[dtype].pipeline
    return bound if dtype == torch.float64 else max(bound, 2 * eager_error)
