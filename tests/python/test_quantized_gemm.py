"""GEMMs of quantized matrices against float64 on the dequantized operands."""

from __future__ import annotations

import pytest
import torch

from torchweft.quantization import QuantizedMatrix, Quantizer, gemm

# (rows, outputs, inputs) of a linear; NVFP4 transforms 16 rows at a time.
SHAPES = [
    (16, 16, 16), (16, 32, 48), (32, 16, 160), (48, 80, 33), (64, 64, 64), (16, 1, 128), (16, 17, 129), (80, 31, 255),
    (128, 128, 128), (96, 200, 144), (112, 64, 320), (32, 384, 128), (160, 96, 256), (16, 256, 512), (256, 48, 96),
    (144, 144, 144), (64, 130, 258), (192, 64, 65), (48, 48, 1024), (272, 128, 64),
]  # fmt: skip
RECIPES = {
    "current": (Quantizer("current"), Quantizer("current"), Quantizer("current", format="e5m2")),
    "power of 2": (Quantizer("current", power_of_2_scales=True),) * 3,
    "block": (
        Quantizer("block", power_of_2_scales=True),
        Quantizer("block", power_of_2_scales=True, two_dimensional=True),
        Quantizer("block", power_of_2_scales=True, format="e5m2"),
    ),
    "block, float32 scales": (Quantizer("block"), Quantizer("block", two_dimensional=True), Quantizer("block")),
    "mxfp8": (Quantizer("mxfp8"),) * 3,
    "mxfp8, square blocks of w": (Quantizer("mxfp8"), Quantizer("mxfp8", two_dimensional=True), Quantizer("mxfp8")),
    "mxfp8, hybrid": (Quantizer("mxfp8"), Quantizer("mxfp8"), Quantizer("mxfp8", format="e5m2")),
    "nvfp4": (
        Quantizer("nvfp4", random_hadamard_transform=True),
        Quantizer("nvfp4", two_dimensional=True),
        Quantizer("nvfp4", random_hadamard_transform=True, stochastic_rounding=True),
    ),
    "nvfp4, four over six": (
        Quantizer("nvfp4"),
        Quantizer("nvfp4", four_over_six="MAE", four_over_six_e4m3_use_256=True, two_dimensional=True),
        Quantizer("nvfp4"),
    ),
}


def exact(q: QuantizedMatrix, columnwise: bool) -> torch.Tensor:
    """The operand in float64."""
    return q.dequantize(columnwise=columnwise, dtype=torch.float32).double()


def check(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """|error| <= K·2^-24·Σ|a||b| and one rounding of the result. Dequantized values have two roundings of their own,
    and factors of the whole product three more."""
    expected, sums = a @ b.T, a.abs() @ b.abs().T
    bound = (a.shape[1] + 8) * 2.0**-24 * sums + torch.finfo(result.dtype).eps / 2 * expected.abs()
    assert ((result.double() - expected).abs() <= bound).all()


def quantized(recipe: str, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> list[QuantizedMatrix]:
    """x, w and dy of a linear."""
    sizes = (rows, inputs), (outputs, inputs), (rows, outputs)
    generator = torch.Generator().manual_seed(rows + outputs + inputs)
    tensors = [torch.randn(s, generator=generator).to(dtype) for s in sizes]
    seeds = [{"seed": 1} if q.fields()["stochastic_rounding"] else {} for q in RECIPES[recipe]]
    return [q.quantize(t, columnwise=True, **seed) for q, t, seed in zip(RECIPES[recipe], tensors, seeds, strict=True)]


def dtypes(recipe: str) -> list[torch.dtype]:
    transforms = any(q.fields()["random_hadamard_transform"] for q in RECIPES[recipe])
    return [torch.bfloat16] if transforms else [torch.bfloat16, torch.float32, torch.float16]


@pytest.mark.parametrize(("recipe", "dtype"), [(r, d) for r in RECIPES for d in dtypes(r)], ids=str)
def test_three_gemms_of_a_linear(recipe, dtype):
    for shape in SHAPES:
        x, w, dy = quantized(recipe, *shape, dtype)
        check(gemm(x, w), exact(x, False), exact(w, False))
        check(gemm(dy, w, b_columnwise=True, dtype=torch.float32), exact(dy, False), exact(w, True).T)
        dw = gemm(dy, x, a_columnwise=True, b_columnwise=True, dtype=torch.float32)
        check(dw, exact(dy, True).T, exact(x, True).T)


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-60, 2.0**60, 1e38])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_scales_beyond_the_exponents_of_bfloat16(scale, fmt):
    x = torch.randn(32, 64).clamp(-2, 2) * scale
    x[:, :32] = 0  # blocks of zeros have the smallest scale
    w = torch.randn(16, 64) * (2.0**-20 if scale > 1 else 1)
    a, b = Quantizer("mxfp8", format=fmt).quantize(x), Quantizer("mxfp8").quantize(w)
    check(gemm(a, b), exact(a, False), exact(b, False))


