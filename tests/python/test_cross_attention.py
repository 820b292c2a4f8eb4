"""CrossDotProductAttention: unequal lengths of queries and keys, queries that see no key, packed sequences."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from torchweft import ops

HEADS, GROUPS, D = 4, 2, 8
MASKS = [
    {},
    {"attn_mask_type": "causal"},
    {"attn_mask_type": "causal_bottom_right"},
    {"window_size": (1, 1)},
    {"window_size": (0, -1), "attn_mask_type": "causal"},
    {"window_size": (2, 0), "attn_mask_type": "causal_bottom_right"},
]


def attention(**options):
    return ops.CrossDotProductAttention(HEADS, D, num_gqa_groups=GROUPS, **{"qkv_format": "sbhd", **options})


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def expected(op, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of [s, batch, heads·channels] to [t, batch, groups·channels]; 0 for a query that sees no key."""
    tq, tk = q.shape[0], k.shape[0]
    k, v = (t.unflatten(-1, (GROUPS, D)).repeat_interleave(HEADS // GROUPS, 2).permute(1, 2, 0, 3) for t in (k, v))
    shift = 0 if op.attn_mask_type == "causal" else tk - tq
    distance = torch.arange(tk) - (torch.arange(tq)[:, None] + shift)
    left, right = op.window_size or (-1, -1)
    right = right if op.attn_mask_type == "no_mask" else 0
    seen = ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))
    scores = q.unflatten(-1, (HEADS, D)).permute(1, 2, 0, 3) @ k.transpose(-1, -2) / math.sqrt(D)
    p = torch.where(seen, scores, -1e300).softmax(-1) * seen
    return (p @ v).permute(2, 0, 1, 3).flatten(2)


def inputs(
    queries: int, keys: int, batch: tuple[int, ...] = (), dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Returns query, key and value, sequence first."""
    return tensors((queries, *batch, HEADS * D), *[(keys, *batch, GROUPS * D)] * 2, dtype=dtype)


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("lengths", ((1, 1), (5, 5), (3, 7), (7, 3), (1, 6), (6, 1)), ids=str)
def test_unequal_lengths_equal_softmax_of_scores(lengths, options):
    op, given = attention(**options), inputs(*lengths, (2,))
    y, exact = op(*given), expected(op, *given)
    dy = torch.randn_like(exact)
    got = (y, *torch.autograd.grad(y, given, dy))
    for a, b in zip(got, (exact, *torch.autograd.grad(exact, given, dy)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_views_of_one_tensor_equal_copies():
    op, packed = attention(attn_mask_type="causal"), tensors((5, 3, (HEADS + 2 * GROUPS) * D))[0]
    views = packed.split((HEADS * D, GROUPS * D, GROUPS * D), -1)
    copies = [t.detach().clone().requires_grad_() for t in views]
    y, exact = op(*views), op(*copies)
    assert torch.equal(y, exact)
    grads = torch.autograd.grad(exact.square().sum(), copies)
    assert torch.equal(torch.autograd.grad(y.square().sum(), packed)[0], torch.cat(grads, -1))


def test_batch_first_equals_sequence_first():
    given = inputs(5, 7, (3,))
    first = attention()(*given)
    batch = attention(qkv_format="bshd")(*(t.transpose(0, 1) for t in given))
    torch.testing.assert_close(batch.transpose(0, 1), first, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_packed_sequences_equal_separate_ones(options):
    op, one = attention(qkv_format="thd", **options), attention(**options)
    queries, keys = (2, 0, 4, 1), (5, 3, 2, 0)
    given = q, k, v = inputs(sum(queries), sum(keys))
    offsets = [torch.tensor([0, *n]).cumsum(0) for n in (queries, keys)]
    y = op(*given, *offsets)
    sequences = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    parts = [one(*(t[:, None] for t in s))[:, 0] if len(s[1]) else 0 * s[0] for s in sequences if len(s[0])]
    dy = torch.randn_like(y)
    got, exact = ((t, *torch.autograd.grad(t, given, dy, retain_graph=True)) for t in (y, torch.cat(parts)))
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_query_without_keys_gives_zero_and_no_gradient():
    op = attention(attn_mask_type="causal_bottom_right")
    given = inputs(5, 3, (1,), torch.bfloat16)
    y = op(*given)
    dq, dk, dv = torch.autograd.grad(y.sum(), given)
    assert not y[:2].any() and not dq[:2].any()
    assert y[2:].all() and dk.isfinite().all() and dv.isfinite().all()


def test_no_keys_at_all():
    given = inputs(5, 0, (2,))
    y = attention()(*given)
    dq, dk, dv = torch.autograd.grad(y.sum(), given)
    assert not y.any() and not dq.any() and dk.shape == dv.shape == given[1].shape


@pytest.mark.parametrize("frozen", (0, 1, 2))
def test_frozen_input_gets_no_grad(frozen):
    op, given = attention(), inputs(5, 4, (2,))
    grads = torch.autograd.grad(op(*given).square().sum(), given)
    given[frozen].requires_grad_(False)
    op(*given).square().sum().backward()
    for i, (t, grad) in enumerate(zip(given, grads, strict=True)):
        assert t.grad is None if i == frozen else torch.equal(t.grad, grad)


@pytest.mark.parametrize("options", ({"attention_dropout": 0.4}, {"window_size": (1, 0)}), ids=str)
def test_gradients_match_finite_differences(options):
    op = attention(**options)

    def run(*given):
        torch.manual_seed(3)
        return op(*given)

    assert torch.autograd.gradcheck(run, inputs(3, 4, (1,)), fast_mode=True)


@pytest.mark.parametrize("dynamic", (False, True))
def test_compiles_as_one_graph(dynamic):
    op = ops.Sequential(ops.Linear(16, HEADS * D), attention(attn_mask_type="causal"), ops.Linear(HEADS * D, 16))
    torch.compiler.reset()
    compiled = torch.compile(op, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tq, tk in ((4, 6), (5, 7)):
        given = tensors((tq, 2, 16), *[(tk, 2, GROUPS * D)] * 2, dtype=torch.float32)
        grads = []
        for run in (op, compiled):
            y = run(*given)
            grads.append((y, *torch.autograd.grad(y.square().sum(), (*given, *op.parameters()))))
        for eager, traced in zip(*grads, strict=True):
            torch.testing.assert_close(traced, eager)


def test_flops_count_queries_times_keys():
    op = ops.CrossDotProductAttention(2, 4, qkv_format="sbhd")
    q, k, v = torch.randn(5, 3, 8, requires_grad=True), torch.randn(7, 3, 8), torch.randn(7, 3, 8)
    with FlopCounterMode(display=False) as counter:
        op(q, k, v).sum().backward()
    assert counter.get_total_flops() == 7 * (2 * 3 * 2 * 5 * 7 * 4)
