"""Attention on torch's scaled_dot_product_attention, and what turns keys and queries by their position."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from ._module import EmptyExtraState

_MASKS = ("no_mask", "padding", "causal", "padding_causal", "arbitrary", "causal_bottom_right",
          "padding_causal_bottom_right")  # fmt: skip


def _position_mask(
    rows: int, columns: int, kind: str, window: tuple[int, int] | None, device: Any
) -> torch.Tensor | None:
    """Which keys [rows, columns] a query may see by position: causal from the first or to the last key, and a window of
    `left` keys before and `right` after; -1 is no limit. None: all of them."""
    left, right = window if window is not None else (-1, -1)
    if "causal" in kind:
        right = 0
    if left < 0 and right < 0:
        return None
    first = columns - rows if "bottom_right" in kind or "causal" not in kind else 0
    distance = torch.arange(columns, device=device) - torch.arange(rows, device=device).unsqueeze(1) - first
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        visible &= distance >= -left
    if right >= 0:
        visible &= distance <= right
    return visible


class DotProductAttention(EmptyExtraState):
    """softmax(q kᵀ · scale + mask) v by torch's scaled_dot_product_attention.

    q, k, v have the layout `qkv_format`, "sbhd" or "bshd"; the result joins the last two dimensions, heads and
    channels. In a mask True is a key that is not seen, as in the reference.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
    ) -> None:
        super().__init__()
        if attention_type not in ("self", "cross"):
            raise ValueError(f"DotProductAttention: attention_type is {attention_type!r}, expected 'self' or 'cross'")
        if softmax_type != "vanilla" or return_max_logit:
            raise NotImplementedError("DotProductAttention: only the plain softmax is there, without its largest logit")
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, num_gqa_groups or num_attention_heads
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.kv_channels = kv_channels
        self.softmax_scale = channels**-0.5 if softmax_scale is None else softmax_scale
        self.attention_dropout, self.qkv_format = attention_dropout, qkv_format
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        self.attention_type, self.layer_number = attention_type, layer_number
        self.get_rng_state_tracker = get_rng_state_tracker
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        if cp_group is not None and torch.distributed.get_world_size(cp_group) > 1:
            raise NotImplementedError("DotProductAttention: context parallelism is not there; cp_group must be None")

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        qkv_format: str | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        layout = qkv_format or self.qkv_format
        kind = (attn_mask_type or self.attn_mask_type).replace("causal_padding", "padding_causal")
        self._check(layout, kind, core_attention_bias_type, others)
        to_bhsd = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
        q, k, v = (t.permute(to_bhsd) for t in (query_layer, key_layer, value_layer))
        window = window_size if window_size is not None else self.window_size
        mask = self._mask(q, k, kind, window, attention_mask, core_attention_bias)
        if checkpoint_core_attention and torch.is_grad_enabled():
            out = checkpoint(self._attend, q, k, v, mask, use_reentrant=False)
        else:
            out = self._attend(q, k, v, mask)
        return out.permute((2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3)).flatten(2)

    def _check(self, layout: str, kind: str, bias_type: str, others: dict[str, Any]) -> None:
        if layout not in ("sbhd", "bshd"):
            raise NotImplementedError(f"DotProductAttention: qkv_format is {layout!r}; there are 'sbhd' and 'bshd'")
        if kind not in _MASKS:
            raise ValueError(f"DotProductAttention: attn_mask_type is {kind!r}, expected one of {', '.join(_MASKS)}")
        if bias_type not in ("no_bias", "post_scale_bias"):
            raise NotImplementedError(f"DotProductAttention: core_attention_bias_type {bias_type!r} is not there")
        if others.get("alibi_slopes") is not None or others.get("inference_params") is not None:
            raise NotImplementedError("DotProductAttention: alibi_slopes and inference_params are not there")

    def _mask(self, q, k, kind: str, window, attention_mask, bias) -> torch.Tensor | None:
        """What scaled_dot_product_attention takes: True is seen, or a number to add."""
        visible = _position_mask(q.size(2), k.size(2), kind, window, q.device)
        if attention_mask is not None and ("padding" in kind or kind == "arbitrary"):
            masked = (
                attention_mask[1] if isinstance(attention_mask, tuple) else attention_mask
            )  # of queries and of keys: those of keys count
            visible = ~masked if visible is None else visible & ~masked
        elif "padding" in kind:
            raise ValueError(f"DotProductAttention: attn_mask_type is {kind!r}, but attention_mask is not given")
        if bias is None:
            return visible
        return bias if visible is None else bias.masked_fill(~visible, float("-inf"))

    def _attend(self, q, k, v, mask: torch.Tensor | None) -> torch.Tensor:
        p = self.attention_dropout if self.training else 0.0
        tracker = self.get_rng_state_tracker if p else None
        with tracker().fork() if tracker is not None else nullcontext():
            return scaled_dot_product_attention(
                q, k, v, mask, dropout_p=p, scale=self.softmax_scale, enable_gqa=q.size(1) != k.size(1)
            )


# ---- rotary positions ---------------------------------------------------------------------------------------------


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles [positions, 1, 1, channels] = position · base^(-2i/channels), the same for both halves of the channels."""

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        if pretrained_max_position_embeddings is not None:
            raise NotImplementedError("RotaryPositionEmbedding: pretrained_max_position_embeddings is not there")
        dim = int(dim * rotary_percent)
        self.factor, self.interleaved = seq_len_interpolation_factor or 1.0, interleaved
        frequencies = rotary_base ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self.register_buffer("inv_freq", frequencies)

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        positions = (torch.arange(max_seq_len, device=self.inv_freq.device) + offset) / self.factor
        angles = torch.outer(positions, self.inv_freq.float())
        both = torch.stack([angles, angles], -1).flatten(1) if self.interleaved else torch.cat([angles, angles], -1)
        return both[:, None, None, :]


def _rotate_half(t: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(-b, a) of each pair (a, b)"""
    if interleaved:
        pairs = t.unflatten(-1, (-1, 2))
        return torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2)
    a, b = t.chunk(2, -1)
    return torch.cat([-b, a], -1)


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    interleaved: bool = False,
    fused: bool = False,
    **others: Any,
) -> torch.Tensor:
    """t·cos + rotate_half(t)·sin on the first channels, as many as there are angles; the others stay."""
    if tensor_format not in ("sbhd", "bshd"):
        raise NotImplementedError(f"apply_rotary_pos_emb: tensor_format is {tensor_format!r}; there are sbhd and bshd")
    angles = freqs[: t.size(0 if tensor_format == "sbhd" else 1)]
    if tensor_format == "bshd":
        angles = angles.transpose(0, 1)
    rotary, rest = t.split([angles.size(-1), t.size(-1) - angles.size(-1)], -1)
    cos, sin = angles.cos().to(t.dtype), angles.sin().to(t.dtype)
    return torch.cat([rotary * cos + _rotate_half(rotary, interleaved) * sin, rest], -1)
