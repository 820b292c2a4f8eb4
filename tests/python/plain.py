"""Every operation in plain differentiable PyTorch: the reference for weft.

`apply(op, x, *extras)` reads the options and the Parameters of a weft operation and computes the same with torch only.
Inputs in float64 give the reference result; inputs in low precision give the result of eager torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from quantization_reference import philox

import torchweft

Of = Callable[[torch.nn.Parameter], torch.Tensor]
Gemm = Callable[..., torch.Tensor]  # (x, w, number of the group)


def halves(x: torch.Tensor, interleave: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    if not interleave:
        return x.chunk(2, -1)
    blocks = x.unflatten(-1, (-1, 2, interleave))
    return blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)


def qgelu(x):
    return x * torch.sigmoid(1.702 * x)


def srelu(x):
    return F.relu(x).square()


def gelu(x):
    return F.gelu(x, approximate="tanh")


UNARY = {"GELU": gelu, "QGELU": qgelu, "ReLU": F.relu, "SReLU": srelu, "SiLU": F.silu}
GATES = {"GLU": torch.sigmoid, "GEGLU": gelu, "QGEGLU": qgelu, "ReGLU": F.relu, "SReGLU": srelu, "SwiGLU": F.silu}
SCALED = {
    "ScaledSReLU": "SReLU",
    "ScaledTanhSReLU": "TanhSReLU",
    "ScaledSwiGLU": "SwiGLU",
    "ScaledSiTUGLU": "SiTUGLU",
    "ScaledClampedQGeGLU": "ClampedSwiGLU",
}
PASS_THROUGH = ("Identity", "Quantize", "AllGather", "AllReduce", "ReduceScatter")
GLU_WITH_OPTIONS = ("SiTUGLU", "ClampedSwiGLU")
OTHERS = ("BasicLinear", "Bias", "LayerNorm", "RMSNorm", "L2Normalization", "ConstantScale", "Reshape", "Dropout")
ATTENTION = ("DotProductAttention", "CrossDotProductAttention")
WITH_EXTRAS = ("AddExtraInput", "MakeExtraOutput", "GroupedLinear", "RotaryEmbedding", *ATTENTION)
WRITTEN_OUT = {*UNARY, *GATES, *SCALED, *PASS_THROUGH, *GLU_WITH_OPTIONS, *OTHERS, *WITH_EXTRAS}


def bounded(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """As torch.clamp, whose derivative at the limits is 0 since torch 2.14; this one has 1."""
    return torch.where((x >= low) & (x <= high), x, x.detach().clamp(low, high))


def activation(name: str, op, x: torch.Tensor) -> torch.Tensor:
    if name == "GELU":
        return F.gelu(x, approximate=op.approximate)
    if name == "TanhSReLU":
        return srelu(op.tanh_clamp_scale * torch.tanh(x / op.tanh_clamp_scale))
    if name in UNARY:
        return UNARY[name](x)
    a, b = halves(x, getattr(op, "glu_interleave_size", None))
    if name in GATES:
        return GATES[name](a) * b
    if name == "SiTUGLU":
        return op.beta1 * torch.tanh(a / op.beta1) * torch.sigmoid(a) * (op.beta2 * torch.tanh(b / op.beta2))
    if name == "ClampedSwiGLU":
        gate, linear = bounded(a, -torch.inf, op.limit), bounded(b, -op.limit, op.limit)
        return gate * torch.sigmoid(op.alpha * gate) * (linear + op.glu_linear_offset)
    raise NotImplementedError(name)


def reference_is_op(op, x: torch.Tensor, *extras: torch.Tensor, of: Of) -> tuple[torch.Tensor, tuple]:
    """For an operation not written out here: its own float64 result, which gradcheck verifies."""
    out = torch.func.functional_call(op, {name: of(p) for name, p in op.named_parameters()}, (x, *extras))
    return (out[0], out[1:]) if isinstance(out, tuple) else (out, ())


def norm(name: str, op, x: torch.Tensor, of: Of) -> torch.Tensor:
    gamma = of(op.weight) + 1 if op.zero_centered_gamma else of(op.weight)
    if name == "LayerNorm":
        return F.layer_norm(x, op.normalized_shape, gamma, None if op.bias is None else of(op.bias), op.eps)
    return F.rms_norm(x, op.normalized_shape, gamma, op.eps)


def dropout(op, x: torch.Tensor) -> torch.Tensor:
    """Draws the mask as weft does, so that both drop the same values for the same seed."""
    if not op.training or op.p == 0:
        return x
    if op.p == 1:
        return x * 0
    return x * torch.empty(x.shape, dtype=torch.bool).bernoulli_(1 - op.p) / (1 - op.p)


def some_splits(groups: int, rows: int) -> torch.Tensor:
    """Unequal split sizes that sum to `rows`; the second one is 0."""
    sizes = [0 if g == 1 else rows // (groups + g) for g in range(groups)]
    sizes[-1] += rows - sum(sizes)
    return torch.tensor(sizes)


def members(op, kind: str, of: Of) -> list[torch.Tensor]:
    """Returns the weight, or the bias, of each group."""
    if op._parameters.get(kind) is not None:
        return list(of(op._parameters[kind]).unbind(0))
    return [of(op._parameters[f"{kind}{g}"]) for g in range(op.num_groups)]


def plain_gemm(x: torch.Tensor, w: torch.Tensor, group: int = 0) -> torch.Tensor:
    return F.linear(x, w)


def grouped_linear(
    op, x: torch.Tensor, splits: torch.Tensor, scales: torch.Tensor | None = None, *, of: Of, gemm: Gemm = plain_gemm
):
    """One linear per group of rows; rows after the last group give 0."""
    rows = x.reshape(-1, op.in_features)
    sizes, tail = splits.tolist(), rows.shape[0] - int(splits.sum())
    *parts, _ = rows.split([*sizes, tail])
    parts = [gemm(part, w, g) for g, (part, w) in enumerate(zip(parts, members(op, "weight", of), strict=True))]
    if op._description().fields()["bias"]:
        *factors, _ = (rows.new_ones(rows.shape[0]) if scales is None else scales.reshape(-1)).split([*sizes, tail])
        parts = [y + c[:, None] * b for y, c, b in zip(parts, factors, members(op, "bias", of), strict=True)]
    return torch.cat([*parts, rows.new_zeros(tail, op.out_features)]).reshape(*x.shape[:-1], op.out_features)


def packed_sequences(rows: int) -> torch.Tensor:
    """Offsets of sequences of unequal lengths in `rows` rows, one of them empty."""
    return torch.tensor([0, rows // 3, rows // 3, rows], dtype=torch.int32)


def positions(op, x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Returns the position of each token in its sequence, in the leading shape of x."""
    lead = x.shape[:-1]
    if cu_seqlens is not None:
        starts = cu_seqlens.long().diff().clamp(min=0)
        return (torch.arange(math.prod(lead)) - cu_seqlens[:-1].long().repeat_interleave(starts)).reshape(lead)
    if not lead:
        return torch.tensor(0)
    dim = 0 if op.qkv_format == "sbhd" else len(lead) - 1
    return torch.arange(lead[dim]).reshape([-1 if i == dim else 1 for i in range(len(lead))]).expand(lead)


