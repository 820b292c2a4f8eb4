"""Activations of infinite, NaN, huge and tiny inputs match eager torch in every dtype (docs/numerics.md)."""

import pytest
import torch
from torch.nn import functional

from torchweft import ops

EAGER = {
    ops.GELU(): lambda x: functional.gelu(x, approximate="tanh"),
    ops.GELU("none"): lambda x: functional.gelu(x.double()),  # in float32 NaN at inf, inf near the largest float
    ops.QGELU(): lambda x: x * torch.sigmoid(1.702 * x),
    ops.ReLU(): functional.relu,
    ops.SReLU(): lambda x: functional.relu(x) ** 2,
    ops.SiLU(): functional.silu,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def edges(dtype):
    info = torch.finfo(dtype)
    sizes = [torch.inf, info.max, info.max / 2, 1e4, 100.0, 10.0, 1.0, info.tiny, info.smallest_normal / 4, 0.0]
    return torch.tensor([torch.nan, *sizes, *(-size for size in sizes)], dtype=torch.float64).to(dtype)


def run(f, x, dtype):
    leaf = x.to(dtype, copy=True).requires_grad_()
    y = f(leaf)
    y.backward(torch.ones_like(y))
    return y.detach(), leaf.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", EAGER, ids=repr)
def test_edge_values_match_eager_torch(op, dtype):
    x = edges(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected_y, expected_dx = (t.to(dtype) for t in run(EAGER[op], x, wide))
    overflows = x.isfinite() & expected_dx.isnan()  # on the way, in eager; weft gives the limit
    assert (x[overflows].abs() > 1e15).all()
    expected_dx[overflows] = (x[overflows] > 0).to(dtype)
    y, dx = run(op, x, dtype)
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(y, expected_y, **tolerance)
    torch.testing.assert_close(dx, expected_dx, **tolerance)
