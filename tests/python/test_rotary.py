"""RotaryEmbedding beyond test_every_op: every vector tail, rounding, packed sequences, compilation, what is saved."""

from __future__ import annotations

import plain
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torchweft
from torchweft import ops

HEADS, GROUPS = 4, 2
PACKED = {"num_gqa_groups": GROUPS, "qkv_format": "sbhd", "qkv_layout": "group_interleaved"}


def rotary(channels: int = 16, **options):
    return ops.RotaryEmbedding(HEADS, channels, **PACKED | options)


def activations(*lead: int, channels: int = 16, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    width = (HEADS + 2 * GROUPS) * channels
    return torch.randn(*lead, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("rotary_dim", (2, 6, 14, 16, 18, 30, 32, 34, 62, 64, 66, 128))
def test_low_precision_is_rounded_once(rotary_dim, interleaved, dtype):
    """Every vector tail: results are those of float64 arithmetic, rounded to the dtype, up to float32's own error."""
    op, x = rotary(128, rotary_dim=rotary_dim, interleaved=interleaved), activations(5, 3, channels=128, dtype=dtype)
    y = op(x)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    exact = x.detach().double().requires_grad_()
    expected = plain.rotary(op, exact)
    (expected_dx,) = torch.autograd.grad(expected, exact, dy.double())
    half_ulp = torch.finfo(dtype).eps / 2
    for got, wanted in ((y, expected), (dx, expected_dx)):
        bound = half_ulp * wanted.abs() + 4e-7 * wanted.abs().max()
        assert ((got.double() - wanted).abs() <= bound).all()


def test_float64_angles_stay_exact_at_large_positions():
    """Angles are computed in float64: float32 would be off by 2e-3 at position 30000."""
    op = ops.RotaryEmbedding(1, 2, qkv_layout=None)
    y = op(torch.tensor([1.0, 0.0]).repeat(30001, 1))
    angle = torch.tensor(30000.0, dtype=torch.float64)
    torch.testing.assert_close(y[-1].double(), torch.stack([angle.cos(), angle.sin()]), rtol=0, atol=1e-7)


def test_scores_depend_on_distance_only():
    op = ops.RotaryEmbedding(1, 16, qkv_format="bshd", qkv_layout="concatenated")
    q, k = torch.randn(16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    y = op(torch.cat([q, k, q]).expand(1, 9, 48))
    scores = y[0, :, :16] @ y[0, :, 16:32].T
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert torch.equal(y[..., 32:], q.expand(1, 9, 16))


def test_layouts_are_permutations_of_heads():
    """The heads of group 0, then of group 1, each with its key and value; or all queries, keys, values."""
    x = activations(7, 2)
    heads = x.detach().unflatten(-1, (HEADS + 2 * GROUPS, 16))
    order = torch.tensor([0, 1, 4, 5, 2, 6, 3, 7])
    concatenated = rotary(qkv_layout="concatenated")(heads[..., order, :].flatten(-2))
    interleaved = rotary()(x).unflatten(-1, (-1, 16))[..., order, :].flatten(-2)
    assert torch.equal(concatenated, interleaved)


def test_packed_sequences_equal_separate_ones():
    op, lengths = rotary(qkv_format="thd"), (1, 6, 0, 9)
    x = activations(sum(lengths))
    for dtype in (torch.int32, torch.int64):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
        y = op(x, cu_seqlens)
        parts = [rotary()(part) for part in x.detach().split(lengths)]
        assert torch.equal(y, torch.cat(parts))


@pytest.mark.parametrize(
    "offsets, message",
    (
        ([1, 5], "cu_seqlens starts with 1, expected 0"),
        ([0, 4], "cu_seqlens ends with 4, expected 5"),
        ([0, 6], "cu_seqlens ends with 6, expected 5"),
        ([0, 4, 3, 5], "cu_seqlens decreases from 4 to 3 at index 2"),
        ([0, -(2**62), 5], "cu_seqlens decreases from 0"),
        ([0], "cu_seqlens ends with 0, expected 5"),
        ([], r"cu_seqlens has shape \[0\]"),
    ),
)
def test_invalid_offsets_are_rejected(offsets, message):
    op, x = rotary(qkv_format="thd"), activations(5)
    with pytest.raises(ValueError, match=message):
        op(x, torch.tensor(offsets, dtype=torch.int64))


def test_tables_shorter_than_a_packed_sequence_are_rejected():
    op, x = rotary(qkv_format="thd", rotary_base=None), activations(8)
    op(x, torch.rand(5, 8), torch.rand(5, 8), torch.tensor([0, 3, 8]))
    with pytest.raises(ValueError, match="a sequence of 6 rows, cos and sin have 5"):
        op(x, torch.rand(5, 8), torch.rand(5, 8), torch.tensor([0, 2, 8]))


def test_saves_nothing_but_given_tables():
    x = activations(5, 3)
    assert "saved for backward: 0 B" in rotary().explain(x).text
    tables = torch.rand(5, 8), torch.rand(5, 8)
    text = rotary(rotary_base=None).explain(x, *tables).text
    assert "RotaryEmbedding cos" in text and "RotaryEmbedding input" not in text
    learned = [t.requires_grad_() for t in tables]
    assert "RotaryEmbedding input" in rotary(rotary_base=None).explain(x, *learned).text


@pytest.mark.parametrize("options", ({}, {"rotary_base": None}, {"qkv_format": "thd"}), ids=str)
@pytest.mark.parametrize("dynamic", (False, True))
def test_compiles_as_one_graph(options, dynamic):
    op = ops.Sequential(ops.Linear(32, 128, bias=False), rotary(**options))
    tables = [torch.rand(6, 8), torch.rand(6, 8)] if options.get("rotary_base", 1) is None else []
    torch.compiler.reset()
    compiled = torch.compile(op, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (4, 6):
        extras = tables + [torch.tensor([0, 2, rows], dtype=torch.int32)] * (options.get("qkv_format") == "thd")
        x = torch.randn(rows, 32, requires_grad=True)
        grads = []
        for run in (op, compiled):
            y = run(x, *extras)
            grads.append((y, *torch.autograd.grad(y.square().sum(), (x, op[0].weight))))
        for eager, traced in zip(*grads, strict=True):
            torch.testing.assert_close(traced, eager)


def test_activation_checkpointing_and_meta():
    op, x = ops.Sequential(ops.Linear(32, 128), rotary(), ops.GELU()), torch.randn(5, 2, 32, requires_grad=True)
    (expected,) = torch.autograd.grad(op(x).sum(), x)
    (recomputed,) = torch.autograd.grad(checkpoint(op, x, use_reentrant=False).sum(), x)
    assert torch.equal(expected, recomputed)
    meta = rotary(qkv_format="thd")(activations(5).to("meta"), torch.tensor([0, 5], device="meta"))
    assert meta.is_meta and meta.shape == (5, 128)


def test_text_form_keeps_every_field():
    op = rotary(qkv_layout="concatenated", rotary_dim=8, interleaved=True, rotary_base=None, qkv_format="bshd")
    text = repr(torchweft._C.make_op("RotaryEmbedding", op._description().fields()))
    assert text == repr(op._description())
    for part in ('qkv_layout="concatenated"', "rotary_dim=8", "interleaved=true", "rotary_base=none", '"bshd"'):
        assert part in text
