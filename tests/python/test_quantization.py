"""Quantizers: golden bytes, and random tensors against NumPy, bit for bit in every tier."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import quantization_reference as reference
import torch

from torchweft.quantization import QuantizedMatrix, Quantizer

F = np.float32
BF16 = torch.bfloat16


def bits(x) -> str:
    return f"{np.asarray(x, F).view(np.uint32).item():08x}"


def from_bits(text: str) -> float:
    return np.array(int(text, 16), np.uint32).view(F).item()


def row(values, dtype=torch.float32) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32).to(dtype)


def hexes(data: torch.Tensor) -> str:
    return data.numpy().tobytes().hex(" ")


def pattern(i) -> np.ndarray:
    return ((37 * np.asarray(i) + 11) % 101 - 50) / 8


def bulk() -> torch.Tensor:
    r, c = np.meshgrid(np.arange(128), np.arange(256), indexing="ij")
    x = pattern(256 * r + c) * 2.0 ** ((5 * r + 3 * c) % 9 - 4)
    assert reference.crc(x.astype("<f4")) == "948da638"
    return torch.from_numpy(x.astype(F)).to(BF16)


# ---- golden bytes ----------------------------------------------------------------------------------------------------

CASTS = """0 00/00  -0 80/80  1 38/3c  17 58/4c  18 59/4c  19 5a/4d  447.9 7e/5f  464 7e/5f  1e9 7e/7b  -1e9 fe/fb
inf 7e/7b  -inf fe/fb  nan 7f/7f  0.001953125 01/18  0.0009765625 00/14  0.00146484375 01/16"""
CASTS_E5M2 = f"""9 48  10 49  11 4a  61440 7b  65536 7b  {2.0**-16} 01  {2.0**-17} 00  {1.5 * 2.0**-17} 01"""


def cast(values: list[float], fmt: str) -> str:
    scale = torch.ones(1)
    return hexes(Quantizer("delayed", format=fmt).quantize(row(values), scale=scale).rowwise_data)


def test_casts_to_fp8():
    words = CASTS.split()
    values, codes = [float(v) for v in words[::2]], [c.split("/") for c in words[1::2]]
    assert cast(values, "e4m3") == " ".join(c[0] for c in codes)
    assert cast(values, "e5m2") == " ".join(c[1] for c in codes)
    words = CASTS_E5M2.split()
    assert cast([float(v) for v in words[::2]], "e5m2") == " ".join(words[1::2])


def test_casts_to_e2m1():
    values = [0.25, 0.26, 0.75, -0.75, 1.25, 1.26, 1.75, 2.5, 2.6, 3.5, 5, 5.01, 7, -100, -0.25, -0.0]
    codes = "0 1 2 a 2 3 4 4 5 6 6 7 7 f 8 8".split()
    np.testing.assert_array_equal(reference.cast(np.array(values, F), "e2m1"), [int(c, 16) for c in codes])
    # Blocks with scale 1: their largest magnitude is 6 and the tensor's is 6·448.
    amax = torch.tensor([2688.0])
    values = [max(-6.0, min(v, 6.0)) for v in values]  # those above would change the scale
    for i in range(0, 16, 4):
        block = row([*values[i : i + 4], 6.0, *[0.0] * 11])
        data = Quantizer("nvfp4").quantize(block, amax=amax).rowwise_data
        assert hexes(data)[:5] == " ".join(codes[j + 1] + codes[j] for j in (i, i + 2))


@pytest.mark.parametrize(
    ("fmt", "power_of_2", "inverse", "codes"),
    [
        ("e4m3", False, "3bdb6db7", "57 e9 71 79 fe 00 08 7e"),
        ("e4m3", True, "3c000000", "55 e8 70 78 fc 00 07 7c"),
        ("e5m2", False, "385b6db7", "67 f1 75 79 fb 00 40 7b"),
        ("e5m2", True, "38800000", "66 f0 74 78 fa 00 3f 7a"),
    ],
)
def test_current_scaling(fmt, power_of_2, inverse, codes):
    x = row([0.1, -0.5, 1, 2, -3, 0, 1e-4, 2.9])
    q = Quantizer("current", format=fmt, power_of_2_scales=power_of_2).quantize(x)
    assert (bits(q.rowwise_scales), hexes(q.rowwise_data)) == (inverse, codes)


def scale_of(q: QuantizedMatrix) -> str:
    """The scale whose inverse is stored; exact for the values used here."""
    return bits(F(1) / q.rowwise_scales.numpy().ravel()[0])


def test_edge_scales():
    """Scales of tensors and blocks whose amax is 0, infinite, tiny or huge."""
    for amax in (0.0, float("inf"), float("nan")):
        for scaling in ("current", "block"):
            assert bits(Quantizer(scaling).quantize(row([amax])).rowwise_scales) == "3f800000"
    inverse = lambda text: bits(F(1) / F(from_bits(text)))  # noqa: E731
    tiny = row([1e-40])
    for options, x, scale in [
        (("current", {}), tiny, "7f7fffff"),
        (("current", {"power_of_2_scales": True}), tiny, "7f000000"),
        (("block", {}), tiny.to(BF16), "7f7f0000"),
        (("block", {"power_of_2_scales": True}), tiny.to(BF16), "7f000000"),
        (("current", {"amax_epsilon": 1e-3}), row([0.0]), "48dabfff"),
        (("current", {}), row([3e38]), "03fe13d7"),
        (("current", {"power_of_2_scales": True}), row([3e38]), "03800000"),
    ]:
        q = Quantizer(options[0], **options[1]).quantize(x)
        assert bits(q.rowwise_scales) == inverse(scale), (options, scale)


E8M0 = """0 0/0  1 119/112  1.75 119/112  1.7578125 120/113  448 127/120  451.5 128/121  57344 134/127  1e-40 0/0
3e38 247/240  inf 254/254"""


def test_e8m0_scales():
    words = E8M0.split()
    values = [*(float(v) for v in words[::2]), 2.0**-118, from_bits("43e00001")]
    codes = [*(c.split("/") for c in words[1::2]), ["1", "0"], ["128", "121"]]
    for i, fmt in enumerate(("e4m3", "e5m2")):
        q = Quantizer("mxfp8", format=fmt).quantize(torch.tensor(values).unsqueeze(1))
        assert q.rowwise_scales.ravel().tolist() == [int(c[i]) for c in codes]


def test_e8m0_codes_decode():
    """Code 0 is 2^-127, code 254 is 2^127; 255, which quantization never writes, is NaN."""
    q = Quantizer("mxfp8").quantize(torch.ones(3, 32))
    q.rowwise_scales.copy_(torch.tensor([[0], [254], [255]], dtype=torch.uint8))
    q.rowwise_data.fill_(0x38)
    first = q.dequantize()[:, 0]
    assert first[0] == 2.0**-127 and first[1] == 2.0**127 and first[2].isnan()


def test_patterns_in_blocks():
    x = torch.from_numpy(pattern(np.arange(160)).astype(F)).reshape(1, 160).to(BF16)
    q = Quantizer("block", power_of_2_scales=True).quantize(x)
    assert [bits(s) for s in q.rowwise_scales[0]] == ["3c800000"] * 2
    assert hexes(q.rowwise_data[0, :8]) == "fa d8 79 f6 68 7b f2 71"
    assert hexes(q.rowwise_data[0, 128:136]) == "fc ed 74 fa dc 78 f7 66"
    q = Quantizer("block").quantize(x)
    assert bits(q.rowwise_scales[0, 0]) == "3c649249"
    assert hexes(q.rowwise_data[0, :8]) == "fb d9 7a f8 69 7d f3 72"


def test_patterns_in_mxfp8():
    p = torch.from_numpy(pattern(np.arange(64)).astype(F)).reshape(1, 64)
    p[0, 32:] = (p[0, 32:] * 3 * 2.0**-20).to(BF16).float()
    q = Quantizer("mxfp8").quantize(p)
    assert q.rowwise_scales.tolist() == [[121, 103]]
    assert hexes(q.rowwise_data[0, :32]) == (
        "fa d8 79 f6 68 7b f2 71 fc e9 76 f9 50 7a f5 6b 7c f0 72 fb e4 78 f8 60 7a f4 6e fc ed 74 fa dc"
    )
    assert hexes(q.rowwise_data[0, 32:40]) == "75 f3 62 78 ef 6d f9 e7"
    q = Quantizer("mxfp8", format="e5m2").quantize(p)
    assert q.rowwise_scales[0, 0] == 114 and hexes(q.rowwise_data[0, :8]) == "f9 e8 78 f7 70 7a f5 74"


def test_patterns_in_nvfp4():
    p = pattern(np.arange(48)) * np.repeat([1, 2.0**-6, 2.0**-20], 16)
    q = Quantizer("nvfp4").quantize(torch.from_numpy(p.astype(F)).to(BF16).reshape(1, 48))
    assert q.rowwise_amax.item() == 5.75
    assert hexes(q.rowwise_scales) == "7e 4f 00"
    assert hexes(q.rowwise_data) == (
        "9f e6 72 4c af e6 60 3d c7 f5 69 1e d6 f3 5b 9e f7 77 7f ff f7 70 7f f7"  # the last block has scale 0
    )
    values = q.dequantize(dtype=torch.float32)[0]
    assert [bits(v) for v in values[:4]] == [bits(v) for v in (-5.75, -0.47916669, 3.8333335, -3.8333335)]
    assert (values[32:] == 0).all()


def test_pattern_after_hadamard_transform():
    x = torch.from_numpy(pattern(np.arange(16)).astype(F)).reshape(16, 1).to(BF16)
    q = Quantizer("nvfp4", random_hadamard_transform=True).quantize(x, columnwise=True)
    assert q.columnwise_amax.item() == 8.875 and q.rowwise_amax.item() == 5.75
    assert hexes(q.columnwise_scales) == "7e" and hexes(q.columnwise_data) == "41 b8 b8 21 1a 1f e5 dd"


def test_four_over_six():
    x = row([6, 4.1, 3.9, -4, 3.1, 2.9, 0.1, -0.2, 1, 1.1, -1.3, 2, 0, 0.6, -5, 4.9], BF16)
    for error, scale, codes in [("MAE", "74", "67 e6 55 80 22 4b 10 6e"), ("MSE", "79", "56 d5 44 80 11 3a 10 5d")]:
        quantizer = Quantizer("nvfp4", four_over_six=error, four_over_six_e4m3_use_256=True)
        q = quantizer.quantize(x, amax=torch.tensor([8.0]))
        assert (hexes(q.rowwise_scales), hexes(q.rowwise_data)) == (scale, codes)


BULK = [
    # scaling, fields, (rowwise data, scales), (columnwise data, scales)
    ("current", {}, ("22752cd9", None), ()),
    ("current", {"power_of_2_scales": True}, ("0cb6165e", None), ()),
    ("current", {"format": "e5m2"}, ("3a11f5f7", None), ()),
    ("current", {"format": "e5m2", "power_of_2_scales": True}, ("ee379bf5", None), ()),
    ("block", {"power_of_2_scales": True}, ("000fb768", "5b799f16"), ("6edae2c9", "24489b0f")),
    ("block", {"power_of_2_scales": True, "two_dimensional": True}, ("0cb6165e", "9f6148b6"), ()),
    ("block", {}, ("909247a1", "ca5fdff1"), ("4d85516f", "5de232d4")),
    ("block", {"two_dimensional": True}, ("22752cd9", "7ea8e230"), ()),
    ("mxfp8", {}, ("000fb768", "a164489d"), ("4d883eb0", "ce08f38e")),
    ("mxfp8", {"two_dimensional": True}, ("0cb6165e", "4c6bd82c"), ("0cb6165e", "4c6bd82c")),
    ("mxfp8", {"format": "e5m2"}, ("60891b14", "2f083245"), ("e95a7926", "0df07926")),
    ("mxfp8", {"format": "e5m2", "two_dimensional": True}, ("ee379bf5", "ae1bd905"), ()),
    ("nvfp4", {}, ("5b1151db", "fa6d60e7"), ("3175558a", "bf0ea5b8")),
    ("nvfp4", {"random_hadamard_transform": True}, ("5b1151db", "fa6d60e7"), ("540c13b3", "d639771d")),
]


@pytest.mark.parametrize(("scaling", "fields", "rowwise", "columnwise"), BULK)
def test_bulk_checksums(scaling, fields, rowwise, columnwise):
    q = Quantizer(scaling, **fields).quantize(bulk(), columnwise=True)
    crc = lambda t: reference.crc(t.numpy())  # noqa: E731
    assert crc(q.rowwise_data) == rowwise[0]
    assert rowwise[1] in (None, crc(q.rowwise_scales))
    if columnwise:
        assert (crc(q.columnwise_data), crc(q.columnwise_scales)) == columnwise
    elif scaling == "current":
        assert torch.equal(q.columnwise_data, q.rowwise_data.T)


def test_bulk_checksums_of_square_blocks_of_nvfp4():
    """The checksums are of scales repeated for each row of a block."""
    q = Quantizer("nvfp4", two_dimensional=True).quantize(bulk(), columnwise=True)
    repeated = lambda t: reference.crc(t.repeat_interleave(16, 0).numpy())  # noqa: E731
    assert (reference.crc(q.rowwise_data.numpy()), repeated(q.rowwise_scales)) == ("c5cc87b1", "200efc30")
    assert (reference.crc(q.columnwise_data.numpy()), repeated(q.columnwise_scales)) == ("3825c6fb", "0661fddc")


# ---- random tensors --------------------------------------------------------------------------------------------------

NVFP4 = [
    {},
    {"random_hadamard_transform": True},
    {"stochastic_rounding": True},
    {"random_hadamard_transform": True, "stochastic_rounding": True},
    {"two_dimensional": True},
    {"row_scaled": True},
    {"row_scaled": True, "four_over_six": "MAE"},
    *({"four_over_six": e, "four_over_six_e4m3_use_256": b} for e in ("MAE", "MSE") for b in (False, True)),
    {"four_over_six": "MAE", "two_dimensional": True},
]
QUANTIZERS = [
    *(Quantizer(s, format=f) for s in ("delayed", "current", "block", "mxfp8") for f in ("e4m3", "e5m2")),
    *(Quantizer(s, power_of_2_scales=True, amax_epsilon=e) for s in ("current", "block") for e in (0.0, 1e-3)),
    *(Quantizer("block", power_of_2_scales=p, two_dimensional=True) for p in (False, True)),
    *(Quantizer("mxfp8", format=f, two_dimensional=True) for f in ("e4m3", "e5m2")),
    *(Quantizer("nvfp4", **fields) for fields in NVFP4),
]


def random_matrix(rng: np.random.Generator, dtype: torch.dtype, rows_of_16: bool) -> torch.Tensor:
    """Ragged sizes; blocks of zeros, tiny and huge values; sometimes subnormal numbers, infinities and NaN."""
    rows, columns = rng.integers(1, 300 if rng.random() < 0.1 else 50, 2)
    if rows_of_16:
        rows = (rows + 15) // 16 * 16
    x = rng.standard_normal((rows, columns))
    if rng.random() < 0.7:  # magnitudes by block
        exponents = rng.integers(-45, 38, (rows // 8 + 1, columns // 8 + 1)).repeat(8, 0).repeat(8, 1)[:rows, :columns]
        x = x * 10.0 ** np.where(rng.random(x.shape) < rng.random(), exponents, 0)
    for value, most in (
        (0.0, 0.9),
        (-0.0, 0.5),
        (np.inf, 0.1),
        (-np.inf, 0.1),
        (np.nan, 0.1),
        (3e38, 0.1),
        (1e-42, 0.1),
    ):
        if rng.random() < 0.25:
            x = np.where(rng.random(x.shape) < rng.random() * most, value, x)
    with np.errstate(all="ignore"):
        return torch.from_numpy(x.astype(F)).to(dtype)


@pytest.mark.parametrize("count", [15, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
def test_random_tensors(quantizer, count):
    fields = quantizer.fields()
    rng = np.random.default_rng(QUANTIZERS.index(quantizer))
    dtypes = [BF16] if fields["random_hadamard_transform"] else [torch.float32, BF16, torch.float16]
    for i, dtype in zip(range(count), itertools.cycle(dtypes)):
        x = random_matrix(rng, dtype, fields["random_hadamard_transform"])
        seed, offset = int(rng.integers(2**63)), int(rng.integers(2**60))
        scale = float(F(10.0 ** rng.uniform(-6, 6))) if fields["scaling"] == "delayed" else None
        given = {} if scale is None else {"scale": torch.tensor([scale])}
        if fields["stochastic_rounding"]:
            given |= {"seed": seed, "offset": offset}
        q = quantizer.quantize(x, columnwise=not fields["row_scaled"], **given)
        assert reference.differences(q, reference.quantize(x, fields, seed, offset, scale)) == [], (i, dtype, x.shape)
    print(f"{i + 1} tensors, 0 wrong")


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
def test_dequantized_values(quantizer):
    """Code times scale, rounded once; both copies, in every dtype."""
    fields = quantizer.fields()
    x = torch.randn(48, 144, generator=torch.Generator().manual_seed(1)).to(BF16)
    given = {"scale": torch.tensor([3.0])} if fields["scaling"] == "delayed" else {}
    if fields["stochastic_rounding"]:
        given["seed"] = 1
    columnwise = not fields["row_scaled"]
    q = quantizer.quantize(x, columnwise=columnwise, **given)
    relative = {"e4m3": 2**-4, "e5m2": 2**-3, "e2m1": 0.5}[fields["format"]]
    for side in (False, True)[: 1 + columnwise]:
        values = q.dequantize(columnwise=side, dtype=torch.float32)
        assert values.shape == x.shape
        smallest = x.abs().max().item() * 0.2 if fields["format"] == "e2m1" else 0.02
        assert ((values - x).abs() <= relative * x.float().abs() + smallest).all()
        assert torch.equal(q.dequantize(columnwise=side, dtype=BF16), values.to(BF16))
    rowwise = reference.quantize(x, fields, scale=3.0 if "scale" in given else None)[0]
    if fields["scaling"] in ("delayed", "current"):
        expected = reference.decode(rowwise.data, fields["format"]) * rowwise.scales
        np.testing.assert_array_equal(q.dequantize(dtype=torch.float32).numpy(), expected)


def test_rows_split_over_threads_give_the_same_bytes():
    x = torch.randn(700, 520).to(BF16)
    quantizer = Quantizer("nvfp4", stochastic_rounding=True)
    threads, copies = torch.get_num_threads(), []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            copies.append(quantizer.quantize(x, columnwise=True, seed=7))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(copies[0].rowwise_data, copies[1].rowwise_data)
    assert torch.equal(copies[0].columnwise_data, copies[1].columnwise_data)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
def test_columnwise_copy_alone(quantizer):
    fields = quantizer.fields()
    if fields["row_scaled"]:
        return
    x = torch.randn(48, 40).to(BF16)
    given = {"scale": torch.tensor([3.0])} if fields["scaling"] == "delayed" else {}
    if fields["stochastic_rounding"]:
        given["seed"] = 1
    both = quantizer.quantize(x, columnwise=True, **given)
    alone = quantizer.quantize(x, rowwise=False, columnwise=True, **given)
    assert alone.rowwise_data is None
    assert torch.equal(alone.columnwise_data, both.columnwise_data)
    assert torch.equal(alone.columnwise_scales, both.columnwise_scales)


def test_amax_of_several_ranks():
    """Each rank quantizes its rows with the maximum of all; together they are the rows of one process."""
    x = torch.randn(64, 48).to(BF16)
    quantizer = Quantizer("nvfp4", random_hadamard_transform=True)
    parts = x[:32], x[32:]
    amax = torch.maximum(*(quantizer.amax(p) for p in parts))
    transformed = torch.maximum(*(quantizer.amax(p, transformed=True) for p in parts))
    whole = quantizer.quantize(x, columnwise=True)
    ranks = [quantizer.quantize(p, columnwise=True, amax=amax, transformed_amax=transformed) for p in parts]
    amax.zero_()  # a buffer that the caller uses again
    assert torch.equal(torch.cat([r.rowwise_data for r in ranks]), whole.rowwise_data)
    assert torch.equal(torch.cat([r.columnwise_data for r in ranks], 1), whole.columnwise_data)
    assert torch.equal(torch.cat([r.dequantize() for r in ranks]), whole.dequantize())


def test_strided_input_and_empty_matrix():
    x = torch.randn(64, 96)
    for quantizer in (Quantizer("current"), Quantizer("mxfp8"), Quantizer("nvfp4")):
        q, plain = quantizer.quantize(x.T), quantizer.quantize(x.T.contiguous())
        assert torch.equal(q.rowwise_data, plain.rowwise_data)
        empty = quantizer.quantize(torch.empty(0, 32), columnwise=True)
        assert empty.rowwise_data.numel() == 0 and empty.dequantize().shape == (0, 32)


# ---- stochastic rounding ---------------------------------------------------------------------------------------------


def test_stochastic_rounding_is_unbiased():
    x = torch.full((512, 512), 2.3).to(BF16)
    x[:, ::16] = 6  # the scale of each block is 1
    amax = torch.tensor([2688.0])
    values = Quantizer("nvfp4", stochastic_rounding=True).quantize(x, amax=amax, seed=3).dequantize()
    drawn = values[x != 6].float()
    assert set(drawn.unique().tolist()) == {2.0, 3.0}
    exact = x[0, 1].item()
    deviation = ((exact - 2) * (3 - exact) / drawn.numel()) ** 0.5
    assert abs(drawn.mean().item() - exact) < 4 * deviation


def test_draws_of_other_seeds_offsets_and_copies_differ():
    x = torch.randn(64, 64).to(BF16)
    quantizer = Quantizer("nvfp4", stochastic_rounding=True)
    draws = [quantizer.quantize(x, columnwise=True, seed=s, offset=o) for s, o in ((0, 0), (1, 0), (0, 1))]
    for a, b in itertools.combinations(draws, 2):
        assert not torch.equal(a.rowwise_data, b.rowwise_data)
        assert not torch.equal(a.columnwise_data, b.columnwise_data)
    half = torch.randn(64, 64)
    q = quantizer.quantize(half + half.T, columnwise=True, seed=0)  # symmetric: only the random numbers differ
    assert not torch.equal(q.rowwise_data, q.columnwise_data)
    again = quantizer.quantize(x, columnwise=True, seed=0)
    assert torch.equal(again.rowwise_data, draws[0].rowwise_data)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scaling", "fields", "message"),
    [
        ("fp4", {}, "expected one of delayed, current, block, mxfp8, nvfp4"),
        ("mxfp8", {"format": "e2m1"}, "does not fit"),
        ("nvfp4", {"format": "e4m3"}, "does not fit"),
        ("mxfp8", {"power_of_2_scales": True}, "require float32 scales"),
        ("current", {"two_dimensional": True}, "requires blocks"),
        ("block", {"stochastic_rounding": True}, "require E2M1"),
        ("nvfp4", {"four_over_six_e4m3_use_256": True}, "requires four_over_six"),
        ("delayed", {"power_of_2_scales": True}, "do not apply"),
        ("block", {"amax_epsilon": float("inf")}, "expected 0 or more"),
        ("block", {"amax_epsilon": -1.0}, "expected 0 or more"),
        ("nvfp4", {"four_over_six": "MAE", "stochastic_rounding": True}, "four_over_six excludes"),
        ("nvfp4", {"row_scaled": True, "random_hadamard_transform": True}, "row_scaled excludes"),
        ("nvfp4", {"two_dimensional": True, "stochastic_rounding": True}, "one-dimensional"),
    ],
)
def test_options_that_exclude_each_other_raise(scaling, fields, message):
    with pytest.raises(ValueError, match=message):
        Quantizer(scaling, **fields)


def test_misspelled_option_raises():
    with pytest.raises(TypeError, match="Did you mean 'power_of_2_scales'"):
        Quantizer("block", power_of_2_scale=True)


def test_unsuitable_inputs_raise():
    x = torch.randn(16, 16)
    for quantizer, arguments, error, message in [
        (Quantizer("current"), {"x": x.double()}, TypeError, "float32, bfloat16 or float16"),
        (Quantizer("current"), {"x": x[0]}, ValueError, "a matrix"),
        (Quantizer("delayed"), {"x": x}, ValueError, "`scale` is required"),
        (Quantizer("current"), {"x": x, "scale": torch.ones(1)}, ValueError, "`scale` is required"),
        (Quantizer("delayed"), {"x": x, "scale": torch.ones(2)}, ValueError, r"1 element\(s\)"),
        (Quantizer("delayed"), {"x": x, "scale": torch.ones(1, device="meta")}, ValueError, "on meta"),
        (Quantizer("nvfp4"), {"x": x, "amax": torch.ones(3)}, ValueError, r"1 element\(s\)"),
        (Quantizer("mxfp8"), {"x": x, "amax": torch.ones(1)}, ValueError, "is not used"),
        (Quantizer("nvfp4"), {"x": x, "transformed_amax": torch.ones(1)}, ValueError, "is not used"),
        (Quantizer("mxfp8"), {"x": x, "rowwise": False}, ValueError, "request a rowwise or a columnwise copy"),
        (Quantizer("nvfp4"), {"x": x, "seed": 1}, ValueError, "`seed` is required"),
        (Quantizer("nvfp4", stochastic_rounding=True), {"x": x}, ValueError, "`seed` is required"),
        (Quantizer("nvfp4", stochastic_rounding=True), {"x": x, "seed": 1, "offset": 2**63}, ValueError, "below 2"),
    ]:
        with pytest.raises(error, match=message):
            quantizer.quantize(**arguments)
    transform = Quantizer("nvfp4", random_hadamard_transform=True)
    with pytest.raises(TypeError, match="bfloat16"):
        transform.quantize(x, columnwise=True)
    with pytest.raises(ValueError, match="multiple of 16 rows"):
        transform.quantize(x[:5].bfloat16(), columnwise=True)
    with pytest.raises(ValueError, match="no columnwise copy"):
        Quantizer("current").quantize(x).dequantize(columnwise=True)


def test_equal_options_are_equal_quantizers():
    assert Quantizer("mxfp8") == Quantizer("mxfp8") != Quantizer("mxfp8", format="e5m2")
    assert hash(Quantizer("nvfp4")) == hash(Quantizer("nvfp4"))
    assert Quantizer(scaling="nvfp4") == Quantizer("nvfp4")
    with pytest.raises(TypeError, match="twice"):
        Quantizer("nvfp4", scaling="mxfp8")
    assert repr(Quantizer("block", two_dimensional=True)) == "Quantizer('block', two_dimensional=True)"
