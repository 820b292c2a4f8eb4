"""Checks of what DotProductAttention gets. torch's SDPA kernels for the CPU compare no lengths of keys and values, and
read past the end of the shorter ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Mask = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def checked_groups(owner: str, heads: int, groups: int | None) -> int:
    """Returns the number of key and value heads, `heads` for None."""
    groups = heads if groups is None else groups
    if heads < 1 or groups < 1 or heads % groups:
        raise ValueError(
            f"{owner}: num_attention_heads is {heads}, num_gqa_groups is {groups}; expected 1 or more, and a number of "
            "groups that divides the heads."
        )
    return groups


def check_window(window: Any) -> None:
    """Raises ValueError unless `window` is None or (left, right)."""
    if window is not None and not (len(window) == 2 and all(size >= -1 for size in window)):
        raise ValueError(
            f"DotProductAttention: window_size is {window}, expected two numbers (left, right) of 0 or more, or -1 for "
            "all keys."
        )


def check_offsets(who: str, name: str, offsets: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless `offsets` can hold the rows at which packed sequences start."""
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{who}: {name} is {offsets.dtype}, expected torch.int32 or torch.int64.")
    if offsets.dim() != 1 or not offsets.numel():
        raise ValueError(
            f"{who}: {name} has shape {list(offsets.shape)}, expected one dimension with the number of sequences + 1."
        )


class HeadSizes(NamedTuple):
    """Numbers of heads on each of `ranks` tensor-parallel ranks, and channels of queries and keys, and of values."""

    heads: int
    groups: int
    key_channels: int
    value_channels: int
    ranks: int

    @classmethod
    def of(cls, heads: int, groups: int, kv_channels: int | Sequence[int], ranks: int) -> HeadSizes:
        """Returns the sizes on one of `ranks` ranks, which share `heads` query heads and `groups` key heads."""
        channels = tuple(kv_channels) if isinstance(kv_channels, Sequence) else (kv_channels, kv_channels)
        if len(channels) != 2 or min(channels) < 1:
            raise ValueError(
                f"DotProductAttention: kv_channels is {kv_channels}, expected a number of 1 or more, or two, of keys "
                "and of values."
            )
        if heads % ranks or groups % ranks:
            raise ValueError(
                f"DotProductAttention: num_attention_heads {heads} and num_gqa_groups {groups} must be multiples of "
                f"tp_size {ranks}."
            )
        return cls(heads // ranks, groups // ranks, *channels, ranks)

    def check(self, layout: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raises unless query, key and value have these sizes, and equal batches, lengths, dtypes and devices."""
        leading = 1 if layout == "thd" else 2
        batch = layout.find("b")
        tails = (self.heads, self.key_channels), (self.groups, self.key_channels), (self.groups, self.value_channels)
        fits = (
            all(t.dim() == leading + 2 and t.shape[leading:] == tail for t, tail in zip((q, k, v), tails, strict=True))
            and k.shape[:leading] == v.shape[:leading]
            and (batch < 0 or q.size(batch) == k.size(batch))
        )
        if not fits:
            raise ValueError(
                f"DotProductAttention: query, key and value have shapes {list(q.shape)}, {list(k.shape)} and "
                f"{list(v.shape)}; expected {self._expected(layout)} with qkv_format {layout!r}."
            )
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(
                f"DotProductAttention: query, key and value are {q.dtype}, {k.dtype} and {v.dtype}; expected one dtype."
            )
        if not q.device == k.device == v.device:
            raise ValueError(
                f"DotProductAttention: query, key and value are on {q.device}, {k.device} and {v.device}; expected one "
                "device."
            )

    def _expected(self, layout: str) -> str:
        queries, keys = {
            "sbhd": ("queries, batch", "keys, batch"),
            "bshd": ("batch, queries", "batch, keys"),
            "thd": ("queries", "keys"),
        }[layout]
        by_rank = "" if self.ranks == 1 else f" on each of {self.ranks} tensor-parallel ranks"
        return (
            f"({queries}, {self.heads}, {self.key_channels}), ({keys}, {self.groups}, {self.key_channels}) and "
            f"({keys}, {self.groups}, {self.value_channels}){by_rank}"
        )


class Scores(NamedTuple):
    """The scores that a mask or a bias applies to: batch, heads, queries, keys."""

    sizes: tuple[int, int, int, int]
    query: torch.Tensor

    def key_mask(self, kind: str, mask: Mask) -> torch.Tensor:
        """Returns the mask that applies to keys, of four dimensions: `mask`, or the second one of a pair, whose first
        masks queries."""
        batch, _, queries, keys = self.sizes
        if not isinstance(mask, (tuple, list)):
            self._check_mask(kind, mask, self.sizes)
            return mask[(None,) * (len(self.sizes) - mask.dim())]
        if len(mask) != 2 or "padding" not in kind:
            raise ValueError(
                f"DotProductAttention: attention_mask has {len(mask)} tensors with attn_mask_type {kind!r}, expected "
                "one; or two, of queries and of keys, for padding."
            )
        for each, length in zip(mask, (queries, keys), strict=True):
            self._check_mask(kind, each, (batch, 1, 1, length))
        return mask[1]

    def _check_mask(self, kind: str, mask: torch.Tensor, sizes: Sequence[int]) -> None:
        if mask.dtype != torch.bool:
            raise TypeError(
                f"DotProductAttention: attention_mask is {mask.dtype}, expected torch.bool, where True masks a key out."
            )
        # A padding mask differs between the sequences of the batch, so it needs the dimension of the batch.
        self._check_operand(f"attention_mask with attn_mask_type {kind!r}", mask, sizes, 4 if "padding" in kind else 0)

    def check_bias(self, bias: torch.Tensor) -> None:
        """Raises unless the bias can be added to the scores."""
        if bias.dtype not in (self.query.dtype, torch.float32):
            raise TypeError(
                f"DotProductAttention: core_attention_bias is {bias.dtype}, expected {self.query.dtype}, the dtype of "
                "the query, or torch.float32."
            )
        self._check_operand("core_attention_bias", bias, self.sizes, 4)

    def _check_operand(self, name: str, t: torch.Tensor, sizes: Sequence[int], dims: int) -> None:
        last = zip(reversed(t.shape), reversed(sizes), strict=False)
        if not dims <= t.dim() <= len(sizes) or any(size not in (1, full) for size, full in last):
            raise ValueError(
                f"DotProductAttention: {name} has shape {list(t.shape)}, expected {list(sizes)}, where any size may be "
                f"1{'' if dims == 4 else ' and leading ones may be left out'}."
            )
        if t.device != self.query.device:
            raise ValueError(
                f"DotProductAttention: {name} is on {t.device}, expected {self.query.device}, the device of the query."
            )
