"""Quantization written out slowly in NumPy: casts search the grid of values, scales are computed block by block.

float32 arithmetic with one rounding per operation, as the formulas of docs/quantization.md say.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import torch

F = np.float32
MAX = {"e4m3": F(448), "e5m2": F(57344), "e2m1": F(6)}
FLT_MAX = np.finfo(F).max
SIGNS = np.array([-1 if 0xD7E8 >> i & 1 else 1 for i in range(16)], F)
HADAMARD = np.array([[(-1) ** bin(r & c).count("1") for c in range(16)] for r in range(16)], F)


def decode(codes: np.ndarray, fmt: str) -> np.ndarray:
    """The values of codes."""
    exponent_bits, mantissa_bits, bias = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}[fmt]
    codes = codes.astype(np.int64)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = codes >> mantissa_bits & ((1 << exponent_bits) - 1)
    sign = np.where(codes >> (exponent_bits + mantissa_bits) & 1, -1.0, 1.0)
    normal = (1 + mantissa / 2.0**mantissa_bits) * 2.0 ** (exponent - bias)
    value = sign * np.where(exponent == 0, mantissa * 2.0 ** (1 - bias - mantissa_bits), normal)
    if fmt == "e4m3":
        value = np.where(codes & 0x7F == 0x7F, np.nan, value)
    if fmt == "e5m2":
        value = np.where(codes & 0x7F == 0x7C, sign * np.inf, np.where(codes & 0x7F > 0x7C, np.nan, value))
    return value.astype(F)


def cast(y: np.ndarray, fmt: str) -> np.ndarray:
    """The codes of the nearest values, ties to the even code; saturates."""
    nan_code = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 7}[fmt]
    sign_bit = 8 if fmt == "e2m1" else 0x80
    grid = decode(np.arange(sign_bit), fmt).astype(np.float64)
    grid = grid[np.isfinite(grid)]  # ascending
    size = np.minimum(np.abs(np.where(np.isnan(y), 0, y)).astype(np.float64), grid[-1])
    above = np.searchsorted(grid, size)  # grid[above - 1] < size <= grid[above]
    below = np.maximum(above - 1, 0)
    to_above, to_below = grid[above] - size, size - grid[below]
    tie = np.where(above % 2 == 0, above, below)
    code = np.where(to_above < to_below, above, np.where(to_above > to_below, below, tie))
    code = np.where(size == grid[above], above, code)
    return np.where(np.isnan(y), nan_code, code | np.where(np.signbit(y), sign_bit, 0)).astype(np.uint8)


def cast_stochastic(y: np.ndarray, u: np.ndarray) -> np.ndarray:
    """E2M1 codes of |y| + u·step, rounded down to the grid."""

    def step(a: np.ndarray) -> np.ndarray:
        return np.where(a < 2, 0.5, np.where(a < 4, 1.0, 2.0))

    size = np.abs(np.where(np.isnan(y), 0, y)).astype(np.float64)
    size = np.minimum(size, 8)  # far above the largest value
    t = (size + u * step(size)).astype(F).astype(np.float64)  # rounded once
    values = np.minimum(np.floor(t / step(t)) * step(t), 6).astype(F)
    code = np.searchsorted(decode(np.arange(8), "e2m1"), values)
    return np.where(np.isnan(y), 7, code | np.where(np.signbit(y), 8, 0)).astype(np.uint8)


def amax_of(x: np.ndarray) -> np.float32:
    finite_or_inf = np.abs(x[~np.isnan(x)])
    return F(finite_or_inf.max()) if finite_or_inf.size else F(0)


def float32_scale(amax, fmt: str, epsilon: float, limit: np.float32, power_of_2: bool) -> np.ndarray:
    amax = np.maximum(amax, F(epsilon))
    scale = MAX[fmt] / amax
    scale = np.where(np.isinf(scale), limit, scale)
    if power_of_2:
        mantissa, exponent = np.frexp(scale)
        scale = np.ldexp(F(0.5) + F(0) * mantissa, exponent)
    return np.where((amax == 0) | ~np.isfinite(amax), F(1), scale).astype(F)


def e8m0_codes(amax: np.ndarray, fmt: str) -> np.ndarray:
    """Codes of the smallest powers of two that are not below amax/max."""
    v = amax * (F(1) / MAX[fmt])
    mantissa, exponent = np.frexp(np.where(np.isfinite(v), v, 1))  # v = mantissa·2^exponent, mantissa in [0.5, 1)
    code = exponent + 127 - (mantissa == 0.5)
    return np.where(np.isinf(v), 254, np.where(v <= F(2.0**-127), 0, np.minimum(code, 254)))


def tensor_scale(amax: np.ndarray, bound: int) -> np.ndarray:
    scale = np.minimum(F(6 * bound) / amax, FLT_MAX)
    return np.where((amax == 0) | (scale == 0), F(1), scale).astype(F)


def e4m3_factor(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.minimum(F(1) / (decode(codes, "e4m3") * (F(1) / scale)), FLT_MAX)


def four_over_six(
    x: np.ndarray, blocks: np.ndarray, largest: np.ndarray, amax, bound: int, squared: bool
) -> np.ndarray:
    """Codes of the better scales of blocks [rows, down, columns, 16] of x with maxima `largest`. Errors are added from
    left to right, then by halves of the rows of a block."""
    scale = tensor_scale(amax, bound)
    inside = np.pad(np.ones(x.shape, bool), [(0, n - m) for n, m in zip(padded_shape(blocks), x.shape, strict=True)])
    base = largest / F(6) * scale
    errors, codes = [], []
    for factor in (F(1), F(1.5)):
        code = cast(np.minimum(factor * base, F(448)), "e4m3")
        factors, values = e4m3_factor(code, scale)[:, None, :, None], decode(code, "e4m3")[:, None, :, None]
        values = decode(cast(blocks * factors, "e2m1"), "e2m1") * values
        d = values * np.reshape(amax, (-1, 1, 1, 1)) / F(6 * bound) - blocks
        d = np.where(inside.reshape(blocks.shape), d * d if squared else np.abs(d), F(0))
        of_rows = np.zeros(d.shape[:3], F)
        for column in range(d.shape[3]):
            of_rows = of_rows + d[..., column]
        while of_rows.shape[1] > 1:
            of_rows = of_rows[:, : of_rows.shape[1] // 2] + of_rows[:, of_rows.shape[1] // 2 :]
        errors.append(of_rows[:, 0])
        codes.append(code)
    return np.where(errors[1] < errors[0], codes[1], codes[0])


def padded_shape(blocks: np.ndarray) -> tuple[int, int]:
    rows, down, columns, width = blocks.shape
    return rows * down, columns * width


def hadamard(x: np.ndarray) -> np.ndarray:
    """[M, K] transformed along M in groups of 16, summed by halves and rounded to bfloat16."""
    y = [v * s for v, s in zip(np.moveaxis(x.reshape(-1, 16, x.shape[1]), 1, 0), SIGNS, strict=True)]
    for stride in (1, 2, 4, 8):
        y = [y[i ^ stride] - y[i] if i & stride else y[i] + y[i + stride] for i in range(16)]
    transformed = np.stack(y, 1).reshape(x.shape) * F(0.25)
    return torch.from_numpy(transformed).bfloat16().float().numpy()


def philox(counter: list[np.ndarray], seed: int) -> list[np.ndarray]:
    mask = np.uint64(0xFFFFFFFF)
    c = [np.asarray(v, np.uint64) for v in counter]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            p1 >> np.uint64(32) ^ c[1] ^ np.uint64(key[0]),
            p1 & mask,
            p0 >> np.uint64(32) ^ c[3] ^ np.uint64(key[1]),
            p0 & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def uniforms(rows: int, columns: int, columnwise: bool, seed: int, offset: int) -> np.ndarray:
    """The random number of each element of a matrix."""
    i, j = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    zero = np.zeros_like(i)
    number = i % 8 if columnwise else j // 16 % 8
    words = philox(
        [
            j if columnwise else j // 128 * 16 + j % 16,
            i // 8 if columnwise else i,
            zero + (offset & 0xFFFFFFFF),
            zero + (offset >> 32 | columnwise << 31),
        ],
        seed,
    )
    word = np.choose(number // 2, words).astype(np.uint64)
    return ((word >> (number % 2 * 16).astype(np.uint64) & np.uint64(0xFFFF)).astype(np.float64) + 0.5) / 65536


@dataclass
class Copy:
    data: np.ndarray  # codes, not packed
    scales: np.ndarray
    amax: np.ndarray | None = None


def quantize_rows(
    x: np.ndarray, fields: dict, limit: np.float32, u: np.ndarray | None, amax: np.ndarray | None
) -> Copy:
    """Quantizes blocks along the last dimension; `amax`: of the tensor or its rows (nvfp4)."""
    fmt, scaling = fields["format"], fields["scaling"]
    block = {"block": 128, "mxfp8": 32, "nvfp4": 16}[scaling]
    down = block if fields["two_dimensional"] else 1
    rows, columns = x.shape
    padded = np.pad(x, [(0, -rows % down), (0, -columns % block)])
    blocks = padded.reshape(padded.shape[0] // down, down, padded.shape[1] // block, block)
    largest = np.fmax.reduce(np.fmax.reduce(np.abs(blocks), 3), 1)
    largest = np.where(np.isnan(largest), F(0), largest)
    if scaling == "block":
        factors = float32_scale(largest, fmt, fields["amax_epsilon"], limit, fields["power_of_2_scales"])
        scales = F(1) / factors
    elif scaling == "mxfp8":
        scales = e8m0_codes(largest, fmt).astype(np.uint8)
        factors = (2.0 ** (127.0 - scales)).astype(F)
    else:
        bound = 256 if fields["four_over_six_e4m3_use_256"] else 448
        scale = tensor_scale(amax.reshape(-1, 1), bound)
        scales = cast(np.minimum(largest * (scale * (F(1) / F(6))), FLT_MAX), "e4m3")
        if fields["four_over_six"] != "none":
            squared = fields["four_over_six"] == "MSE"
            scales = four_over_six(x, blocks, largest, amax.reshape(-1, 1), bound, squared)
        factors = e4m3_factor(scales, scale)
    scaled = x * factors.repeat(down, 0).repeat(block, 1)[:rows, :columns]
    return Copy(cast(scaled, fmt) if u is None else cast_stochastic(scaled, u), scales, amax)


def pack(codes: np.ndarray) -> np.ndarray:
    """Two codes per byte, the first one in the low half."""
    codes = np.pad(codes, [(0, 0), (0, codes.shape[1] % 2)])
    return codes[:, ::2] | codes[:, 1::2] << 4


def quantize(x: torch.Tensor, fields: dict, seed: int = 0, offset: int = 0, scale: float | None = None):
    """The rowwise and the columnwise copy of a matrix; None for a copy that does not exist."""
    with np.errstate(all="ignore"):
        values = x.float().numpy()
        limit = F(torch.finfo(x.dtype).max)
        scaling, fmt = fields["scaling"], fields["format"]
        if scaling in ("delayed", "current"):
            amax = amax_of(values)
            s = (
                F(scale)
                if scale is not None
                else float32_scale(amax, fmt, fields["amax_epsilon"], FLT_MAX, fields["power_of_2_scales"])
            )
            codes, inverse = cast(values * s, fmt), np.array([F(1) / s])
            amax = np.array([amax])
            return Copy(codes, inverse, amax), Copy(codes.T, inverse, amax)
        u = [None, None]
        if fields["stochastic_rounding"]:
            u = [uniforms(*values.shape, columnwise, seed, offset) for columnwise in (False, True)]
        turned = hadamard(values) if fields["random_hadamard_transform"] else values
        if scaling == "nvfp4":
            row_amax = (
                np.array([amax_of(r) for r in values], F) if fields["row_scaled"] else np.array([amax_of(values)])
            )
            column_amax = np.array([amax_of(turned)])
        else:
            row_amax = column_amax = None
        rowwise = quantize_rows(values, fields, limit, u[0], row_amax)
        if fields["row_scaled"]:
            columnwise = None
        elif fields["two_dimensional"]:
            columnwise = Copy(rowwise.data.T, rowwise.scales.T, column_amax)
        else:
            columnwise = quantize_rows(turned.T, fields, limit, None if u[1] is None else u[1].T, column_amax)
        if scaling == "mxfp8":  # stored as the matrix is
            columnwise = Copy(columnwise.data.T, columnwise.scales.T)
        if fmt == "e2m1":
            for copy in filter(None, (rowwise, columnwise)):
                copy.data = pack(copy.data)
        return rowwise, columnwise


def differences(q, expected) -> list[str]:
    """The fields in which a matrix differs from (rowwise, columnwise) of the reference."""
    found = []
    for name, copy in zip(("rowwise", "columnwise"), expected, strict=True):
        for field in ("data", "scales", "amax"):
            ours, theirs = getattr(q, f"{name}_{field}"), None if copy is None else getattr(copy, field)
            if ours is None and theirs is None:
                continue
            if ours is None or theirs is None or ours.numpy().tobytes() != np.ascontiguousarray(theirs).tobytes():
                found.append(f"{name}_{field}")
    return found


def crc(array: np.ndarray) -> str:
    return f"{zlib.crc32(np.ascontiguousarray(array).tobytes()):08x}"
