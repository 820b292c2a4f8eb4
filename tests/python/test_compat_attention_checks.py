"""DotProductAttention rejects tensors that contradict each other or its options. torch's SDPA kernels for the CPU read
past the end of keys or values of unequal lengths."""

import itertools
import math
import re

import pytest
import torch

from torchweft.compat._attention import DotProductAttention
from torchweft.compat._multihead_attention import MultiheadAttention
from torchweft.compat._transformer_layer import TransformerLayer

HEADS, GROUPS, CHANNELS, BATCH, QUERIES, KEYS = 4, 2, 8, 3, 6, 5
LAYOUTS = ("sbhd", "bshd", "thd")
PADDING = torch.zeros(BATCH, 1, 1, KEYS, dtype=torch.bool)
BIAS = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1, HEADS, QUERIES, KEYS)}
# What makes a call use weft's kernels, torch's with a mask, torch's with a bias, and torch's without either.
CALLS = {
    "weft": ({}, {"attn_mask_type": "no_mask"}),
    "mask": ({}, {"attn_mask_type": "padding", "attention_mask": PADDING}),
    "bias": ({}, {"attn_mask_type": "no_mask"} | BIAS),
    "value channels": ({"kv_channels": (CHANNELS, CHANNELS + 4)}, {"attn_mask_type": "no_mask"}),
}


def tensors(layout, value_channels=CHANNELS):
    """Query, key and value, with the options that packed sequences need."""
    lead = {"sbhd": lambda n: (n, BATCH), "bshd": lambda n: (BATCH, n), "thd": lambda n: (n,)}[layout]
    sizes = ((QUERIES, HEADS, CHANNELS), (KEYS, GROUPS, CHANNELS), (KEYS, GROUPS, value_channels))
    options = {}
    if layout == "thd":
        for name, rows in (("cu_seqlens_q", QUERIES), ("cu_seqlens_kv", KEYS)):
            options[name] = torch.tensor([0, 2, rows], dtype=torch.int32)
    return [torch.randn(*lead(n), *tail) for n, *tail in sizes], options


def make(layout="sbhd", **options):
    options = {"kv_channels": CHANNELS, "num_gqa_groups": GROUPS, "qkv_format": layout} | options
    return DotProductAttention(HEADS, **options)


CASES = [(layout, name) for layout in LAYOUTS for name in CALLS if layout != "thd" or name == "weft"]


@pytest.mark.parametrize("layout, name", CASES)
def test_every_change_of_one_size_raises(layout, name):
    options, call = CALLS[name]
    module = make(layout, **options)
    given, packed = tensors(layout, CHANNELS + 4 if name == "value channels" else CHANNELS)
    module(*given, **call, **packed)
    for which, change in itertools.product(range(3), (-1, 1, 300)):
        for dim in range(given[0].dim()):
            shape = list(given[which].shape)
            shape[dim] += change
            if name != "bias" and (which, dim) == (0, layout.find("s")):
                continue  # queries may have any length
            other = [torch.randn(shape) if i == which else t for i, t in enumerate(given)]
            with pytest.raises(ValueError, match="DotProductAttention: .*expected"):
                module(*other, **call, **packed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_number_of_dimensions_is_checked(layout):
    given, packed = tensors(layout)
    for which in range(3):
        for change in (lambda t: t[None], lambda t: t[0], lambda t: t.flatten(-2)):
            other = [change(t) if i == which else t for i, t in enumerate(given)]
            with pytest.raises(ValueError, match=f"expected .* with qkv_format '{layout}'"):
                make(layout)(*other, attn_mask_type="no_mask", **packed)


def test_layout_that_is_not_that_of_the_tensors_raises():
    packed, options = tensors("thd")
    padded, _ = tensors("sbhd")
    with pytest.raises(ValueError, match="with qkv_format 'sbhd'"):
        make("sbhd")(*packed)
    with pytest.raises(ValueError, match="with qkv_format 'thd'"):
        make("thd")(*padded, **options)
    with pytest.raises(ValueError, match="with qkv_format 'bshd'"):
        make("bshd")(*padded)


def test_compiled_call_raises():
    module = make()
    q, k, v = tensors("sbhd")[0]
    compiled = torch.compile(module, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), module(q, k, v))
    with pytest.raises(ValueError, match="query, key and value have shapes"):
        compiled(q, k[:3], v)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_row_whose_scores_are_nan_is_nan(name, compiled, value):
    """Without a mask torch's SDPA kernel gives 0."""
    options, call = CALLS[name]
    module = make(**options)
    q, k, v = tensors("sbhd", CHANNELS + 4 if name == "value channels" else CHANNELS)[0]
    q[3, 1, 2] = value
    k[:, 1, 1] = 0  # infinity times zero
    torch.compiler.reset()
    y = (torch.compile(module, backend="aot_eager") if compiled else module)(q, k, v, **call).unflatten(-1, (HEADS, -1))
    assert y[3, 1, 2].isnan().all() and y.isnan().sum() == y.size(-1)


