"""What users write with Transformer Engine, in float32 against plain torch in float64; and what must raise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
import triton
import triton.language as tl
from test_modules import RECIPES, relative
from transformer_engine.pytorch.optimizers import multi_tensor_applier, multi_tensor_l2norm
from transformer_engine.pytorch.router import fused_topk_with_score_function

from torchweft.te import _triton_kernels

SEQUENCE, BATCH, HEADS, CHANNELS = 24, 2, 4, 16


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    yield
    torch.set_default_device(None)


@triton.jit
def gather(table, y, n, BLOCK: tl.constexpr):  # noqa: N803
    group, i = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(table + group).to(tl.pointer_type(tl.float32))
    tl.store(y + group * n + i, tl.load(x + i, mask=i < n), mask=i < n)


def double(t: torch.Tensor) -> torch.Tensor:
    return t.detach().cpu().double().requires_grad_(t.requires_grad)


# ---- attention ------------------------------------------------------------------------------------------------------


def plain_attention(q: Any, k: Any, v: Any, hidden: Any = None, bias: Any = None) -> torch.Tensor:
    """[sequence, batch, heads, channels] → [sequence, batch, heads · channels]. `hidden`: what is not seen."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    y = scores.softmax(-1) @ v.repeat_interleave(groups, 1)
    return y.permute(2, 0, 1, 3).flatten(2)


def attention_inputs(groups: int = HEADS, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    heads = (HEADS, groups, groups)
    return [torch.randn(SEQUENCE, BATCH, h, CHANNELS, dtype=dtype, requires_grad=True) for h in heads]


def check_attention(y: torch.Tensor, inputs: list[torch.Tensor], bound: float, **plain: Any) -> None:
    dy = torch.randn_like(y)
    copies = [double(t) for t in inputs]
    expected = plain_attention(*copies, **plain)
    found = [y, *torch.autograd.grad(y, inputs, dy)]
    wanted = [expected, *torch.autograd.grad(expected, copies, dy.cpu().double())]
    errors = [relative(f, w) for f, w in zip(found, wanted, strict=True)]
    assert max(errors) < bound, errors


def causal(window: int = SEQUENCE) -> torch.Tensor:
    age = torch.arange(SEQUENCE, device="cpu")[:, None] - torch.arange(SEQUENCE, device="cpu")
    return (age < 0) | (age > window)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)  # unfused, and weft's kernel
@pytest.mark.parametrize("groups", (HEADS, 2))
@pytest.mark.parametrize("options", ({}, {"window_size": (5, 0)}, {"attn_mask_type": "no_mask"}), ids=str)
def test_attention(options: dict[str, Any], groups: int, dtype: torch.dtype) -> None:
    inputs = attention_inputs(groups, dtype)
    module = te.DotProductAttention(HEADS, CHANNELS, num_gqa_groups=groups, attention_dropout=0.0, **options)
    hidden = None if "attn_mask_type" in options else causal(options.get("window_size", (SEQUENCE, 0))[0])
    check_attention(module(*inputs), inputs, 2e-6 if dtype == torch.float32 else 0.02, hidden=hidden)


