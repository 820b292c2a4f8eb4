"""DotProductAttention against float64 arithmetic and torch's SDPA: random cases, dropout, what is saved."""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import plain
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import torchweft
from torchweft import _C, ops

QUICK, ALL = 60, 300
LENGTHS = (1, 2, 31, 33, 64, 100)


def attention(*args: Any, **options: Any) -> ops.DotProductAttention:
    """Of (sequence, batch, width) with the heads group by group, unless the options say otherwise."""
    return ops.DotProductAttention(*args, **{"qkv_format": "sbhd", "qkv_layout": "group_interleaved", **options})


def width(op) -> int:
    return (op.num_attention_heads + 2 * (op.num_gqa_groups or op.num_attention_heads)) * op.kv_channels


def activations(op, *lead: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*lead, width(op), generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


# ---- random cases -------------------------------------------------------------------------------------------------


def random_case(seed: int) -> tuple[Any, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Returns an operation, its input and its extra inputs."""
    rng = random.Random(seed)
    groups = rng.choice([1, 1, 2, 3])
    length = rng.choice(LENGTHS)
    options = {
        "num_attention_heads": groups * rng.choice([1, 1, 2, 4]),
        "kv_channels": rng.choice([32, 64, 64, 80, 128, 256, 8, 10]),
        "num_gqa_groups": groups,
        "attn_mask_type": rng.choice(["causal", "causal", "no_mask", "causal_bottom_right"]),
        "window_size": rng.choice([None, None, None, (1, 1), (0, 0), (7, -1), (-1, 3), (40, 0), (1000, 1000)]),
        "softmax_scale": rng.choice([None, None, 0.3, 1.0, -0.2]),
        "qkv_format": rng.choice(["sbhd", "bshd", "thd"]),
        "qkv_layout": rng.choice(["group_interleaved", "concatenated"]),
    }
    op = attention(**options)
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.bfloat16, torch.float16])
    batch = rng.choice([1, 2, 3])
    if op.qkv_format == "thd":
        lengths = torch.tensor([0, length, *(rng.choice([0, 1, 5, length]) for _ in range(batch))])
        offsets = lengths.cumsum(0).to(rng.choice([torch.int32, torch.int64]))
        return op, activations(op, int(offsets[-1]), dtype=dtype, seed=seed), (offsets,)
    lead = (length, batch) if op.qkv_format == "sbhd" else (batch, length)
    return op, activations(op, *lead, dtype=dtype, seed=seed), ()


def sdpa(op, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's SDPA in the dtype of q, causal by its own option where there is no window."""
    plain_causal = op.attn_mask_type != "no_mask" and op.window_size is None
    everything = op.attn_mask_type == "no_mask" and op.window_size is None
    mask = None if plain_causal or everything else plain.visible(op, q.shape[-2])
    scale = op.softmax_scale
    if scale is not None and scale < 0:  # torch multiplies the -inf of masked scores by it
        q, scale = -q, -scale
    repeated = op.num_attention_heads // (op.num_gqa_groups or op.num_attention_heads)
    k, v = k[:, ::repeated], v[:, ::repeated]
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=plain_causal, scale=scale, enable_gqa=repeated > 1)


def result(run, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = run(x)
    return y.detach(), torch.autograd.grad(y, x, dy.to(y.dtype))[0]


def parts_of_gradient(op, dx: torch.Tensor) -> list[torch.Tensor]:
    """Returns dq, dk and dv: their errors are compared one by one."""
    q, k, v = plain.split_heads(op, dx.reshape(1, -1, dx.shape[-1]))
    repeated = op.num_attention_heads // op.num_gqa_groups
    return [q, k[:, ::repeated], v[:, ::repeated]]


def check_case(seed: int) -> None:
    op, x, extras = random_case(seed)
    y_shape = (*x.shape[:-1], op.num_attention_heads * op.kv_channels)
    dy = torch.randn(y_shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64).to(x.dtype)
    got = result(lambda t: op(t, *extras), x, dy)
    exact_x = x.detach().double().requires_grad_()
    exact = result(lambda t: plain.attention(op, t, *extras), exact_x, dy)
    eager_x = x.detach().clone().requires_grad_()
    eager = result(lambda t: plain.attention(op, t, *extras, inner=sdpa), eager_x, dy)
    assert got[0].dtype == got[1].dtype == x.dtype
    ours, truth, theirs = ([y, *parts_of_gradient(op, dx)] for y, dx in (got, exact, eager))
    for name, a, b, c in zip(("y", "dq", "dk", "dv"), ours, truth, theirs, strict=True):
        error, eager_error = (a.double() - b).norm().item(), (c.double() - b).norm().item()
        # In float32 both compute exp(score - logsumexp) from rounded scores, so either may be ahead by chance.
        # The AMX tier has up to 1.07 of the error in a few cases.
        on_amx = x.dtype == torch.bfloat16 and _C.machine_tier() == "amx"
        factor = 2 if x.dtype == torch.float32 else 1.1 if on_amx else 1.02
        rounding = torch.finfo(x.dtype).eps / math.sqrt(12) * b.norm().item()
        # Of one key the exact dq is 0: what is left is the float32 rounding of two terms, about scale ‖k‖ ‖dy‖ 2⁻²⁴.
        allowed = max(factor * eager_error, factor * rounding, 1e-5)
        assert error <= allowed, f"case {seed}, {op}, {tuple(x.shape)} {x.dtype}, {name}: {error}, torch {eager_error}"


@pytest.mark.parametrize("block", range(QUICK // 20))
def test_random_cases_are_as_exact_as_sdpa(block):
    for seed in range(20 * block, 20 * block + 20):
        check_case(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(QUICK // 20, ALL // 20))
def test_more_random_cases_are_as_exact_as_sdpa(block):
    for seed in range(20 * block, 20 * block + 20):
        check_case(seed)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("options", ({}, {"attn_mask_type": "no_mask"}, {"window_size": (1000, 0)}), ids=str)
@pytest.mark.parametrize("part", ("query", "key", "infinite query"))
def test_rows_that_see_nan_scores_are_nan(part, options, dtype):
    """torch's SDPA kernel treats a NaN score as masked, and gives 0 if it finds no other."""
    op = attention(2, 8, qkv_format="sbhd", qkv_layout="concatenated", **options)
    x = activations(op, 600, 2, dtype=dtype).detach()
    query, key = slice(8, 16), slice(24, 32)  # of head 1
    for rows in (slice(0, 600), slice(3, 4)):  # torch's kernel reads blocks of 512 keys
        bad = x.clone()
        bad[rows, 1, query if "query" in part else key] = math.inf if "infinite" in part else math.nan
        if "infinite" in part:
            bad[:, 1, key] = 0  # infinity times zero
        y, expected = op(bad), plain.attention(op, bad.double())
        assert torch.equal(y.isnan(), expected.isnan()) and y[:, 1, 8:].isnan().any()
        torch.testing.assert_close(y[:, 0], op(x)[:, 0], rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("options", ({}, {"window_size": (100, 0)}), ids=str)
def test_long_sequence(options):
    op = attention(2, 64, num_gqa_groups=1, **options)
    x = activations(op, 4097, 1, dtype=torch.float32)
    dy = torch.randn(4097, 1, 128)
    got = result(op, x, dy)
    exact = result(lambda t: plain.attention(op, t), x.detach().double().requires_grad_(), dy)
    for a, b in zip(got, exact, strict=True):
        assert (a.double() - b).norm() <= 2e-6 * b.norm()


# ---- gradients in float64 -----------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"attn_mask_type": "no_mask"},
    {"attn_mask_type": "causal_bottom_right"},
    {"window_size": (1, 0)},
    {"window_size": (2, 1), "attn_mask_type": "no_mask"},
    {"window_size": (-1, 1), "attn_mask_type": "no_mask"},
    {"softmax_scale": 0.3},
    {"attention_dropout": 0.4},
    {"attention_dropout": 0.4, "window_size": (2, 2), "attn_mask_type": "no_mask"},
]


@pytest.mark.parametrize("layout", ("group_interleaved", "concatenated"))
@pytest.mark.parametrize("qkv_format", ("sbhd", "bshd", "thd"))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_match_finite_differences(options, qkv_format, layout):
    op = attention(4, 3, num_gqa_groups=2, qkv_format=qkv_format, qkv_layout=layout, **options)
    x = activations(op, *((7,) if qkv_format == "thd" else (5, 2)))
    extras = [torch.tensor([0, 4, 4, 5, 7])] * (qkv_format == "thd")

    def run(t):
        torch.manual_seed(3)  # the same dropped probabilities each time
        return op(t, *extras)

    assert torch.autograd.gradcheck(run, x, fast_mode=False)


@pytest.mark.parametrize("options", OPTIONS[:7], ids=str)
@pytest.mark.parametrize("length", (1, 2, 9))
def test_float64_equals_softmax_of_scores(options, length):
    op = attention(4, 8, num_gqa_groups=2, **options)
    x = activations(op, length, 3)
    dy = torch.randn(length, 3, 32, dtype=torch.float64)
    for a, b in zip(result(op, x, dy), result(lambda t: plain.attention(op, t), x, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_large_scores_do_not_overflow():
    for options in ({}, {"window_size": (5, 0)}):
        op = attention(2, 16, softmax_scale=1e4, **options)
        x = activations(op, 40, 1, dtype=torch.float32)
        y = op(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert y.isfinite().all() and dx.isfinite().all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("groups", (1, 4))
def test_gradients_of_shared_keys_are_rounded_once(dtype, groups):
    """The more query heads share a key head, the more an addition in the dtype would lose."""
    op = attention(32, 16, num_gqa_groups=groups, attn_mask_type="no_mask", qkv_layout="concatenated")
    x = activations(op, 64, 2, dtype=dtype)
    dy = torch.randn(64, 2, 512, dtype=dtype)
    exact = result(lambda t: plain.attention(op, t), x.detach().double().requires_grad_(), dy.double())[1]
    dx = result(op, x, dy)[1].double()
    widths = [512, 16 * groups, 16 * groups]
    for got, true in zip(dx.split(widths, -1), exact.split(widths, -1), strict=True):
        assert (got - true).abs().max() <= 1.5 * torch.finfo(dtype).eps * true.abs().max()


def test_window_of_own_position_returns_values():
    op = attention(2, 4, window_size=(0, 0), attn_mask_type="no_mask", qkv_layout="concatenated")
    x = activations(op, 6, 2)
    torch.testing.assert_close(op(x), x[..., 16:], rtol=0, atol=1e-15)


# ---- formats ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ({}, {"window_size": (2, 0)}, {"attn_mask_type": "no_mask"}), ids=str)
def test_packed_sequences_equal_separate_ones(options):
    op = attention(4, 8, num_gqa_groups=2, qkv_format="thd", **options)
    one = attention(4, 8, num_gqa_groups=2, **options)
    lengths = (3, 0, 1, 33)
    x = activations(op, sum(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    dy = torch.randn(sum(lengths), 32, dtype=torch.float64)
    packed = result(lambda t: op(t, offsets), x, dy)
    separate = result(lambda t: torch.cat([one(part) for part in t.split(lengths) if len(part)]), x, dy)
    for a, b in zip(packed, separate, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("offsets", ([1, 5], [0, 4], [0, 6], [0, 4, 3, 5], [0, -(2**62), 5], [0]), ids=str)
def test_invalid_offsets_are_rejected(offsets):
    op = attention(2, 4, qkv_format="thd")
    with pytest.raises(ValueError, match="DotProductAttention: cu_seqlens"):
        op(activations(op, 5), torch.tensor(offsets))


def test_offsets_changed_after_forward_are_detected():
    op, offsets = attention(2, 4, qkv_format="thd"), torch.tensor([0, 2, 5])
    y = op(activations(op, 5), offsets)
    offsets[1] = 4
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_strided_inputs_and_gradients():
    op = attention(4, 8, num_gqa_groups=2)
    x = activations(op, 5, 3)
    dy = torch.randn(5, 3, 32, dtype=torch.float64)
    expected = result(op, x, dy)
    strided = x.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    for a, b in zip(result(op, strided, dy.transpose(0, 2).contiguous().transpose(0, 2)), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    ones = torch.autograd.grad(op(x), x, torch.ones_like(dy))[0]
    torch.testing.assert_close(torch.autograd.grad(op(x).sum(), x)[0], ones)


# ---- dropout ------------------------------------------------------------------------------------------------------


def dropped(op, length: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns probabilities with and without dropout: values are unit vectors, so the output shows each of them."""
    x = activations(op, length, batch).detach()
    heads = op.num_attention_heads
    x[..., -heads * length :] = torch.eye(length, dtype=x.dtype)[:, None, None].expand(-1, batch, heads, -1).flatten(2)
    y = op(x)
    return y.unflatten(-1, (heads, length)), op.eval()(x).unflatten(-1, (heads, length))


@pytest.mark.parametrize("p", (0.1, 0.5, 0.9))
def test_dropout_drops_fraction_p_and_scales_rest(p):
    op = attention(3, 40, attention_dropout=p, attn_mask_type="no_mask", qkv_layout="concatenated")
    with_dropout, without = dropped(op, 40)
    kept = with_dropout != 0
    torch.testing.assert_close(with_dropout[kept], without[kept] / (1 - p))
    n = kept.numel()
    assert abs((~kept).sum().item() - n * p) < 4 * math.sqrt(n * p * (1 - p))
    flat = kept.double().flatten(2)  # each query of each head draws its own
    assert not any(torch.equal(flat[0, 0], row) for row in flat.reshape(-1, flat.shape[-1])[1:])


@pytest.mark.parametrize("packed", (False, True))
def test_dropout_mask_is_a_function_of_the_seed_also_in_backward(packed):
    """The mask written out in plain.py, for values and gradients."""
    options = {"num_gqa_groups": 2, "qkv_format": "thd"} if packed else {"qkv_layout": "concatenated"}
    op = attention(4, 16, attention_dropout=0.3, **options)
    x = activations(op, *((16,) if packed else (16, 2)), seed=4)
    extras = (torch.tensor([0, 5, 5, 16]),) if packed else ()
    dy = torch.randn(*x.shape[:-1], 64, dtype=torch.float64)
    found = []
    for run in (lambda t: op(t, *extras), lambda t: plain.attention(op, t, *extras)):
        torch.manual_seed(11)
        found.append(result(run, x, dy))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_dropout_is_drawn_from_torch_generator_and_again_when_recomputed():
    op = ops.Sequential(ops.Linear(32, 96), attention(2, 16, attention_dropout=0.5), ops.GELU())
    x = torch.randn(12, 2, 32, requires_grad=True)
    torch.manual_seed(5)
    first, second = op(x), op(x)
    torch.manual_seed(5)
    assert torch.equal(op(x), first) and not torch.equal(first, second)
    torch.manual_seed(5)
    (expected,) = torch.autograd.grad(op(x).sum(), x)
    torch.manual_seed(5)
    (recomputed,) = torch.autograd.grad(checkpoint(op, x, use_reentrant=False).sum(), x)
    assert torch.equal(expected, recomputed)
    op.eval()
    assert torch.equal(op(x), op(x))


def test_dropout_of_everything_gives_zeros():
    op = attention(2, 4, attention_dropout=1.0)
    x = activations(op, 5, 2)
    y = op(x)
    assert not y.any() and not torch.autograd.grad(y.sum(), x)[0].any()


# ---- the rest of the contract -------------------------------------------------------------------------------------


def test_saves_input_output_and_logsumexp():
    op = attention(4, 16, num_gqa_groups=2, attention_dropout=0.1)
    lines = op.explain(activations(op, 128, 2, dtype=torch.bfloat16)).text.partition("saved for backward")[2]
    assert "output" in lines and "[128, 2, 64] bfloat16" in lines
    assert "logsumexp" in lines and "[2, 4, 128] float32" in lines
    assert "seed" in lines and "[128, 2, 128] bfloat16  aliases the caller's input" in lines
    assert "128, 128" not in lines


def test_explain_says_why_sdpa_is_not_used():
    x = torch.randn(4, 1, 48)
    plain_text = attention(4, 4).explain(x).text
    if "[ref]" in plain_text:
        return  # in the ref tier there is nothing faster to explain
    assert "avx512: not used" not in plain_text and "avx2: not used" not in plain_text
    for options, reason in (
        ({"window_size": (2, 0)}, "not used with window_size"),
        ({"attention_dropout": 0.1}, "not used in training with attention_dropout"),
    ):
        text = attention(4, 4, **options).explain(x).text
        assert "[ref]" in text and reason in text


def test_flops_are_counted_as_for_sdpa():
    op = attention(4, 16, attn_mask_type="no_mask")
    x = activations(op, 10, 3, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        op(x).sum().backward()
    gemm = 2 * 3 * 4 * 10 * 10 * 16
    assert counter.get_total_flops() == 2 * gemm + 5 * gemm


def test_flops_of_pipelines_with_index_inputs():
    op = attention(2, 8, qkv_format="thd", attn_mask_type="no_mask")
    loss = ops.CrossEntropy()
    x, offsets, targets = torch.randn(6, 48), torch.tensor([0, 2, 6]), torch.randint(16, (6,))
    with FlopCounterMode(display=False) as counter:
        ops.Sequential(op, loss)(x, offsets, targets)
    assert counter.get_total_flops() == 2 * (2 * 2 * 6 * 6 * 8)


@pytest.mark.parametrize("window", ((sys.maxsize, sys.maxsize), (-1, sys.maxsize), (sys.maxsize, 0)), ids=str)
def test_window_larger_than_any_sequence(window):
    options = {"attn_mask_type": "no_mask", "qkv_format": "bshd"}
    op = attention(2, 8, window_size=window, **options)
    unlimited = attention(2, 8, window_size=(-1, 0 if window[1] == 0 else -1), **options)
    x = activations(op, 2, 5)
    torch.testing.assert_close(op(x), unlimited(x))


def test_explain_names_the_tier_of_training_and_evaluation():
    op = attention(2, 8, attention_dropout=0.1, qkv_format="bshd")
    x = activations(op, 2, 5, dtype=torch.float32)
    assert "in training with attention_dropout" in str(op.explain(x)) or _C.machine_tier() == "ref"
    assert "attention_dropout" not in str(op.eval().explain(x)).replace("attention_dropout=0.1", "")


@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("options", ({}, {"window_size": (2, 0)}, {"qkv_format": "thd"}), ids=str)
def test_compiles_as_one_graph(options, dynamic):
    op = ops.Sequential(ops.Linear(32, 128), attention(4, 16, num_gqa_groups=2, **options), ops.Linear(64, 32))
    torch.compiler.reset()
    compiled = torch.compile(op, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (6, 9):
        extras = [torch.tensor([0, 2, rows])] * (options.get("qkv_format") == "thd")
        x = torch.randn(rows, 32, requires_grad=True)
        grads = []
        for run in (op, compiled):
            y = run(x, *extras)
            grads.append((y, *torch.autograd.grad(y.square().sum(), (x, *op.parameters()))))
        for eager, traced in zip(*grads, strict=True):
            torch.testing.assert_close(traced, eager)


def test_compiled_dropout_draws_from_the_seed():
    op = ops.Sequential(attention(2, 8, attention_dropout=0.5))
    x = torch.randn(16, 1, 48, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    grads = []
    for run in (op, compiled):
        torch.manual_seed(2)
        grads.append(torch.autograd.grad(run(x).square().sum(), x)[0])
    torch.testing.assert_close(*grads)


def test_meta_device_gives_shapes():
    op = attention(4, 16, num_gqa_groups=2, qkv_format="thd", attention_dropout=0.1)
    x = activations(op, 5, dtype=torch.bfloat16).detach().to("meta").requires_grad_()
    y = op(x, torch.tensor([0, 5], device="meta"))
    assert y.is_meta and y.shape == (5, 64)
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


def test_text_form_keeps_every_field():
    op = attention(
        4, 16, num_gqa_groups=2, attn_mask_type="no_mask", window_size=(3, -1), softmax_scale=0.5,
        attention_dropout=0.25, qkv_format="bshd", qkv_layout="concatenated",
    )  # fmt: skip
    text = repr(torchweft._C.make_op("DotProductAttention", op._description().fields()))
    assert text == repr(op._description())
    for part in ("window_size=[3, -1]", "softmax_scale=0.5", '"no_mask"', "attention_dropout=0.25", '"concatenated"'):
        assert part in text


@pytest.mark.parametrize("ranks", (2, 4))
def test_heads_split_over_ranks_sum_to_the_whole(ranks):
    """Each rank's share of a column linear holds whole groups, and the row linear's partial products sum up."""
    heads, groups, d = 8, 4, 8
    qkv, proj = torch.nn.Linear(32, (heads + 2 * groups) * d), torch.nn.Linear(heads * d, 32, bias=False)

    def block(ranks):
        options = {"num_gqa_groups": groups // ranks, "qkv_format": "sbhd", "qkv_layout": "group_interleaved"}
        sizes = heads // ranks, d
        return ops.Sequential(ops.RotaryEmbedding(*sizes, **options), ops.DotProductAttention(*sizes, **options))

    whole, share = block(1), block(ranks)
    x = torch.randn(7, 2, 32)
    expected = proj(whole(qkv(x)))
    parts = [
        F.linear(share(F.linear(x, w, b)), p)
        for w, b, p in zip(qkv.weight.chunk(ranks), qkv.bias.chunk(ranks), proj.weight.chunk(ranks, 1), strict=True)
    ]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-5, atol=1e-5)