def test_result_does_not_depend_on_memory_behind_the_keys():
    q, k, v = tensors("sbhd")[0]
    results = []
    for foreign in (0.0, 50.0):
        memory = torch.full((64, *k.shape[1:]), foreign)
        memory[: k.size(0)] = k
        results.append(make()(q, memory[: k.size(0)], v, attn_mask_type="padding", attention_mask=PADDING))
        with pytest.raises(ValueError, match="expected"):
            make()(q, memory[: k.size(0) - 1], v, attn_mask_type="padding", attention_mask=PADDING)
    assert torch.equal(*results)


@pytest.mark.parametrize("name", CALLS)
def test_dtypes_and_devices_must_agree(name):
    options, call = CALLS[name]
    given, _ = tensors("sbhd", CHANNELS + 4 if name == "value channels" else CHANNELS)
    for which in range(3):
        for error, change in ((TypeError, lambda t: t.double()), (ValueError, lambda t: t.to("meta"))):
            other = [change(t) if i == which else t for i, t in enumerate(given)]
            with pytest.raises(error, match="DotProductAttention: query, key and value are .* expected one"):
                make(**options)(*other, **call)


def test_group_size_of_the_constructor_applies():
    q = torch.randn(6, 2, HEADS, CHANNELS)
    with pytest.raises(ValueError, match=r"expected \(queries, batch, 4, 8\), \(keys, batch, 2, 8\)"):
        make()(q, q, q)
    module = DotProductAttention(HEADS, CHANNELS, num_gqa_groups=GROUPS, tp_size=2)
    y = module(*(torch.randn(6, 2, heads, CHANNELS) for heads in (2, 1, 1)))
    assert y.shape == (6, 2, 2 * CHANNELS)
    with pytest.raises(ValueError, match="on each of 2 tensor-parallel ranks"):
        module(q, q, q)


def test_contradicting_sizes_of_the_constructor_raise():
    for options, message in (
        ({"num_gqa_groups": 3}, "num_gqa_groups is 3; expected"),
        ({"num_gqa_groups": 0}, "num_gqa_groups is 0; expected"),
        ({"num_gqa_groups": 8}, "num_gqa_groups is 8; expected"),
        ({"tp_size": 3}, "must be multiples of tp_size 3"),
        ({"tp_size": 4}, "must be multiples of tp_size 4"),
        ({"kv_channels": 0}, "kv_channels is 0, expected"),
        ({"kv_channels": (8, 8, 8)}, r"kv_channels is \(8, 8, 8\), expected"),
    ):
        with pytest.raises(ValueError, match=f"DotProductAttention: .*{message}"):
            make(**options)
    for groups in (0, 3):
        with pytest.raises(ValueError, match=f"MultiheadAttention: .*num_gqa_groups is {groups}; expected"):
            MultiheadAttention(32, HEADS, num_gqa_groups=groups)


