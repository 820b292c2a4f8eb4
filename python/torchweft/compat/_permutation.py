"""Permutation of tokens by expert and back, in torch operations.

A row id map has one row per token and one column per expert (or per choice): the index of the token's row in the
permuted tensor, or -1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def _row_id_map(routing_map: torch.Tensor, num_out_tokens: int | None, map_type: str) -> torch.Tensor:
    """Makes the row id map from a mask [tokens, experts], or from expert indices [tokens, choices], -1 for none."""
    if map_type == "mask":
        routed = routing_map.bool()
        rows = routed.T.reshape(-1).cumsum(0).view(routed.T.shape).T - 1  # ordered by expert, then by token
    elif map_type == "index":
        routed, flat = routing_map >= 0, routing_map.reshape(-1)
        order = torch.argsort(flat, stable=True)
        indices = torch.arange(flat.numel(), device=flat.device) - (flat < 0).sum()
        rows = torch.empty_like(order).scatter(0, order, indices).view(routing_map.shape)
    else:
        raise ValueError(f"moe_permute: map_type is {map_type!r}, expected 'mask' or 'index'.")
    if num_out_tokens is not None and num_out_tokens >= 0:
        routed = routed & (rows < num_out_tokens)
    return rows.masked_fill(~routed, -1)


def _check_shape(name: str, t: torch.Tensor, expected: Sequence[int], why: str) -> None:
    """Raises ValueError unless t has the shape `expected`. `name` has the function and the argument."""
    if t.shape != tuple(expected):
        raise ValueError(f"{name} has shape {list(t.shape)}, expected {list(expected)}, {why}.")


def _check_map(who: str, inp: torch.Tensor, routing_map: torch.Tensor) -> None:
    if routing_map.dim() != 2 or inp.dim() < 1 or routing_map.size(0) != inp.size(0):
        raise ValueError(
            f"{who}: inp has shape {list(inp.shape)}, routing_map {list(routing_map.shape)}; expected a map of two "
            "dimensions with one row per token."
        )


def _num_permuted_rows(row_id_map: torch.Tensor, num_out_tokens: int | None) -> int:
    """Returns the number of rows of the permuted tensor. Without `num_out_tokens` it depends on data; torch.compile
    captures that only with ``torch._dynamo.config.capture_scalar_outputs``."""
    if num_out_tokens is not None and num_out_tokens >= 0:
        return num_out_tokens
    return int((row_id_map >= 0).sum())


def _row_sources(row_id_map: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns token, column and emptiness of each of the `count` rows of the permuted tensor."""
    rows, columns = row_id_map.reshape(-1), row_id_map.size(1)
    rows = torch.where((rows >= 0) & (rows < count), rows, count)  # dropped tokens go to an extra row
    indices = torch.arange(rows.numel(), device=rows.device)
    sources = torch.full((count + 1,), -1, dtype=torch.int64, device=rows.device).scatter(0, rows, indices)[:count]
    filled = sources.clamp(min=0)
    return filled // columns, filled % columns, sources < 0


