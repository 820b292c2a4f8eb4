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
        order = routing_map.bool().T.nonzero().flip(1)  # (token, expert), sorted by expert, then token
    elif map_type == "index":
        flat = routing_map.reshape(-1)
        order = torch.argsort(flat, stable=True)
        order = order[flat[order] >= 0]
        choices = routing_map.size(1)
        order = torch.stack([order // choices, order % choices], 1)
    else:
        raise ValueError(f"moe_permute: map_type is {map_type!r}, expected 'mask' or 'index'")
    if num_out_tokens is not None and num_out_tokens >= 0:
        order = order[:num_out_tokens]
    rows = torch.full(routing_map.shape, -1, dtype=torch.int64, device=routing_map.device)
    rows[order[:, 0], order[:, 1]] = torch.arange(len(order), device=rows.device)
    return rows


def _places(row_id_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(token, column) of each row of the permuted tensor."""
    places = (row_id_map >= 0).nonzero()
    places = places[torch.argsort(row_id_map[places[:, 0], places[:, 1]])]
    return places[:, 0], places[:, 1]


def _padded(rows: torch.Tensor, count: int | None) -> torch.Tensor:
    """Rows of zeros behind, up to `count`."""
    missing = (count or 0) - rows.size(0)
    return rows if missing <= 0 else torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int | None = None,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of `inp` sorted by expert, row id map). More routed rows than `num_out_tokens` are dropped from the end."""
    row_id_map = _row_id_map(routing_map, num_out_tokens, map_type)
    tokens, _ = _places(row_id_map)
    return _padded(inp[tokens], num_out_tokens), row_id_map


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows sorted by expert, their probabilities, row id map); `probs` [tokens, experts] belongs to a mask."""
    row_id_map = _row_id_map(routing_map, num_out_tokens, "mask")
    tokens, experts = _places(row_id_map)
    permuted = _padded(inp[tokens], num_out_tokens)
    return permuted, _padded(probs[tokens, experts], num_out_tokens), row_id_map


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
    tokens, columns = _places(row_id_map)
    rows = inp[: len(tokens)]
    if weights is not None:
        rows = rows * weights[tokens, columns].unsqueeze(-1).to(rows.dtype)
    shape = (row_id_map.size(0), inp.size(-1)) if restore_shape is None else tuple(restore_shape)
    return rows.new_zeros(shape).index_add(0, tokens, rows)


def _chunk_order(split_sizes: torch.Tensor | Sequence[int], sorted_index: torch.Tensor | Sequence[int]) -> torch.Tensor:
    sizes, order = torch.as_tensor(split_sizes).tolist(), torch.as_tensor(sorted_index).tolist()
    chunks = torch.arange(sum(sizes)).split(sizes)
    return torch.cat([chunks[i] for i in order]) if order else torch.arange(0)


def moe_sort_chunks_by_index(
    inp: torch.Tensor, split_sizes: torch.Tensor | Sequence[int], sorted_index: torch.Tensor | Sequence[int]
) -> torch.Tensor:
    """`inp` consists of chunks of `split_sizes` rows; they come out in the order of `sorted_index`."""
    return inp[_chunk_order(split_sizes, sorted_index).to(inp.device)]


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    split_sizes: torch.Tensor | Sequence[int],
    sorted_index: torch.Tensor | Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for rows and their probabilities."""
    order = _chunk_order(split_sizes, sorted_index).to(inp.device)
    return inp[order], probs[order]