@pytest.mark.parametrize("training", [False, True])
def test_pair_of_channels_equals_padded_values(training):
    """Values of fewer channels than keys: as with values padded by zeros."""
    q, k, _ = tensors("sbhd")[0]
    v = torch.randn(KEYS, BATCH, GROUPS, 3)
    padded = torch.nn.functional.pad(v, (0, CHANNELS - 3))
    module = make(kv_channels=(CHANNELS, 3)).train(training)
    expected = make().train(training)(q, k, padded).unflatten(-1, (HEADS, CHANNELS))[..., :3].flatten(-2)
    torch.testing.assert_close(module(q, k, v), expected)
    with pytest.raises(NotImplementedError, match="have values of as many channels as keys"):
        offsets = torch.tensor([0, KEYS], dtype=torch.int32)
        packed = [t[:KEYS, 0] for t in (q, k, v)]
        make("thd", kv_channels=(CHANNELS, 3))(*packed, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)


# ---- masks and biases ----


def attend(**options):
    return make()(*tensors("sbhd")[0], **options)


def attend_with_mask(kind, *shape, dtype=torch.bool):
    return attend(attn_mask_type=kind, attention_mask=torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("kind", ["padding", "padding_causal", "arbitrary"])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_masks_that_broadcast_to_the_scores(kind, layout):
    given, _ = tensors(layout)
    shapes = list(itertools.product((1, BATCH), (1, HEADS), (1, QUERIES), (1, KEYS)))
    shapes += [(QUERIES, KEYS), (HEADS, 1, KEYS), (KEYS,), ()] if kind == "arbitrary" else []
    expected = make(layout)(*given, attn_mask_type="causal" if "causal" in kind else "no_mask")
    for shape in shapes:
        y = make(layout)(*given, attn_mask_type=kind, attention_mask=torch.zeros(shape, dtype=torch.bool))
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("kind", ["padding", "arbitrary"])
def test_masks_of_other_sizes_raise(kind):
    sizes = (BATCH, HEADS, QUERIES, KEYS)
    shapes = [(1, *sizes)]
    for dim, change in itertools.product(range(4), (-1, 1)):
        shapes.append(tuple(size + change * (i == dim) for i, size in enumerate(sizes)))
    shapes += [(QUERIES, KEYS), (BATCH, KEYS), (KEYS,)] if kind == "padding" else [(KEYS, QUERIES)]
    for shape in shapes:
        with pytest.raises(ValueError, match=re.escape(f"has shape {list(shape)}, expected {list(sizes)}")):
            attend_with_mask(kind, *shape)
    with pytest.raises(TypeError, match="attention_mask is torch.int64, expected torch.bool"):
        attend_with_mask(kind, 1, 1, 1, KEYS, dtype=torch.int64)
    with pytest.raises(ValueError, match="is on meta, expected cpu"):
        attend(attn_mask_type=kind, attention_mask=torch.zeros(1, 1, 1, KEYS, dtype=torch.bool, device="meta"))
    with pytest.raises(ValueError, match=f"attn_mask_type is '{kind}', but attention_mask is not given"):
        attend(attn_mask_type=kind)


def test_both_masks_of_a_pair_are_checked():
    of_queries = torch.zeros(BATCH, 1, 1, QUERIES, dtype=torch.bool)
    pair = {"attn_mask_type": "padding", "attention_mask": (of_queries, PADDING)}
    assert torch.equal(attend(**pair).isnan(), torch.zeros(QUERIES, BATCH, HEADS * CHANNELS, dtype=torch.bool))
    for wrong in ((PADDING, PADDING), (of_queries, of_queries)):
        with pytest.raises(ValueError, match="has shape .* expected"):
            attend(**pair | {"attention_mask": wrong})
    for wrong in ((PADDING,), (of_queries, PADDING, PADDING)):
        with pytest.raises(ValueError, match=f"has {len(wrong)} tensors"):
            attend(**pair | {"attention_mask": wrong})
    with pytest.raises(ValueError, match="has 2 tensors with attn_mask_type 'arbitrary', expected one"):
        attend(**pair | {"attn_mask_type": "arbitrary"})


def test_bias_and_its_type_must_agree():
    bias = BIAS["core_attention_bias"]
    with pytest.raises(ValueError, match="type is 'no_bias', but core_attention_bias is given"):
        attend(core_attention_bias=bias)
    with pytest.raises(ValueError, match="type is 'post_scale_bias', but core_attention_bias is not given"):
        attend(core_attention_bias_type="post_scale_bias")


def test_biases_of_other_sizes_raise():
    sizes = (BATCH, HEADS, QUERIES, KEYS)
    call = lambda t: attend(core_attention_bias_type="post_scale_bias", core_attention_bias=t)  # noqa: E731
    for shape in itertools.product((1, BATCH), (1, HEADS), (1, QUERIES), (1, KEYS)):
        call(torch.zeros(shape))
    for shape in [(HEADS, QUERIES, KEYS), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, KEYS, KEYS), (1, 1, QUERIES, QUERIES)]:
        with pytest.raises(ValueError, match=re.escape(f"has shape {list(shape)}, expected {list(sizes)}")):
            call(torch.zeros(shape))
    with pytest.raises(TypeError, match="core_attention_bias is torch.float64, expected torch.float32"):
        call(torch.zeros(sizes, dtype=torch.float64))
    with pytest.raises(ValueError, match="core_attention_bias is on meta, expected cpu"):
        call(torch.zeros(sizes, device="meta"))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("window", [(1,), (-2, 0), (0, -3), (1, 1, 1)])