def test_attention_with_padding_and_bias() -> None:
    inputs = attention_inputs()
    lengths = torch.tensor([20, 24])
    padded = torch.arange(SEQUENCE)[None, :] >= lengths[:, None]
    module = te.DotProductAttention(HEADS, CHANNELS, attention_dropout=0.0, attn_mask_type="padding")
    y = module(*inputs, attention_mask=padded[:, None, None])
    expected = plain_attention(*map(double, inputs), hidden=padded.cpu()[:, None, None])
    rows = ~padded.T  # the others are not defined
    assert relative(y[rows], expected[rows.cpu()]) < 2e-6
    bias = torch.randn(1, HEADS, SEQUENCE, SEQUENCE)
    module = te.DotProductAttention(HEADS, CHANNELS, attention_dropout=0.0, attn_mask_type="no_mask")
    y = module(*inputs, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    check_attention(y, inputs, 2e-6, bias=bias.cpu().double())


def test_packed_sequences() -> None:
    lengths = [9, 15, 8]
    offsets = torch.tensor([0, 9, 24, 32], dtype=torch.int32)
    q, k, v = (torch.randn(32, HEADS, CHANNELS, dtype=torch.bfloat16) for _ in range(3))
    module = te.DotProductAttention(
        HEADS, CHANNELS, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal"
    )
    y = module(q, k, v, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=15, max_seqlen_kv=15)
    parts = zip(*(double(t).split(lengths) for t in (q, k, v)), strict=True)
    expected = [
        plain_attention(*(t[:, None] for t in part), hidden=causal()[: len(part[0]), : len(part[0])])[:, 0]
        for part in parts
    ]
    assert relative(y, torch.cat(expected)) < 0.02


@pytest.mark.parametrize(
    ("shapes", "options"),
    (
        (((6, 2, 4, 8), (4, 2, 4, 8), (6, 2, 4, 8)), {}),
        (((6, 2, 4, 8), (6, 2, 4, 8), (3, 2, 4, 8)), {}),
        (((6, 2, 4, 8), (6, 2, 2, 8), (6, 2, 4, 8)), {}),
        (((6, 2, 4, 8), (6, 2, 4, 8), (6, 2, 4, 8)), {"num_gqa_groups": 2}),
    ),
)
def test_contradicting_sizes_of_attention_raise(shapes: Any, options: dict[str, Any]) -> None:
    module = te.DotProductAttention(4, 8, attn_mask_type="no_mask", **options)
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        module(*(torch.randn(shape) for shape in shapes))


@pytest.mark.parametrize("norm", ("RMSNorm", "LayerNorm", "L2Normalization"))
def test_norms_of_queries_and_keys_follow_the_dtype(norm: str) -> None:
    module = te.MultiheadAttention(64, 4, params_dtype=torch.bfloat16, qk_norm_type=norm)
    module(torch.randn(8, 2, 64, dtype=torch.bfloat16)).float().sum().backward()


# ---- layers ---------------------------------------------------------------------------------------------------------


def test_autocast_and_meta_parameters() -> None:
    with torch.autocast("cuda", torch.bfloat16):
        assert te.TransformerLayer(64, 256, 4)(torch.randn(8, 2, 64)).dtype == torch.bfloat16
    for make in (te.Linear, te.LayerNormLinear, te.LayerNormMLP):
        module = make(8, 32, device="meta")
        module.reset_parameters()
        assert not any(p.is_meta for p in module.parameters())


def test_checkpoint_repeats_random_numbers() -> None:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    masks = []

    def function(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            masks.append(torch.rand_like(x))
        return F.dropout(x * masks[-1], 0.5)

    x = torch.randn(20, requires_grad=True)
    y = te.checkpoint(function, x, get_rng_state_tracker=lambda: tracker, use_reentrant=False)
    y.sum().backward()
    assert len(masks) == 2 and torch.equal(*masks)
    torch.testing.assert_close(x.grad * x.detach(), y.detach())


@pytest.mark.parametrize("chosen", (None, "current"))
@pytest.mark.parametrize("delay", (False, True))
def test_main_grad(delay: bool, chosen: str | None) -> None:
    layer = te.Linear(64, 64, bias=False, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    layer.weight.main_grad = torch.ones_like(layer.weight)
    layer.weight.grad_added_to_main_grad = False
    x = torch.randn(32, 64)
    with te.autocast(enabled=chosen is not None, recipe=RECIPES["current"]):
        y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    if delay:
        layer.backward_dw()
    expected = 1 + double(dy).T @ double(x)
    assert relative(layer.weight.main_grad, expected) < (2e-6 if chosen is None else 0.1)


# ---- experts, losses, optimizers ------------------------------------------------------------------------------------


def test_permutation_and_router() -> None:
    tokens, experts, topk = 16, 4, 2
    x, logits = torch.randn(tokens, 8, requires_grad=True), torch.randn(tokens, experts)
    probs, routing = fused_topk_with_score_function(logits, topk, False, None, None, None, "softmax", None)
    chosen = torch.zeros(tokens, experts, dtype=torch.bool, device="cpu")
    chosen.scatter_(1, logits.cpu().topk(topk).indices, True)
    assert torch.equal(routing.bool().cpu(), chosen)
    assert relative(probs, double(logits).masked_fill(~chosen, -torch.inf).softmax(-1)) < 2e-6
    indices = probs.topk(topk).indices.to(torch.int32)
    permuted, row_ids = te.moe_permute(x, indices, num_out_tokens=tokens * topk, map_type="index")
    order = torch.cat([torch.nonzero((indices == e).any(1))[:, 0] for e in range(experts)])
    assert torch.equal(permuted, x[order])
    weights = probs.gather(1, indices.long())
    y = te.moe_unpermute(permuted, row_ids, merging_probs=weights, map_type="index")
    torch.testing.assert_close(y, x * weights.sum(1, keepdim=True))
    y.sum().backward()
    torch.testing.assert_close(x.grad, weights.sum(1, keepdim=True).expand_as(x))


@pytest.mark.parametrize("interpreted", (False, True))
def test_triton_kernel_outside_of_its_tensors_raises(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine does not compare the number of output tokens with the map."""
    if interpreted:
        monkeypatch.setattr(_triton_kernels, "known", lambda kernel: None)
    x, routing = torch.randn(4, 8), torch.ones(4, 2, dtype=torch.int32)
    permuted, _ = te.moe_permute(x, routing, num_out_tokens=8, map_type="mask")
    assert torch.equal(permuted, torch.cat([x, x]))
    what = r"writes \d+ of \d+ elements" if interpreted else r"accesses \d+ of \d+ rows"
    with pytest.raises(Exception, match=rf"_permute_kernel {what} outside of"):
        te.moe_permute(x, routing, num_out_tokens=3, map_type="mask")


def test_triton_kernels_follow_tables_of_addresses() -> None:
    tensors = [torch.randn(10) for _ in range(3)]
    table, y = torch.tensor([t.data_ptr() for t in tensors]), torch.empty(30)
    gather[(3,)](table, y, 10, BLOCK=16)
    assert torch.equal(y, torch.cat(tensors))


def test_padding_of_experts() -> None:
    rows, splits = torch.randn(20, 8), [5, 15]
    padded, sizes = te.Fp8Padding(2, 16)(rows, splits)
    assert sizes == [16, 16] and torch.equal(padded[:5], rows[:5]) and torch.equal(padded[16:31], rows[5:])
    assert torch.equal(te.Fp8Unpadding(2, 16)(padded, splits), rows)


def test_cross_entropy() -> None:
    logits = torch.randn(SEQUENCE, BATCH, 50, requires_grad=True)
    targets = torch.randint(50, (SEQUENCE, BATCH))
    expected = F.cross_entropy(double(logits).flatten(0, 1), targets.cpu().flatten(), label_smoothing=0.1)
    loss = te.parallel_cross_entropy(logits, targets, label_smoothing=0.1, reduce_loss=True)
    assert relative(loss, expected) < 2e-6


def test_optimizers_and_norms() -> None:
    p = torch.nn.Parameter(torch.randn(40, 5))
    other = torch.nn.Parameter(double(p))
    mine, theirs = te.optimizers.FusedAdam([p], lr=0.02), torch.optim.AdamW([other], lr=0.02, weight_decay=0)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        other.grad = double(p.grad)
        mine.step()
        theirs.step()
    assert relative(p.detach(), other.detach()) < 2e-6
    parts = [torch.randn(7), torch.randn(3, 4)]
    norm, each = multi_tensor_applier(multi_tensor_l2norm, torch.zeros(1, dtype=torch.int), [parts], True)
    assert relative(each, torch.stack([part.double().norm() for part in parts])) < 2e-6
    assert relative(norm, torch.cat([part.flatten() for part in parts]).double().norm()) < 2e-6
