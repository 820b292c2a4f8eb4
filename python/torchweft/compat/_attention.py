"""Attention by weft, or by torch's scaled_dot_product_attention for masks given as tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from .. import ops
from .._arguments import argument_names, reject_unknown
from ._attention_checks import HeadSizes, Mask, Scores, check_offsets, check_window, checked_groups
from ._context_parallel import ContextParallelGroup, check_communication
from ._module import EmptyExtraState

_POSITION_MASKS = ("no_mask", "causal", "causal_bottom_right")
_MASKS = ("no_mask", "padding", "causal", "padding_causal", "arbitrary", "causal_bottom_right",
          "padding_causal_bottom_right")  # fmt: skip
# Further arguments of Transformer Engine's forward: those without effect on the result, and the others.
_IGNORED_ARGUMENTS = {"fast_zero_fill", "max_seqlen_kv", "max_seqlen_q", "num_splits"}
_UNSUPPORTED_ARGUMENTS = {
    "alibi_slopes", "bottom_right_diagonal", "cu_seqlens_kv_padded", "cu_seqlens_q_padded", "fp8_output",
    "inference_params", "pad_between_seqs",
}  # fmt: skip


@lru_cache(maxsize=64)
def _attention(
    heads: int,
    groups: int,
    channels: int,
    mask: str,
    window: tuple[int, int] | None,
    scale: float,
    dropout: float,
    layout: str,
) -> ops.CrossDotProductAttention:
    return ops.CrossDotProductAttention(
        heads,
        channels,
        num_gqa_groups=groups,
        attn_mask_type=mask,
        window_size=window,
        softmax_scale=scale,
        attention_dropout=dropout,
        qkv_format=layout,
    )


def _position_mask(
    rows: int, columns: int, kind: str, window: tuple[int, int] | None, device: Any
) -> torch.Tensor | None:
    """Returns the boolean mask [rows, columns] of the keys that each query attends to by position: causal, aligned to
    the first or (bottom right) to the last key, within a window of (left, right) keys, -1 for no limit. None: all."""
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
    """Computes softmax(q kᵀ · scale + mask) v with :class:`torchweft.ops.CrossDotProductAttention`, or with torch's
    scaled_dot_product_attention for padding and arbitrary masks, biases, values of other channels than keys, and under
    ``torch.compile``.

    Args:
        num_attention_heads: number of query heads, over all ranks.
        kv_channels: channels per head, or a pair of those of keys and of values.
        num_gqa_groups: number of key and value heads, over all ranks; None: `num_attention_heads`.
        attention_dropout: dropout probability of the attention weights in training.
        qkv_format: layout of the inputs, ``"sbhd"``, ``"bshd"`` or ``"thd"`` (packed sequences).
        attn_mask_type: ``"no_mask"``, ``"padding"``, ``"causal"``, ``"padding_causal"``, ``"arbitrary"``,
            ``"causal_bottom_right"`` or ``"padding_causal_bottom_right"``.
        window_size: (left, right) limits of a sliding window; -1 for no limit.
        get_rng_state_tracker: returns the tracker whose random numbers dropout uses.
        tp_group, tp_size: tensor-parallel group, or the number of ranks, which share the heads.
        cp_group: context-parallel group, whose ranks have two chunks of each sequence: of n ranks, rank r has chunks r
            and 2n - 1 - r.
        cp_comm_type: ignored: keys and values are gathered from all ranks.
        softmax_scale: None: 1 / sqrt(channels per head).

    The other arguments are Transformer Engine's; other softmax types and `return_max_logit` are not supported.

    Shape:
        - query_layer, key_layer, value_layer: ``(s, b, h, d)``, ``(b, s, h, d)`` or ``(t, h, d)``.
        - attention_mask: True masks a key out, as in Transformer Engine.
        - Output: ``(s, b, h * d)``, ``(b, s, h * d)`` or ``(t, h * d)``.
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
            raise ValueError(f"DotProductAttention: attention_type is {attention_type!r}, expected 'self' or 'cross'.")
        if softmax_type != "vanilla" or return_max_logit:
            raise NotImplementedError(
                "DotProductAttention: only softmax_type='vanilla' and return_max_logit=False are supported."
            )
        self.num_attention_heads, self.kv_channels = num_attention_heads, kv_channels
        self.num_gqa_groups = checked_groups("DotProductAttention", num_attention_heads, num_gqa_groups)
        self.tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        self._sizes = HeadSizes.of(num_attention_heads, self.num_gqa_groups, kv_channels, self.tp_size)
        self.softmax_scale = self._sizes.key_channels**-0.5 if softmax_scale is None else softmax_scale
        self.attention_dropout, self.qkv_format = attention_dropout, qkv_format
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        self.attention_type, self.layer_number = attention_type, layer_number
        self.get_rng_state_tracker = get_rng_state_tracker
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Splits sequences over the ranks of a group, from the next call on.

        Args:
            cp_group: process group; None or a group of one rank: sequences are whole.
            cp_global_ranks, cp_stream: ignored.
            cp_comm_type: ignored.
        """
        if isinstance(cp_group, (list, tuple)):
            raise NotImplementedError(
                f"DotProductAttention: cp_group is a list of {len(cp_group)} groups; hierarchical context parallelism "
                "is not supported. Pass one group."
            )
        check_communication(cp_comm_type)
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type
        several = cp_group is not None and torch.distributed.get_world_size(cp_group) > 1
        self._context_parallel = ContextParallelGroup(cp_group) if several else None

    def context_parallel_ranks(self) -> tuple[int, int]:
        """Returns the number of ranks over which sequences are split, and this rank."""
        context = self._context_parallel
        return (1, 0) if context is None else (context.ranks, context.rank)

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: Mask | None = None,
        qkv_format: str | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Returns the attention output; the class describes the shapes.

        Args:
            query_layer, key_layer, value_layer: query, key and value.
            attention_mask: for padding and arbitrary masks, True where a key is masked out. Not used for packed
                sequences.
            qkv_format, attn_mask_type, window_size: replace the values given to the constructor.
            checkpoint_core_attention: recompute the attention in backward if torch computes it; weft saves no scores.
            core_attention_bias_type: ``"no_bias"`` or ``"post_scale_bias"``.
            core_attention_bias: added to the scaled scores.
            cu_seqlens_q, cu_seqlens_kv: for packed sequences, the row at which each sequence of queries and of keys
                starts, and the number of rows.
            **others: arguments of Transformer Engine that do not change the result are ignored, others must be None.
        """
        layout = qkv_format or self.qkv_format
        kind = (attn_mask_type or self.attn_mask_type).replace("causal_padding", "padding_causal")
        window = window_size if window_size is not None else self.window_size
        qkv = query_layer, key_layer, value_layer
        self._check(layout, kind, window, core_attention_bias_type, core_attention_bias, others)
        self._sizes.check(layout, *qkv)
        if layout == "thd":
            offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
            return self._attend_packed(*qkv, kind, window, core_attention_bias, offsets)
        if cu_seqlens_q is not None or cu_seqlens_kv is not None:
            raise NotImplementedError(
                f"DotProductAttention: cu_seqlens is not supported with qkv_format {layout!r}. Pass attention_mask, or "
                "packed sequences with qkv_format 'thd'."
            )
        by_position = kind in _POSITION_MASKS and core_attention_bias is None
        if self._context_parallel is not None and not by_position:
            raise NotImplementedError(
                f"DotProductAttention: context parallelism takes attn_mask_type {', '.join(_POSITION_MASKS)} and "
                f"no bias, got {kind!r}{'' if core_attention_bias is None else ' and a bias'}."
            )
        same_channels = self._sizes.key_channels == self._sizes.value_channels
        if self._context_parallel is not None or (by_position and same_channels and not torch.compiler.is_compiling()):
            return self._attend(*qkv, layout, kind, window)
        to_bhsd = (1, 2, 0, 3) if layout == "sbhd" else (0, 2, 1, 3)
        q, k, v = (t.permute(to_bhsd) for t in qkv)
        visible = _position_mask(q.size(2), k.size(2), kind, window, q.device)
        scores = Scores((q.size(0), q.size(1), q.size(2), k.size(2)), q)
        mask = self._mask(visible, kind, scores, attention_mask, core_attention_bias)
        if checkpoint_core_attention and torch.is_grad_enabled():
            out: torch.Tensor = checkpoint(self._attend_masked, q, k, v, mask, use_reentrant=False)
        else:
            out = self._attend_masked(q, k, v, mask)
        return out.permute((2, 0, 1, 3) if layout == "sbhd" else (0, 2, 1, 3)).flatten(2)

    def _check(
        self,
        layout: str,
        kind: str,
        window: tuple[int, int] | None,
        bias_type: str,
        bias: torch.Tensor | None,
        others: dict[str, Any],
    ) -> None:
        if layout not in ("sbhd", "bshd", "thd"):
            raise NotImplementedError(
                f"DotProductAttention: qkv_format is {layout!r}, expected 'sbhd', 'bshd' or 'thd'."
            )
        if kind not in _MASKS:
            raise ValueError(f"DotProductAttention: attn_mask_type is {kind!r}, expected one of {', '.join(_MASKS)}.")
        if bias_type not in ("no_bias", "post_scale_bias"):
            raise NotImplementedError(
                f"DotProductAttention: core_attention_bias_type is {bias_type!r}, expected 'no_bias' or "
                "'post_scale_bias'."
            )
        if (bias is not None) != (bias_type == "post_scale_bias"):
            raise ValueError(
                f"DotProductAttention: core_attention_bias_type is {bias_type!r}, but core_attention_bias is "
                f"{'not ' if bias is None else ''}given. Pass both 'post_scale_bias' and a bias, or neither."
            )
        check_window(window)
        for name, value in others.items():
            if name not in _IGNORED_ARGUMENTS | _UNSUPPORTED_ARGUMENTS:
                reject_unknown("DotProductAttention.forward", name, argument_names(inspect.signature(self.forward)))
            if name in _UNSUPPORTED_ARGUMENTS and value is not None and value is not False:
                raise NotImplementedError(f"DotProductAttention: {name} is not supported. Leave it out.")

    def _mask(
        self,
        visible: torch.Tensor | None,
        kind: str,
        scores: Scores,
        attention_mask: Mask | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Returns the mask of scaled_dot_product_attention: boolean, True attends; or a bias to add."""
        if attention_mask is not None and ("padding" in kind or kind == "arbitrary"):
            masked = scores.key_mask(kind, attention_mask)
            visible = ~masked if visible is None else visible & ~masked
        elif "padding" in kind or kind == "arbitrary":
            raise ValueError(
                f"DotProductAttention: attn_mask_type is {kind!r}, but attention_mask is not given. Pass a mask, or "
                "attn_mask_type 'no_mask'."
            )
        if bias is None:
            return visible
        scores.check_bias(bias)
        return bias if visible is None else bias.masked_fill(~visible, float("-inf"))

    def _random_state(self, p: float) -> Any:
        """Returns the context in which dropout with probability p draws random numbers."""
        return nullcontext() if p == 0 or self.get_rng_state_tracker is None else self.get_rng_state_tracker().fork()

    def _attend_packed(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kind: str,
        window: tuple[int, int] | None,
        bias: torch.Tensor | None,
        offsets: dict[str, torch.Tensor | None],
    ) -> torch.Tensor:
        """Attention of packed sequences, which need no padding."""
        given = []
        for name, value in offsets.items():
            if value is None:
                raise ValueError(
                    f"DotProductAttention: qkv_format is 'thd', but {name} is not given. Pass the row at which each "
                    "sequence starts."
                )
            check_offsets("DotProductAttention", name, value)
            given.append(value)
        kind = {"padding": "no_mask"}.get(kind, kind.removeprefix("padding_"))
        if kind not in _POSITION_MASKS or bias is not None:
            raise NotImplementedError(
                "DotProductAttention: packed sequences (qkv_format 'thd') have no arbitrary mask and no bias."
            )
        if self._sizes.key_channels != self._sizes.value_channels:
            raise NotImplementedError(
                f"DotProductAttention: kv_channels is {self.kv_channels}; packed sequences (qkv_format 'thd') have "
                "values of as many channels as keys. Pass one number."
            )
        return self._attend(q, k, v, "thd", kind, window, *given)

    def _attend(self, *call: Any) -> torch.Tensor:
        """Attention of this rank's queries to the keys of all context-parallel ranks. The arguments are those of
        :meth:`_attend_local`."""
        if self._context_parallel is None:
            return self._attend_local(*call)
        y: torch.Tensor = self._context_parallel.run(self._attend_local, *call)
        return y

    def _attend_local(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: str,
        kind: str,
        window: tuple[int, int] | None,
        *offsets: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention with a mask by position. Saves nothing of the size of the scores, so it is never recomputed."""
        p = self.attention_dropout if self.training else 0.0
        pair = None if window is None else (window[0], window[1])
        attention = _attention(q.size(-2), k.size(-2), q.size(-1), kind, pair, self.softmax_scale, p, layout)
        with self._random_state(p):
            y: torch.Tensor = attention(q.flatten(-2), k.flatten(-2), v.flatten(-2), *offsets)
        return y

    def _attend_masked(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention with a mask given as a tensor, of (batch, heads, s, channels)."""
        p = self.attention_dropout if self.training else 0.0
        if mask is None:  # with which torch's kernel gives 0 where all scores are NaN
            mask = q.new_ones((), dtype=torch.bool).expand(q.size(2), k.size(2))
        with self._random_state(p):
            return scaled_dot_product_attention(
                q, k, v, mask, dropout_p=p, scale=self.softmax_scale, enable_gqa=q.size(1) != k.size(1)
            )