def test_window_is_checked_on_every_path(name, window):
    options, call = CALLS[name]
    given, _ = tensors("sbhd", CHANNELS + 4 if name == "value channels" else CHANNELS)
    with pytest.raises(ValueError, match="DotProductAttention: window_size is .* expected two numbers"):
        make(**options)(*given, **call, window_size=window)


# ---- decoder layers ----


def decoder(**options):
    return TransformerLayer(32, 64, HEADS, hidden_dropout=0.0, attention_dropout=0.0, layer_type="decoder", **options)


def test_bias_applies_to_both_attentions_of_a_decoder():
    module, x, encoded = decoder(), torch.randn(6, 2, 32), torch.randn(6, 2, 32)
    hidden = torch.zeros(1, HEADS, 6, 6)
    hidden[..., 1:] = float("-inf")  # every query sees only the first key, in both attentions
    y = module(x, encoder_output=encoded, core_attention_bias_type="post_scale_bias", core_attention_bias=hidden)
    changed = encoded.clone()
    changed[1:] = 9
    other = module(x, encoder_output=changed, core_attention_bias_type="post_scale_bias", core_attention_bias=hidden)
    assert torch.equal(y, other)
    assert not torch.equal(module(x, encoder_output=encoded), module(x, encoder_output=changed))


def test_bias_that_fits_only_the_self_attention_of_a_decoder_raises():
    bias = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1, HEADS, 6, 6)}
    with pytest.raises(ValueError, match=r"core_attention_bias has shape \[1, 4, 6, 6\], expected \[2, 4, 6, 5\]"):
        decoder()(torch.randn(6, 2, 32), encoder_output=torch.randn(5, 2, 32), **bias)
    with pytest.raises(NotImplementedError, match="alibi_slopes is not supported"):
        decoder()(torch.randn(6, 2, 32), encoder_output=torch.randn(5, 2, 32), alibi_slopes=torch.ones(HEADS))


def test_cross_attention_without_encoder_output_raises():
    x = torch.randn(6, 2, 32)
    with pytest.raises(ValueError, match="TransformerLayer: .* encoder_output is not given"):
        decoder()(x)
    with pytest.raises(ValueError, match="MultiheadAttention: .* encoder_output is not given"):
        MultiheadAttention(32, HEADS, attention_type="cross")(x)
    with pytest.raises(ValueError, match="parallel_attention_mlp is True with layer_type 'decoder'"):
        decoder(parallel_attention_mlp=True)


def test_encoder_output_of_another_batch_raises():
    with pytest.raises(ValueError, match="query, key and value have shapes"):
        decoder()(torch.randn(6, 2, 32), encoder_output=torch.randn(5, 1, 32))
