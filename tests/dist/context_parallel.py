"""One rank of test_compat_parallel.py: attention and layers whose sequences are split over ranks, compared in float64
with one process.

RANK=0 WORLD_SIZE=2 python context_parallel.py FOLDER
"""

import os
import sys
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from torchweft.compat import transformer_engine

transformer_engine.install()
import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb  # noqa: E402

HEADS, GROUPS, CHANNELS, BATCH = 4, 2, 8, 2
DTYPE = torch.float64
TOLERANCES = {torch.float64: 1e-12, torch.bfloat16: 3e-2}


def split(t: torch.Tensor, dim: int) -> torch.Tensor:
    """This rank's two chunks of sequences along `dim`."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    chunks = t.chunk(2 * ranks, dim)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim)


def split_packed(t: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.cat([split(part, 0) for part in t.split(lengths)])


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DTYPE)


def compare(attend, mine, tensors, dy, part) -> None:
    """attend on whole tensors and `mine` on this rank's parts: values, and gradients of this rank's rows."""
    whole = [t.clone().requires_grad_() for t in tensors]
    y = attend(*whole)
    y.backward(dy)
    own = [part(t).contiguous().requires_grad_() for t in tensors]
    got = mine(*own)
    bounds = dict.fromkeys(("rtol", "atol"), TOLERANCES[DTYPE])
    torch.testing.assert_close(got, part(y), **bounds)
    got.backward(part(dy))
    for t, expected in zip(own, whole, strict=True):
        torch.testing.assert_close(t.grad, part(expected.grad), **bounds)


def attentions(**options) -> tuple[torch.nn.Module, torch.nn.Module]:
    make = lambda **more: te.DotProductAttention(HEADS, CHANNELS, GROUPS, **options, **more)  # noqa: E731
    return make(), make(cp_group=dist.group.WORLD, cp_comm_type="all_gather")


def check_dense(layout: str, mask: str, window) -> None:
    sequence = 12 * dist.get_world_size()
    shape = (sequence, BATCH) if layout == "sbhd" else (BATCH, sequence)
    dim = 0 if layout == "sbhd" else 1
    tensors = [random(*shape, heads, CHANNELS) for heads in (HEADS, GROUPS, GROUPS)]
    pair = attentions(qkv_format=layout, attn_mask_type=mask, window_size=window)
    compare(*pair, tensors, random(*shape, HEADS * CHANNELS), lambda t: split(t, dim))


def check_packed(mask: str, window) -> None:
    lengths = [n * 2 * dist.get_world_size() for n in (3, 1, 0, 2)]
    total = sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    pair = attentions(qkv_format="thd", attn_mask_type=mask, window_size=window)
    calls = [lambda *qkv, a=a: a(*qkv, cu_seqlens_q=offsets, cu_seqlens_kv=offsets) for a in pair]
    tensors = [random(total, heads, CHANNELS) for heads in (HEADS, GROUPS, GROUPS)]
    compare(*calls, tensors, random(total, HEADS * CHANNELS), lambda t: split_packed(t, lengths))


def check_rotary() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    lengths = [4 * ranks, 2 * ranks, 0]
    angles = te.RotaryPositionEmbedding(CHANNELS)(8 * ranks).double()
    t, offsets = random(sum(lengths), HEADS, CHANNELS), torch.tensor([0, *lengths]).cumsum(0)
    whole = [apply_rotary_pos_emb(part[:, None], angles)[:, 0] for part in t.split(lengths)]
    own = {"tensor_format": "thd", "cu_seqlens": offsets, "cp_size": ranks, "cp_rank": rank}
    expected = torch.cat([split(part, 0) for part in whole])
    torch.testing.assert_close(apply_rotary_pos_emb(split_packed(t, lengths), angles, **own), expected)


def check_layer(layout: str) -> None:
    """A layer with rotary embeddings; gradients of its Parameters are summed over the ranks."""
    sequence = 4 * dist.get_world_size()
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
    options["attn_input_format"] = layout
    make = lambda: te.TransformerLayer(32, 64, HEADS, params_dtype=torch.float64, **options)  # noqa: E731
    whole, mine = make(), make()
    mine.load_state_dict(whole.state_dict())
    mine.set_context_parallel_group(dist.group.WORLD)
    angles = te.RotaryPositionEmbedding(CHANNELS)(sequence).double()
    call = lambda layer: lambda x: layer(x, rotary_pos_emb=angles)  # noqa: E731
    shape, dim = ((sequence, BATCH, 32), 0) if layout == "sbhd" else ((BATCH, sequence, 32), 1)
    compare(call(whole), call(mine), [random(*shape)], random(*shape), lambda t: split(t, dim))
    for (name, p), other in zip(whole.named_parameters(), mine.parameters(), strict=True):
        dist.all_reduce(other.grad)
        torch.testing.assert_close(other.grad, p.grad, rtol=1e-10, atol=1e-10, msg=name)


def check_packed_layer() -> None:
    """MultiheadAttention of packed sequences with rotary embeddings."""
    lengths = [n * 2 * dist.get_world_size() for n in (3, 1)]
    options = {"attention_dropout": 0.0, "attn_mask_type": "padding_causal", "qkv_format": "thd"}
    make = lambda: te.MultiheadAttention(32, HEADS, params_dtype=torch.float64, **options)  # noqa: E731
    whole, mine = make(), make()
    mine.load_state_dict(whole.state_dict())
    mine.set_context_parallel_group(dist.group.WORLD)
    offsets, total = torch.tensor([0, *lengths]).cumsum(0).int(), sum(lengths)
    more = {"rotary_pos_emb": te.RotaryPositionEmbedding(CHANNELS)(total).double()}
    more |= {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    call = lambda layer: lambda x: layer(x, **more)  # noqa: E731
    part = lambda t: split_packed(t, lengths)  # noqa: E731
    compare(call(whole), call(mine), [random(total, 32)], random(total, 32), part)


def raises(kind: type, text: str, call) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error with {text!r}")


def check_errors() -> None:
    _, attention = attentions()
    q, k = random(4, BATCH, HEADS, CHANNELS), random(4, BATCH, GROUPS, CHANNELS)
    raises(ValueError, "a rank has 3 rows", lambda: attention(q[:3], k[:3], k[:3]))
    raises(NotImplementedError, "the same number of rows", lambda: attention(q, k[:2], k[:2]))
    raises(NotImplementedError, "got 'padding'", lambda: attention(q, k, k, attn_mask_type="padding"))
    raises(
        NotImplementedError,
        "window_size needs",
        lambda: attention(q, k, k, attn_mask_type="no_mask", window_size=(1, 1)),
    )
    raises(
        ValueError, "cp_comm_type is 'ring'", lambda: attention.set_context_parallel_group(None, cp_comm_type="ring")
    )
    raises(NotImplementedError, "one group", lambda: attention.set_context_parallel_group([dist.group.WORLD]))
    first = [0, 4 * dist.get_world_size()]
    offsets = torch.tensor(first if dist.get_rank() == 0 else [0, 2 * dist.get_world_size(), *first[1:]])
    differing = {"qkv_format": "thd", "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    raises(ValueError, "differs between the ranks", lambda: attention(q[:, 0], k[:, 0], k[:, 0], **differing))
    ranks = dist.get_world_size()
    offsets = torch.tensor([0, 8 * ranks, 4 * ranks])
    packed = {"qkv_format": "thd", "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    raises(ValueError, "does not decrease", lambda: attention(q[:, 0], k[:, 0], k[:, 0], **packed))
    raises(ValueError, "query, key and value have shapes", lambda: attention(q, k, k[:, :1]))
    offsets = torch.tensor([0, 3])
    packed = {"qkv_format": "thd", "cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    raises(ValueError, "cu_seqlens is [0, 3]", lambda: attention(q[:, 0], k[:, 0], k[:, 0], **packed))


def main() -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{sys.argv[1]}/store{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    torch.manual_seed(3)
    masks = [("causal", None), ("causal", (5, 0)), ("causal_bottom_right", None), ("no_mask", None)]
    global DTYPE
    for dtype in (torch.bfloat16, torch.float64):
        DTYPE = dtype
        for layout, (mask, window) in product(("sbhd", "bshd"), masks):
            check_dense(layout, mask, window)
        for mask, window in masks:
            check_packed("padding" if mask == "no_mask" else f"padding_{mask}", window)
    check_rotary()
    check_layer("sbhd")
    check_layer("bshd")
    check_packed_layer()
    check_errors()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
