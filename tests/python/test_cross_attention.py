"""CrossDotProductAttention: unequal lengths of queries and keys, queries that see no key, packed sequences."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from weft import ops

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
    return ops.CrossDotProductAttention(HEADS, D, num_gqa_groups=GROUPS, **options)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def expected(op, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Attention of [s, batch, heads·channels] to [t, batch, 2·groups·channels]; 0 for a query that sees no key."""
    tq, tk = q.shape[0], kv.shape[0]
    if op.kv_layout == "concatenated":
        k, v = (t.unflatten(-1, (GROUPS, D)) for t in kv.chunk(2, -1))
    else:
        k, v = kv.unflatten(-1, (GROUPS, 2, D)).unbind(-2)
    k, v = (t.repeat_interleave(HEADS // GROUPS, 2).permute(1, 2, 0, 3) for t in (k, v))
    shift = 0 if op.attn_mask_type == "causal" else tk - tq
    distance = torch.arange(tk) - (torch.arange(tq)[:, None] + shift)
    left, right = op.window_size or (-1, -1)
    right = right if op.attn_mask_type == "no_mask" else 0
    seen = ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))
    scores = q.unflatten(-1, (HEADS, D)).permute(1, 2, 0, 3) @ k.transpose(-1, -2) / math.sqrt(D)
    p = torch.where(seen, scores, -1e300).softmax(-1) * seen
    return (p @ v).permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("layout", ("group_interleaved", "concatenated"))
@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("lengths", ((1, 1), (5, 5), (3, 7), (7, 3), (1, 6), (6, 1)), ids=str)
def test_unequal_lengths_equal_softmax_of_scores(lengths, options, layout):
    op = attention(kv_layout=layout, **options)
    q, kv = tensors((lengths[0], 2, HEADS * D), (lengths[1], 2, 2 * GROUPS * D))
    y, exact = op(q, kv), expected(op, q, kv)
    dy = torch.randn_like(exact)
    got = (y, *torch.autograd.grad(y, (q, kv), dy))
    for a, b in zip(got, (exact, *torch.autograd.grad(exact, (q, kv), dy)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_batch_first_equals_sequence_first():
    q, kv = tensors((5, 3, HEADS * D), (7, 3, 2 * GROUPS * D))
    first = attention()(q, kv)
    batch = attention(qkv_format="bshd")(q.transpose(0, 1), kv.transpose(0, 1))
    torch.testing.assert_close(batch.transpose(0, 1), first, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_packed_sequences_equal_separate_ones(options):
    op, one = attention(qkv_format="thd", **options), attention(**options)
    queries, keys = (2, 0, 4, 1), (5, 3, 2, 0)
    q, kv = tensors((sum(queries), HEADS * D), (sum(keys), 2 * GROUPS * D))
    offsets = [torch.tensor([0, *n]).cumsum(0) for n in (queries, keys)]
    y = op(q, kv, *offsets)
    pairs = zip(q.split(queries), kv.split(keys), strict=True)
    parts = [one(a[:, None], b[:, None])[:, 0] if len(b) else 0 * a for a, b in pairs if len(a)]
    dy = torch.randn_like(y)
    got, exact = ((t, *torch.autograd.grad(t, (q, kv), dy, retain_graph=True)) for t in (y, torch.cat(parts)))
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_query_without_keys_gives_zero_and_no_gradient():
    op = attention(attn_mask_type="causal_bottom_right")
    q, kv = tensors((5, 1, HEADS * D), (3, 1, 2 * GROUPS * D), dtype=torch.bfloat16)
    y = op(q, kv)
    dq, dkv = torch.autograd.grad(y.sum(), (q, kv))
    assert not y[:2].any() and not dq[:2].any()
    assert y[2:].all() and dkv.isfinite().all()


def test_no_keys_at_all():
    q, kv = tensors((5, 2, HEADS * D), (0, 2, 2 * GROUPS * D))
    y = attention()(q, kv)
    dq, dkv = torch.autograd.grad(y.sum(), (q, kv))
    assert not y.any() and not dq.any() and dkv.shape == kv.shape


@pytest.mark.parametrize("frozen", (0, 1))
def test_frozen_input_gets_no_grad(frozen):
    op, inputs = attention(), tensors((5, 2, HEADS * D), (4, 2, 2 * GROUPS * D))
    both = torch.autograd.grad(op(*inputs).square().sum(), inputs)
    inputs[frozen].requires_grad_(False)
    op(*inputs).square().sum().backward()
    assert inputs[frozen].grad is None
    assert torch.equal(inputs[1 - frozen].grad, both[1 - frozen])


@pytest.mark.parametrize("options", ({"attention_dropout": 0.4}, {"window_size": (1, 0)}), ids=str)
def test_gradients_match_finite_differences(options):
    op, inputs = attention(**options), tensors((3, 1, HEADS * D), (4, 1, 2 * GROUPS * D))

    def run(*given):
        torch.manual_seed(3)
        return op(*given)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("dynamic", (False, True))
def test_compiles_as_one_graph(dynamic):
    op = ops.Sequential(ops.Linear(16, HEADS * D), attention(attn_mask_type="causal"), ops.Linear(HEADS * D, 16))
    torch.compiler.reset()
    compiled = torch.compile(op, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tq, tk in ((4, 6), (5, 7)):
        q, kv = tensors((tq, 2, 16), (tk, 2, 2 * GROUPS * D), dtype=torch.float32)
        grads = []
        for run in (op, compiled):
            y = run(q, kv)
            grads.append((y, *torch.autograd.grad(y.square().sum(), (q, kv, *op.parameters()))))
        for eager, traced in zip(*grads, strict=True):
            torch.testing.assert_close(traced, eager)


def test_flops_count_queries_times_keys():
    op = ops.CrossDotProductAttention(2, 4)
    q, kv = torch.randn(5, 3, 8, requires_grad=True), torch.randn(7, 3, 16)
    with FlopCounterMode(display=False) as counter:
        op(q, kv).sum().backward()
    assert counter.get_total_flops() == 7 * (2 * 3 * 2 * 5 * 7 * 4)