@pytest.mark.parametrize("recipe", RECIPES)
def test_bias_and_accumulation(recipe):
    x, w, _ = quantized(recipe, 32, 48, 64, torch.bfloat16)
    bias = torch.nn.Parameter(torch.randn(48))
    plain = gemm(x, w, dtype=torch.float32)
    result = gemm(x, w, bias=bias, dtype=torch.float32)
    assert not result.requires_grad
    torch.testing.assert_close(result, plain + bias.detach())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(gemm(x, w, dtype=dtype), plain.to(dtype))  # rounded once
        buffer = torch.ones(32, 96, dtype=dtype)
        main_grad = buffer[:, ::2]
        assert gemm(x, w, out=main_grad, accumulate=True).data_ptr() == main_grad.data_ptr()
        torch.testing.assert_close(main_grad, (plain + 1).to(dtype))
        assert (buffer[:, 1::2] == 1).all()
        gemm(x, w, out=main_grad)
        assert torch.equal(main_grad, plain.to(dtype))


def test_factors_whose_product_overflows():
    x = torch.zeros(16, 32)
    x[0, 0] = 3e38
    q = Quantizer("current").quantize(x)
    product = gemm(q, q)
    assert product[0, 0] == float("inf") and (product.ravel()[1:] == 0).all()


@pytest.mark.parametrize("sizes", [(0, 16, 16), (16, 0, 16), (16, 16, 0)])
def test_empty_matrices(sizes):
    rows, outputs, inputs = sizes
    q = Quantizer("mxfp8")
    y = gemm(q.quantize(torch.randn(rows, inputs)), q.quantize(torch.randn(outputs, inputs)))
    assert y.shape == (rows, outputs) and (y == 0).all()


def test_operands_that_do_not_fit_raise():
    quantizer = Quantizer("mxfp8")
    a, b = quantizer.quantize(torch.randn(32, 64)), quantizer.quantize(torch.randn(32, 96))
    block = {p: Quantizer("block", power_of_2_scales=p).quantize(torch.randn(32, 64)) for p in (False, True)}
    x = torch.randn(32, 64).bfloat16()
    plain, transformed = (
        Quantizer("nvfp4", random_hadamard_transform=t).quantize(x, columnwise=True) for t in (False, True)
    )
    sides = {"a_columnwise": True, "b_columnwise": True}
    for left, right, arguments, error, message in [
        (a, b, {}, ValueError, "64 and 96"),
        (a, a, {"b_columnwise": True}, ValueError, "no columnwise copy. Quantize it with columnwise=True"),
        (a, block[False], {}, ValueError, "same power_of_2_scales"),
        (block[True], block[False], {}, ValueError, "same power_of_2_scales"),
        (plain, transformed, sides, ValueError, "only one operand has a Hadamard transform"),
        (a, a, {"accumulate": True}, ValueError, "requires `out`"),
        (a, a, {"bias": torch.ones(31)}, ValueError, r"bias has shape \[31\], expected \[32\]"),
        (a, a, {"out": torch.ones(32, 31)}, ValueError, r"expected \[32, 32\]"),
        (a, a, {"out": torch.ones(32, 32), "dtype": torch.bfloat16}, ValueError, "Omit dtype"),
        (a, a, {"dtype": torch.int8}, TypeError, "float32, float64, float16 or bfloat16"),
        (a, a, {"bias": torch.ones(32, device="meta")}, ValueError, "on meta"),
    ]:
        with pytest.raises(error, match=message):
            gemm(left, right, **arguments)