def _zero_rows(rows: torch.Tensor, empty: torch.Tensor) -> torch.Tensor:
    """Sets the empty rows to zero."""
    return rows.masked_fill(empty.view(-1, *[1] * (rows.dim() - 1)), 0)


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int | None = None,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts tokens by expert.

    Args:
        inp: tokens.
        routing_map: mask [tokens, experts], or with ``map_type="index"`` expert indices [tokens, choices].
        num_out_tokens: rows of the output; further rows are dropped from the end. None: all routed rows.
        max_token_num: ignored.
        map_type: ``"mask"`` or ``"index"``.

    Returns:
        A tuple (permuted rows, row id map for :func:`moe_unpermute`).

    Shape:
        - inp: ``(tokens, hidden)``.
        - permuted rows: ``(num_out_tokens, hidden)``.
    """
    _check_map("moe_permute", inp, routing_map)
    row_id_map = _row_id_map(routing_map, num_out_tokens, map_type)
    tokens, _, empty = _row_sources(row_id_map, _num_permuted_rows(row_id_map, num_out_tokens))
    return _zero_rows(inp[tokens], empty), row_id_map


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts tokens and their probabilities by expert.

    Args:
        inp: tokens.
        probs: probabilities [tokens, experts].
        routing_map: mask [tokens, experts].
        num_out_tokens: see :func:`moe_permute`.

    Returns:
        A tuple (permuted rows, their probabilities, row id map for :func:`moe_unpermute`).

    Shape:
        - inp: ``(tokens, hidden)``.
        - permuted rows: ``(num_out_tokens, hidden)``.
    """
    _check_map("moe_permute_with_probs", inp, routing_map)
    _check_shape("moe_permute_with_probs: probs", probs, routing_map.shape, "that of routing_map")
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
    """Inverse of :func:`moe_permute`: each token is the sum of its rows, optionally weighted.

    Args:
        inp: permuted rows.
        row_id_map: from :func:`moe_permute`.
        merging_probs: weights [tokens, columns of the map]; None: 1.
        restore_shape: shape of the output, [tokens, hidden]; None: the same.
        map_type: ignored; the row id map has the same form for both types.
        probs: the older name of `merging_probs`.

    Returns:
        The tokens in their original order.

    Shape:
        - inp: ``(rows, hidden)``.
        - Output: ``(tokens, hidden)``.
    """
    weights = merging_probs if merging_probs is not None else probs
    if inp.dim() != 2 or row_id_map.dim() != 2:
        raise ValueError(
            f"moe_unpermute: inp has shape {list(inp.shape)}, row_id_map {list(row_id_map.shape)}; expected two "
            "dimensions each."
        )
    if weights is not None:
        _check_shape("moe_unpermute: merging_probs", weights, row_id_map.shape, "that of row_id_map")
    shape = row_id_map.size(0), inp.size(1)
    if restore_shape is not None and tuple(restore_shape) != shape:
        raise ValueError(
            f"moe_unpermute: restore_shape is {list(restore_shape)}, expected {list(shape)}: the tokens of row_id_map, "
            "and the channels of inp."
        )
    if not torch.compiler.is_compiling() and row_id_map.numel() and int(row_id_map.max()) >= inp.size(0):
        raise ValueError(f"moe_unpermute: row_id_map has row {int(row_id_map.max())}, inp has {inp.size(0)} rows.")
    tokens, columns, empty = _row_sources(row_id_map, inp.size(0))
    rows = inp
    if weights is not None:
        rows = rows * weights[tokens, columns].unsqueeze(-1).to(rows.dtype)
    return rows.new_zeros(shape).index_add(0, tokens, _zero_rows(rows, empty))


def _chunk_order(
    split_sizes: torch.Tensor | Sequence[int], sorted_index: torch.Tensor | Sequence[int], inp: torch.Tensor
) -> torch.Tensor:
    """Returns for each row of the result its row in `inp`."""
    sizes, order = (torch.as_tensor(t, device=inp.device).long() for t in (split_sizes, sorted_index))
    if not torch.compiler.is_compiling() and (
        int(sizes.sum()) != inp.size(0) or sorted(order.tolist()) != list(range(sizes.numel()))
    ):
        raise ValueError(
            f"moe_sort_chunks_by_index: got chunks of {sizes.tolist()} rows in the order {order.tolist()}, expected "
            f"each chunk once and {inp.size(0)} rows in total."
        )
    starts, sorted_sizes = sizes.cumsum(0) - sizes, sizes[order]
    ends = sorted_sizes.cumsum(0)
    rows = torch.arange(inp.size(0), device=inp.device)
    chunk = torch.searchsorted(ends, rows, right=True)
    return rows + (starts[order] - (ends - sorted_sizes))[chunk]


def moe_sort_chunks_by_index(
    inp: torch.Tensor, split_sizes: torch.Tensor | Sequence[int], sorted_index: torch.Tensor | Sequence[int]
) -> torch.Tensor:
    """Reorders chunks of rows.

    Args:
        inp: rows.
        split_sizes: rows of each chunk.
        sorted_index: order of the chunks in the output.

    Returns:
        The reordered rows.

    Shape:
        - inp: ``(rows, hidden)``.
        - Output: same as `inp`.
    """
    return inp[_chunk_order(split_sizes, sorted_index, inp)]


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    split_sizes: torch.Tensor | Sequence[int],
    sorted_index: torch.Tensor | Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reorders chunks of rows and their probabilities.

    Args:
        inp: rows.
        probs: one probability per row.
        split_sizes: rows of each chunk.
        sorted_index: order of the chunks in the output.

    Returns:
        A tuple (reordered rows, reordered probabilities).
    """
    if probs.dim() < 1 or probs.size(0) != inp.size(0):
        raise ValueError(
            f"moe_sort_chunks_by_index_with_probs: probs has shape {list(probs.shape)}, expected one probability for "
            f"each of {inp.size(0)} rows."
        )
    order = _chunk_order(split_sizes, sorted_index, inp)
    return inp[order], probs[order]
