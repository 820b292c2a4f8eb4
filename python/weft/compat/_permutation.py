"""Tokens into the order of their experts and back, in plain torch.

A row id map has a row for each token and a column for each expert (or for each choice): the number of the row in the
permuted tensor, or -1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def _row_id_map(routing_map: torch.Tensor, num_out_tokens: int | None, map_type: str) -> torch.Tensor:
    """From a mask [tokens, experts], or from the indices [tokens, choices] of experts; -1 is no expert."""
    if map_type == "mask":
        routed = routing_map.bool()
        rows = routed.T.reshape(-1).cumsum(0).view(routed.T.shape).T - 1  # numbered by expert, then token
    elif map_type == "index":
        routed, flat = routing_map >= 0, routing_map.reshape(-1)
        order = torch.argsort(flat, stable=True)
        indices = torch.arange(flat.numel(), device=flat.device) - (flat < 0).sum()
        rows = torch.empty_like(order).scatter(0, order, indices).view(routing_map.shape)
    else:
        raise ValueError(f"moe_permute: map_type is {map_type!r}, expected 'mask' or 'index'")
    if num_out_tokens is not None and num_out_tokens >= 0:
        routed = routed & (rows < num_out_tokens)
    return rows.masked_fill(~routed, -1)


def _num_permuted_rows(row_id_map: torch.Tensor, num_out_tokens: int | None) -> int:
    """Rows of the permuted tensor. Unless told this depends on values, which a compiler captures with
    ``torch._dynamo.config.capture_scalar_outputs`` only."""
    if num_out_tokens is not None and num_out_tokens >= 0:
        return num_out_tokens
    return int((row_id_map >= 0).sum())


def _row_sources(row_id_map: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token and column of each of `count` rows of the permuted tensor, and whether the row is empty."""
    rows, columns = row_id_map.reshape(-1), row_id_map.size(1)
    rows = torch.where((rows >= 0) & (rows < count), rows, count)  # an extra row takes what is dropped
    indices = torch.arange(rows.numel(), device=rows.device)
    sources = torch.full((count + 1,), -1, dtype=torch.int64, device=rows.device).scatter(0, rows, indices)[:count]
    filled = sources.clamp(min=0)
    return filled // columns, filled % columns, sources < 0


def _zero_rows(rows: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """Zeros in the rows that are empty."""
    return rows.masked_fill(empty.view(-1, *[1] * (rows.dim() - 1)), 0)


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int | None = None,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of `inp` sorted by expert, row id map). More routed rows than `num_out_tokens` are dropped from the end."""
    row_id_map = _row_id_map(routing_map, num_out_tokens, map_type)
    tokens, _, empty = _row_sources(row_id_map, _num_permuted_rows(row_id_map, num_out_tokens))
    return _zero_rows(inp[tokens], empty), row_id_map


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows sorted by expert, their probabilities, row id map); `probs` [tokens, experts] belongs to a mask."""
    row_id_map = _row_id_map(routing_map, num_out_tokens, "mask")
    tokens, experts, empty = _row_sources(row_id_map, _num_permuted_rows(row_id_map, num_out_tokens))
    return _zero_rows(inp[tokens], empty), _zero_rows(probs[tokens, experts], empty), row_id_map


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Sequence[int] | None = None,
    map_type: str = "mask",
    probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token is the sum of its rows, weighted by `merging_probs` [tokens, columns of the map] if given."""
    weights = merging_probs if merging_probs is not None else probs
    if not torch.compiler.is_compiling() and row_id_map.numel() and int(row_id_map.max()) >= inp.size(0):
        raise ValueError(f"moe_unpermute: the row id map has row {int(row_id_map.max())}, inp has {inp.size(0)} rows")
    tokens, columns, empty = _row_sources(row_id_map, inp.size(0))
    rows = inp
    if weights is not None:
        rows = rows * weights[tokens, columns].unsqueeze(-1).to(rows.dtype)
    shape = (row_id_map.size(0), inp.size(-1)) if restore_shape is None else tuple(restore_shape)
    return rows.new_zeros(shape).index_add(0, tokens, _zero_rows(rows, empty))


def _chunk_order(
    split_sizes: torch.Tensor | Sequence[int], sorted_index: torch.Tensor | Sequence[int], inp: torch.Tensor
) -> torch.Tensor:
    """Which row of `inp` each row of the result is."""
    sizes, order = (torch.as_tensor(t, device=inp.device).long() for t in (split_sizes, sorted_index))
    if not torch.compiler.is_compiling() and (
        int(sizes.sum()) != inp.size(0) or sorted(order.tolist()) != list(range(sizes.numel()))
    ):
        raise ValueError(
            f"moe_sort_chunks_by_index: chunks of {sizes.tolist()} rows in the order {order.tolist()}; expected each "
            f"chunk once and {inp.size(0)} rows in all"
        )
    starts, sorted_sizes = sizes.cumsum(0) - sizes, sizes[order]
    ends = sorted_sizes.cumsum(0)
    rows = torch.arange(inp.size(0), device=inp.device)
    chunk = torch.searchsorted(ends, rows, right=True)
    return rows + (starts[order] - (ends - sorted_sizes))[chunk]


def moe_sort_chunks_by_index(
    inp: torch.Tensor, split_sizes: torch.Tensor | Sequence[int], sorted_index: torch.Tensor | Sequence[int]
) -> torch.Tensor:
    """`inp` consists of chunks of `split_sizes` rows; they come out in the order of `sorted_index`."""
    return inp[_chunk_order(split_sizes, sorted_index, inp)]


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    split_sizes: torch.Tensor | Sequence[int],
    sorted_index: torch.Tensor | Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for rows and their probabilities."""
    order = _chunk_order(split_sizes, sorted_index, inp)
    return inp[order], probs[order]
