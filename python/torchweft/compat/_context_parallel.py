"""Attention whose sequences are split over the ranks of a group. Of n ranks, rank r has chunks r and 2n - 1 - r of the
2n equal chunks of each sequence, so that causal attention is the same work on all."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from .. import ops

Attend = Callable[..., torch.Tensor]
_COMMUNICATION = ("p2p", "all_gather", "a2a", "a2a+p2p")


def chunks_of_rank(t: torch.Tensor, ranks: int, rank: int, dim: int = 0) -> torch.Tensor:
    """Returns the part of `t` that one rank has: chunks `rank` and ``2 * ranks - 1 - rank`` of dimension `dim`."""
    if t.size(dim) % (2 * ranks):
        raise ValueError(
            f"context parallelism: the sequence has {t.size(dim)} rows, expected a multiple of {2 * ranks}, two chunks "
            f"for each of {ranks} ranks."
        )
    chunks = t.chunk(2 * ranks, dim)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim)


def check_communication(kind: str) -> None:
    """Raises ValueError unless `kind` is a `cp_comm_type` of Transformer Engine. The kind has no effect."""
    if kind not in _COMMUNICATION:
        raise ValueError(f"DotProductAttention: cp_comm_type is {kind!r}, expected one of {', '.join(_COMMUNICATION)}.")


class ContextParallelGroup:
    """Gathers the keys and values of all ranks; their gradients are summed and returned to the ranks that own them.

    Args:
        group: process group.
    """

    def __init__(self, group: Any) -> None:
        self.ranks, self.rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
        self._gather = ops.AllGather(group)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(
        self,
        attend: Attend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: str,
        kind: str,
        window: tuple[int, int] | None,
        *cu_seqlens: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the attention of this rank's queries to the keys of all ranks. The ranks compare their shapes and
        sequences before anything is computed.

        Args:
            attend: computes the attention of one rank; its arguments are those that follow.
            q, k, v: this rank's rows.
            layout: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
            kind: ``"causal"``, ``"causal_bottom_right"`` or ``"no_mask"``.
            window: window of a causal mask.
            *cu_seqlens: for packed sequences, the row at which each whole sequence of queries and of keys starts.
        """
        dim = 1 if layout == "bshd" else 0
        keys, values = self._gather_pair(k, v, dim)
        self._check(q, k, v, layout, kind, window)
        if layout == "thd":
            return self._attend_packed(attend, q, keys, values, kind, window, *cu_seqlens)
        keys, values = self._in_order(keys, dim), self._in_order(values, dim)
        if kind == "no_mask":
            return attend(q, keys, values, layout, kind, None)
        rows = q.size(dim) // 2
        parts = []
        for part, chunks in zip(q.chunk(2, dim), self._visible_chunks(), strict=True):
            visible = (t.narrow(dim, 0, chunks * rows) for t in (keys, values))
            parts.append(attend(part, *visible, layout, "causal_bottom_right", window))
        return torch.cat(parts, dim)

    def _check(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: str,
        kind: str,
        window: tuple[int, int] | None,
    ) -> None:
        dim = 1 if layout == "bshd" else 0
        if q.size(dim) != k.size(dim):
            raise NotImplementedError(
                f"DotProductAttention: query, key and value have shapes {list(q.shape)}, {list(k.shape)} and "
                f"{list(v.shape)}; context parallelism takes the same number of rows in all."
            )
        if layout != "thd" and q.size(dim) % 2:
            raise ValueError(
                f"DotProductAttention: a rank has {q.size(dim)} rows, expected an even number: context parallelism "
                "splits a sequence into two chunks per rank."
            )
        if kind == "no_mask" and window is not None and tuple(window) != (-1, -1):
            raise NotImplementedError(
                "DotProductAttention: with context parallelism window_size needs a causal mask. Leave it None."
            )

    def _visible_chunks(self) -> tuple[int, int]:
        """Returns how many chunks the queries of this rank's first and second chunk attend to."""
        return self.rank + 1, 2 * self.ranks - self.rank

    def _gather_pair(self, k: torch.Tensor, v: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of all ranks, by rank along dimension `dim`."""
        if k.shape != v.shape:
            raise NotImplementedError(
                f"DotProductAttention: key and value have shapes {list(k.shape)} and {list(v.shape)}; context "
                "parallelism takes the same."
            )
        both: torch.Tensor = self._gather(torch.stack([k, v], -2).transpose(0, dim).contiguous()).transpose(0, dim)
        keys, values = both.unbind(-2)
        return keys, values

    def _in_order(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        """Puts chunks that are ordered by rank into the order of the sequence."""
        chunks = t.chunk(2 * self.ranks, dim)
        return torch.cat([*chunks[::2], *chunks[::-2]], dim)

    def _attend_packed(
        self,
        attend: Attend,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kind: str,
        window: tuple[int, int] | None,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
    ) -> torch.Tensor:
        """Each sequence as two, one per chunk of queries, each with a copy of the keys that it attends to. `keys` and
        `values` are those of all ranks."""
        starts = self._starts(cu_seqlens_q, cu_seqlens_kv, q.size(0))
        chunk_rows = [(end - start) // (2 * self.ranks) for start, end in pairwise(starts)]
        visible = (2 * self.ranks, 2 * self.ranks) if kind == "no_mask" else self._visible_chunks()
        rows = torch.cat([
            self._gathered_rows(start // self.ranks, size, q.size(0))[: chunks * size]
            for start, size in zip(starts[:-1], chunk_rows, strict=True)
            for chunks in visible
        ])  # fmt: skip
        keys, values = keys.index_select(0, rows), values.index_select(0, rows)
        queries = torch.tensor([0, *(size for size in chunk_rows for _ in visible)])
        attended = torch.tensor([0, *(chunks * size for size in chunk_rows for chunks in visible)])
        offsets = (lengths.cumsum(0, dtype=torch.int32) for lengths in (queries, attended))
        return attend(
            q, keys, values, "thd", "no_mask" if kind == "no_mask" else "causal_bottom_right", window, *offsets
        )

    def _starts(self, cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor, rows: int) -> list[int]:
        starts: list[int] = cu_seqlens_q.tolist()
        checksum = torch.tensor([[zlib.crc32(repr(starts).encode())]], dtype=torch.float64)
        if self._gather(checksum).unique().numel() > 1:
            raise ValueError(
                "DotProductAttention: cu_seqlens differs between the ranks of cp_group; expected the same."
            )
        if cu_seqlens_kv.tolist() != starts:
            raise NotImplementedError(
                "DotProductAttention: cu_seqlens_q and cu_seqlens_kv differ; context parallelism takes the same "
                "sequences of queries and keys."
            )
        aligned = len(starts) > 1 and starts[0] == 0 and not any(start % (2 * self.ranks) for start in starts)
        if not aligned or starts != sorted(starts) or starts[-1] != rows * self.ranks:
            raise ValueError(
                f"DotProductAttention: cu_seqlens is {starts} and this rank has {rows} rows; with context parallelism "
                f"over {self.ranks} ranks it starts at 0, does not decrease and counts the rows of all ranks, and each "
                f"sequence is a multiple of {2 * self.ranks}."
            )
        return starts

    def _gathered_rows(self, start: int, size: int, rows_per_rank: int) -> torch.Tensor:
        """Returns where the rows of a sequence, in order, are in tensors gathered from all ranks. On its rank, the
        sequence begins at row `start`, and its chunks have `size` rows."""
        ranks = torch.arange(self.ranks)
        first = ranks * rows_per_rank + start
        return (torch.cat([first, first.flip(0) + size])[:, None] + torch.arange(size)).flatten()