def rotary(op, x: torch.Tensor, *extras: torch.Tensor) -> torch.Tensor:
    """x·cos + rotate(x)·sin for each rotated head, with both tables repeated for the two channels of a pair."""
    d = op.kv_channels
    n = op.rotary_dim or d
    at = positions(op, x, extras[-1] if op.qkv_format == "thd" else None)
    if op.rotary_base is None:
        cos, sin = (table[at] for table in extras[:2])
    else:
        frequencies = op.rotary_base ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)
        cos, sin = (f(at.double()[..., None] * frequencies).to(x.dtype) for f in (torch.cos, torch.sin))
    repeat = (lambda t: t.repeat_interleave(2, -1)) if op.interleaved else (lambda t: torch.cat([t, t], -1))
    cos, sin = repeat(cos), repeat(sin)

    def rotated(head: torch.Tensor) -> torch.Tensor:
        values, rest = head[..., :n], head[..., n:]
        if op.interleaved:
            turned = torch.stack([-values[..., 1::2], values[..., ::2]], -1).flatten(-2)
        else:
            turned = torch.cat([-values[..., n // 2 :], values[..., : n // 2]], -1)
        return torch.cat([values * cos + turned * sin, rest], -1)

    heads, groups = op.num_attention_heads, op.num_gqa_groups or op.num_attention_heads
    if op.qkv_layout is None:
        is_value = [False] * heads
    elif op.qkv_layout == "concatenated":
        is_value = [False] * (heads + groups) + [True] * groups
    else:
        is_value = ([False] * (heads // groups + 1) + [True]) * groups
    parts = x.unflatten(-1, (len(is_value), d)).unbind(-2)
    return torch.cat([p if value else rotated(p) for p, value in zip(parts, is_value, strict=True)], -1)


def cross_entropy(op, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """torch's loss of each row, plus the z-loss, in float32 or float64; then the reduction."""
    logits, rows = x.reshape(-1, x.shape[-1]), targets.reshape(-1).long()
    logits = logits if x.dtype == torch.float64 else logits.float()
    options = {"ignore_index": op.ignore_index, "label_smoothing": op.label_smoothing}
    loss = F.cross_entropy(logits, rows, **options, reduction="none")
    if op.z_loss:
        loss = loss + (op.z_loss * logits.logsumexp(-1).square()).masked_fill(rows == op.ignore_index, 0)
    if op.reduction == "none":
        return loss.reshape(targets.shape)
    return loss.sum() / (rows != op.ignore_index).sum() if op.reduction == "mean" else loss.sum()


def split_heads(op, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, k and v of [batch, s, width], each [batch, heads, s, channels]; keys are repeated for queries."""
    heads, groups, d = op.num_attention_heads, op.num_gqa_groups or op.num_attention_heads, op.kv_channels
    if op.qkv_layout == "concatenated":
        q, k, v = (t.unflatten(-1, (-1, d)) for t in x.split([heads * d, groups * d, groups * d], -1))
    else:
        grouped = x.unflatten(-1, (groups, heads // groups + 2, d))
        q, k, v = grouped[..., :-2, :].flatten(-3, -2), grouped[..., -2, :], grouped[..., -1, :]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return q, k.repeat_interleave(heads // groups, 1), v.repeat_interleave(heads // groups, 1)


def visible(op, queries: int, keys: int | None = None) -> torch.Tensor:
    """Returns the matrix of which query sees which key. Positions count from the first key with the mask "causal";
    otherwise the last query is at the last key."""
    keys = queries if keys is None else keys
    shift = 0 if op.attn_mask_type == "causal" else keys - queries
    distance = torch.arange(keys) - (torch.arange(queries)[:, None] + shift)
    left, right = op.window_size or (-1, -1)
    right = right if op.attn_mask_type == "no_mask" else 0
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


def batch_first(op, x: torch.Tensor) -> torch.Tensor:
    """Returns [batch, s, width] of an activation [*, width]."""
    if x.dim() == 1:
        return x[None, None]
    if op.qkv_format == "sbhd":
        return x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1]).transpose(0, 1)
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def dropout_factors(op, seed: torch.Tensor, first: int, scores: torch.Tensor) -> torch.Tensor:
    """Returns 0 or 1/(1-p) for each of the scores [batch, heads, s, t] of the sequences `first`, `first` + 1, …: random
    number j % 4 of Philox with the counter (j / 4, 0, query, sequence and head) is below p or not."""
    batch, heads, queries, keys = scores.shape
    j = np.arange(keys)
    query = np.arange(queries)[:, None]
    sequence_and_head = (np.arange(first, first + batch)[:, None] * heads + np.arange(heads))[..., None, None]
    counter = np.broadcast_arrays(j // 4, 0, query, sequence_and_head)
    drawn = np.choose(np.broadcast_to(j % 4, scores.shape), philox(counter, seed.item()))
    kept = torch.from_numpy(drawn >= round(op.attention_dropout * 2**32))
    return kept.to(scores.dtype) * (1 / (1 - op.attention_dropout) if op.attention_dropout < 1 else 0)


def softmax_attention(
    op, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seed: torch.Tensor | None = None, first: int = 0
) -> torch.Tensor:
    """Attention of [batch, heads, s, channels]; 0 for a query that sees no key. `seed`: of the dropout; `first`: number
    of the first sequence."""
    scale = op.kv_channels**-0.5 if op.softmax_scale is None else op.softmax_scale
    seen = visible(op, q.shape[-2], k.shape[-2])
    scores = q @ k.transpose(-1, -2) * scale
    p = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
    return (p if seed is None else p * dropout_factors(op, seed, first, p)) @ v


def attention_seed(op) -> torch.Tensor | None:
    """Draws the seed of the dropout as weft does; None without dropout."""
    return torch.empty((), dtype=torch.int64).random_() if op.training and op.attention_dropout > 0 else None


def attention(op, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None, inner=softmax_attention) -> torch.Tensor:
    """Attention of each sequence; `inner(op, q, k, v)` computes that of [batch, heads, s, channels]."""
    seed, width = attention_seed(op), op.num_attention_heads * op.kv_channels
    if x.numel() == 0:
        return x[..., :width].clone()  # no view of x

    def compute(sequences: torch.Tensor, first: int = 0) -> torch.Tensor:
        dropout = () if seed is None else (seed, first)
        return inner(op, *split_heads(op, sequences), *dropout).transpose(1, 2).flatten(2)

    if cu_seqlens is not None:
        parts = x.reshape(-1, x.shape[-1]).split(cu_seqlens.diff().tolist())
        ys = [compute(part[None], i)[0] for i, part in enumerate(parts) if len(part)]
        return torch.cat(ys).reshape(*x.shape[:-1], width)
    y = compute(batch_first(op, x))
    return (y.transpose(0, 1) if op.qkv_format == "sbhd" else y).reshape(*x.shape[:-1], width)


def cross_attention(
    op,
    x: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each sequence of queries to one of keys and values."""
    seed = attention_seed(op)
    repeated = op.num_attention_heads // (op.num_gqa_groups or op.num_attention_heads)

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int = 0) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, op.kv_channels)).transpose(1, 2) for t in (q, k, v))
        k, v = k.repeat_interleave(repeated, 1), v.repeat_interleave(repeated, 1)
        return softmax_attention(op, q, k, v, seed, first).transpose(1, 2).flatten(2)

    if cu_seqlens_q is not None:
        queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_kv.diff().tolist()
        parts = [t.reshape(-1, t.shape[-1]).split(n) for t, n in ((x, queries), (key, keys), (value, keys))]
        ys = [compute(*(t[None] for t in part), i)[0] for i, part in enumerate(zip(*parts, strict=True))]
        return torch.cat(ys).reshape(x.shape)
    y = compute(*(batch_first(op, t) for t in (x, key, value)))
    return (y.transpose(0, 1) if op.qkv_format == "sbhd" else y).reshape(x.shape)


def apply(
    op, x: torch.Tensor, *extras: torch.Tensor, of: Of = lambda p: p, gemm: Gemm = plain_gemm
) -> tuple[torch.Tensor, tuple]:
    """Returns (output, extra outputs) of one operation. `of` returns the tensor to use for a Parameter, `gemm` the
    product x wᵀ of a linear."""
    if isinstance(op, torchweft.ops.Linear):
        bias = None if op.bias is None else of(op.bias)
        if gemm is plain_gemm:
            return F.linear(x, of(op.weight), bias), ()
        y = gemm(x, of(op.weight))
        return (y if bias is None else y + bias), ()
    name = type(op).__name__
    if name == "CrossEntropy":
        return cross_entropy(op, x, *extras), ()
    if name not in WRITTEN_OUT:
        return reference_is_op(op, x, *extras, of=of)
    if name == "BasicLinear":
        return gemm(x, of(op.weight)), ()
    if name == "GroupedLinear":
        return grouped_linear(op, x, *extras, of=of, gemm=gemm), ()
    if name == "RotaryEmbedding":
        return rotary(op, x, *extras), ()
    if name == "DotProductAttention":
        return attention(op, x, *extras), ()
    if name == "CrossDotProductAttention":
        return cross_attention(op, x, *extras), ()
    if name == "Bias":
        return x + of(op.bias), ()
    if name in ("LayerNorm", "RMSNorm"):
        return norm(name, op, x, of), ()
    if name == "L2Normalization":
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + op.eps), ()
    if name in PASS_THROUGH:
        return x, ()
    if name == "ConstantScale":
        return x * op.scale, ()
    if name == "Reshape":
        return x.reshape(op.shape), ()
    if name == "Dropout":
        return dropout(op, x), ()
    if name == "AddExtraInput":
        return extras[0] + x, ()
    if name == "MakeExtraOutput":
        return x, (x,)
    if name in SCALED:
        return activation(SCALED[name], op, x) * extras[0].reshape(*x.shape[:-1], 1), ()
    return activation(name, op, x), ()
