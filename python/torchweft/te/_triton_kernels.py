"""Kernels of Transformer Engine in Triton as operations on whole tensors. Triton's interpreter runs one program after
the other, which takes milliseconds for each token.

A kernel is recognized by its source: another one, of another release, is interpreted.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import tokenize
from collections.abc import Callable, Iterator
from typing import Any

import torch

Tensor = torch.Tensor
Kernel = Callable[..., None]
_KERNELS: dict[str, Kernel] = {}  # by the digest of their source
_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def digest(kernel: Callable[..., Any]) -> str:
    """Of a function's source without decorators, comments and layout."""
    tokens = tokenize.generate_tokens(io.StringIO(inspect.getsource(kernel)).readline)
    words = [token.string for token in tokens if token.type not in _LAYOUT]
    return hashlib.sha256(" ".join(words[words.index("def") :]).encode()).hexdigest()[:16]


@functools.cache
def known(kernel: Callable[..., Any]) -> Kernel | None:
    """The operations that do what `kernel` does. They take its arguments by name, and only those that they use."""
    try:
        return _KERNELS.get(digest(kernel))
    except (OSError, TypeError):  # it has no source
        return None


def run(operations: Kernel, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Calls the operations with the kernel's arguments, which are on the host."""
    names = inspect.signature(kernel).parameters
    given = inspect.signature(kernel).bind_partial(*args, **{k: v for k, v in kwargs.items() if k in names}).arguments
    used = inspect.signature(operations).parameters
    try:
        with torch.no_grad():
            operations(**{name: value for name, value in given.items() if name in used})
    except IndexError as error:
        raise IndexError(
            f"the Triton kernel {kernel.__name__} {error}; on a GPU this is an illegal memory access. Check the sizes "
            "that it was given."
        ) from None


def _same_as(*digests: str) -> Callable[[Kernel], Kernel]:
    def register(operations: Kernel) -> Kernel:
        _KERNELS.update(dict.fromkeys(digests, operations))
        return operations

    return register


def _check_rows(rows: Tensor, tensor: Tensor) -> None:
    outside = int(((rows < 0) | (rows >= tensor.shape[0])).sum())
    if outside:
        raise IndexError(f"accesses {outside} of {rows.numel()} rows outside of a tensor of {tensor.shape[0]} rows")


def _bytes(t: Tensor) -> Tensor:
    """Values that are only copied: torch indexes no FP8."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


# ---- Permutation ----------------------------------------------------------------------------------------------------
# A row of the map has 2 n + 1 elements for n experts: the destination rows, as many as the token is routed to, the
# experts from n on, and their number. Rows start at `pad_offsets` of their expert.


class _Routes:
    """The routes of a map: token, expert and row of each, and its place among those of its token."""

    def __init__(self, row_id_map: Tensor, num_experts: int, pad_offsets: Tensor | None) -> None:
        self.counts = row_id_map[:, 2 * num_experts]
        slots = torch.arange(num_experts)
        self.token, self.slot = torch.nonzero(slots < self.counts[:, None], as_tuple=True)
        self.row = row_id_map[self.token, self.slot].long()
        self.expert = row_id_map[self.token, num_experts + self.slot].long()
        if pad_offsets is not None:
            self.row = self.row + pad_offsets[self.expert].long()


@_same_as("fd854e761751ecce")
def _row_id_map_pass_1(
    routing_map_ptr: Tensor, num_tokens: int, row_id_map_ptr: Tensor, workspace_ptr: Tensor, BLOCK_SIZE: int
) -> None:
    experts, blocks = workspace_ptr.shape
    routed = torch.zeros(blocks * BLOCK_SIZE, experts, dtype=torch.int32)
    routed[:num_tokens] = routing_map_ptr[:num_tokens]
    routed = routed.view(blocks, BLOCK_SIZE, experts)
    within = routed.cumsum(1, dtype=torch.int32) * routed
    row_id_map_ptr[:, :experts] = within.view(-1, experts)[:num_tokens]
    workspace_ptr.copy_(routed.sum(1).t())


@_same_as("d2da633f9781a45a")
def _row_id_map_pass_2(row_id_map_ptr: Tensor, workspace_ptr: Tensor, num_tokens: int, BLOCK_SIZE: int) -> None:
    experts, _ = workspace_ptr.shape
    counts = workspace_ptr.flatten().long()
    before = (counts.cumsum(0) - counts).view_as(workspace_ptr).t().repeat_interleave(BLOCK_SIZE, 0)[:num_tokens]
    within = row_id_map_ptr[:, :experts]
    row_id_map_ptr[:, :experts] = torch.where(within == 0, -1, within + before - 1).int()


@_same_as("13900de5ca00465e")
def _row_id_map_pass_3(row_id_map_ptr: Tensor, num_experts: int) -> None:
    rows, experts = row_id_map_ptr[:, :num_experts].sort(descending=True)
    counts = (rows != -1).sum(1)
    used = torch.arange(num_experts) < counts[:, None]
    row_id_map_ptr[:, :num_experts][used] = rows[used]
    row_id_map_ptr[:, num_experts : 2 * num_experts][used] = experts[used].int()
    row_id_map_ptr[:, 2 * num_experts] = counts.int()


@_same_as("20710adfc738bcd5")
def _permute(
    input_ptr: Tensor,
    row_id_map_ptr: Tensor,
    output_ptr: Tensor,
    num_experts: int,
    probs_ptr: Tensor | None = None,
    scale_ptr: Tensor | None = None,
    permuted_scale_ptr: Tensor | None = None,
    pad_offsets_ptr: Tensor | None = None,
    permuted_probs_ptr: Tensor | None = None,
) -> None:
    routes = _Routes(row_id_map_ptr, num_experts, pad_offsets_ptr)
    _check_rows(routes.row, output_ptr)
    values = _bytes(input_ptr)[routes.token]
    if scale_ptr is not None and permuted_scale_ptr is not None:
        _bytes(permuted_scale_ptr)[routes.row] = _bytes(scale_ptr)[routes.token]
    if probs_ptr is not None and permuted_probs_ptr is not None:
        probs = probs_ptr[routes.token, routes.expert]
        permuted_probs_ptr[routes.row] = probs
        values = values.masked_fill((probs == 0)[:, None], 0)  # a slot of padding
    _bytes(output_ptr)[routes.row] = values


@_same_as("c6e90701b06d5c04", "ea77e520813fa5c9")
def _unpermute(
    input_ptr: Tensor,
    row_id_map_ptr: Tensor,
    output_ptr: Tensor,
    num_experts: int,
    merging_probs_ptr: Tensor | None = None,
    permuted_probs_ptr: Tensor | None = None,
    pad_offsets_ptr: Tensor | None = None,
    unpermuted_probs_ptr: Tensor | None = None,
) -> None:
    routes = _Routes(row_id_map_ptr, num_experts, pad_offsets_ptr)
    _check_rows(routes.row, input_ptr)
    total = torch.zeros(output_ptr.shape, dtype=torch.float32)
    for slot in range(int(routes.counts.max()) if routes.counts.numel() else 0):  # in the order of a GPU
        of_slot = routes.slot == slot
        token, row, expert = routes.token[of_slot], routes.row[of_slot], routes.expert[of_slot]
        values = input_ptr[row].float()
        if merging_probs_ptr is not None:
            values *= merging_probs_ptr[token, expert].float()[:, None]
        total.index_add_(0, token, values)
    output_ptr.copy_(total)
    if permuted_probs_ptr is not None and unpermuted_probs_ptr is not None:
        unpermuted_probs_ptr.zero_()
        unpermuted_probs_ptr[routes.token, routes.expert] = permuted_probs_ptr[routes.row]


@_same_as("aa2548a8d0e27432", "e596c98e52f344ed")
def _unpermute_bwd_with_merging_probs(
    fwd_output_grad_ptr: Tensor,
    fwd_input_ptr: Tensor,
    merging_probs_ptr: Tensor,
    row_id_map_ptr: Tensor,
    fwd_input_grad_ptr: Tensor,
    merging_probs_grad_ptr: Tensor,
    num_experts: int,
    pad_offsets_ptr: Tensor | None = None,
) -> None:
    routes = _Routes(row_id_map_ptr, num_experts, pad_offsets_ptr)
    for t in (fwd_input_ptr, fwd_input_grad_ptr):
        _check_rows(routes.row, t)
    grad = fwd_output_grad_ptr[routes.token].float()
    probs = merging_probs_ptr[routes.token, routes.expert].float()[:, None]
    fwd_input_grad_ptr[routes.row] = (grad * probs).to(fwd_output_grad_ptr.dtype).to(fwd_input_grad_ptr.dtype)
    products = (fwd_input_ptr[routes.row].float() * grad).sum(1)
    merging_probs_grad_ptr.zero_()
    merging_probs_grad_ptr[routes.token, routes.expert] = products.to(merging_probs_grad_ptr.dtype)


@_same_as("bc252d6515de2236")
def _make_chunk_sort_map(
    split_sizes_ptr: Tensor, sorted_indices_ptr: Tensor, dst_rows_ptr: Tensor, num_splits: int
) -> None:
    sizes, order = split_sizes_ptr[:num_splits].long(), sorted_indices_ptr[:num_splits].long()
    _check_rows(order, sizes)
    rows, ends = torch.arange(dst_rows_ptr.numel()), sizes.cumsum(0)
    starts = torch.empty_like(ends).index_copy_(0, order, sizes[order].cumsum(0) - sizes[order])
    chunk = torch.searchsorted(ends, rows, right=True).clamp_(max=num_splits - 1)
    moved = starts[chunk] + rows - (ends - sizes)[chunk]
    dst_rows_ptr.copy_(torch.where(rows < ends[-1], moved, rows))


@_same_as("a4ecc200edf6794e")
def _sort_chunks_by_map(
    input_ptr: Tensor,
    row_id_map_ptr: Tensor,
    output_ptr: Tensor,
    FORWARD: bool,
    probs_ptr: Tensor | None = None,
    permuted_probs_ptr: Tensor | None = None,
) -> None:
    rows = row_id_map_ptr.long()
    pairs = [(_bytes(input_ptr), _bytes(output_ptr))]
    if probs_ptr is not None and permuted_probs_ptr is not None:
        pairs.append((probs_ptr.as_strided((len(probs_ptr),), (probs_ptr.stride(0),)), permuted_probs_ptr))
    for source, target in pairs:
        _check_rows(rows, target if FORWARD else source)
        if FORWARD:
            target[rows] = source[: rows.numel()]
        else:
            target[: rows.numel()] = source[rows]


# ---- Cross entropy --------------------------------------------------------------------------------------------------
# `stats` has the maximum of a row's logits and the sum of their exponentials below it. Logits are [.., .., n_cols].

_AT_ONCE = 1 << 22  # logits that are converted to float32 at a time


def _row_chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _AT_ONCE // max(1, columns))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def _statistics(x: Tensor) -> Tensor:
    greatest = x.amax(1, keepdim=True)
    return torch.cat([greatest, (x - greatest).exp_().sum(1, keepdim=True)], 1)


def _target_logits(x: Tensor, targets: Tensor, first: int) -> Tensor:
    """The logits of the targets; minus infinity for targets that are not among these columns."""
    column = targets.long() - first
    inside = (column >= 0) & (column < x.shape[1])
    found = x.gather(1, column.where(inside, 0)[:, None])[:, 0]
    return found.where(inside, -torch.inf)


def _losses(
    stats: Tensor, logits: Tensor, sums: Tensor, targets: Tensor, ignored: int, smoothing: float, n: int
) -> Tensor:
    normalizer = stats[:, 0] + stats[:, 1].log()
    losses = normalizer - logits
    if smoothing > 0:
        losses = losses * (1 - smoothing) + smoothing * normalizer - smoothing / n * sums
    return losses.masked_fill(targets == ignored, 0)


def _read_logits(
    logits: Tensor, saved: Tensor, targets: Tensor, first: int, copies: bool
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """For some rows at a time: their statistics, the logits of the targets and the sums of the logits."""
    rows, kept = logits.reshape(-1, logits.shape[-1]), saved.view(-1, logits.shape[-1])
    for some in _row_chunks(*rows.shape):
        if copies:
            kept[some] = rows[some]
        x = rows[some].float()
        yield some, _statistics(x), _target_logits(x, targets[some], first), x.sum(1)


@_same_as("34e2527248012e9a")
def _cross_entropy_forward(
    X_ptr: Tensor,
    saved_input_ptr: Tensor,
    Y_ptr: Tensor,
    loss_ptr: Tensor,
    stats_ptr: Tensor,
    n_non_ignore: Tensor,
    n_cols: int,
    ignore_idx: int,
    label_smoothing: float,
    COUNT_NON_IGNORE: bool,
    COPY_INPUT: bool,
) -> None:
    targets = Y_ptr.view(-1)
    if COUNT_NON_IGNORE:
        n_non_ignore += (targets != ignore_idx).sum()
    for some, stats, logits, sums in _read_logits(X_ptr, saved_input_ptr, targets, 0, COPY_INPUT):
        stats_ptr[some] = stats
        loss_ptr[some] = _losses(stats, logits, sums, targets[some], ignore_idx, label_smoothing, n_cols)


@_same_as("85fb94a91622d719")
def _cross_entropy_tp_pre(
    X_ptr: Tensor,
    saved_input_ptr: Tensor,
    Y_ptr: Tensor,
    local_data_ptr: Tensor,
    n_non_ignore: Tensor,
    rank: int,
    n_cols: int,
    ignore_idx: int,
    COUNT_NON_IGNORE: bool,
    COMPUTE_X_SUM: bool,
    COPY_INPUT: bool,
) -> None:
    targets = Y_ptr.view(-1)
    if COUNT_NON_IGNORE:
        n_non_ignore += (targets != ignore_idx).sum()
    for some, stats, logits, sums in _read_logits(X_ptr, saved_input_ptr, targets, rank * n_cols, COPY_INPUT):
        local_data_ptr[some, :2], local_data_ptr[some, 2] = stats, logits
        if COMPUTE_X_SUM:
            local_data_ptr[some, 3] = sums


@_same_as("74056a5a9f0a735a")
def _cross_entropy_tp_post(
    gathered_data_ptr: Tensor,
    Y_ptr: Tensor,
    loss_ptr: Tensor,
    stats_ptr: Tensor,
    world_size: int,
    n_rows: int,
    n_cols: int,
    ignore_idx: int,
    label_smoothing: float,
) -> None:
    of_ranks = gathered_data_ptr.view(world_size, n_rows, 4)
    greatest, logits = of_ranks[:, :, 0].amax(0), of_ranks[:, :, 2].amax(0)
    total = (of_ranks[:, :, 1] * (of_ranks[:, :, 0] - greatest).exp()).sum(0)
    stats_ptr.copy_(torch.stack([greatest, total], 1))
    sums, classes = of_ranks[:, :, 3].sum(0), n_cols * world_size
    loss_ptr.copy_(_losses(stats_ptr, logits, sums, Y_ptr.view(-1), ignore_idx, label_smoothing, classes))


@_same_as("0c3e29f9ae8a6eba")
def _cross_entropy_backward(
    saved_input_ptr: Tensor,
    Y_ptr: Tensor,
    stats_ptr: Tensor,
    n_non_ignore_ptr: Tensor,
    grad_output_ptr: Tensor,
    grad_output_stride: int,
    rank: int,
    world_size: int,
    n_cols: int,
    ignore_idx: int,
    reduce_loss: bool,
    label_smoothing: float,
) -> None:
    rows, targets = saved_input_ptr.view(-1, n_cols), Y_ptr.view(-1)
    factors = grad_output_ptr.view(-1).float()
    factors = factors if grad_output_stride else factors[:1].expand(rows.shape[0])
    if reduce_loss:
        factors = factors / n_non_ignore_ptr
    factors = factors.masked_fill(targets == ignore_idx, 0)
    column = targets.long() - rank * n_cols
    inside = (column >= 0) & (column < n_cols)
    for some in _row_chunks(*rows.shape):
        stats = stats_ptr[some]
        grads = (
            (rows[some].float() - stats[:, :1]).exp_().div_(stats[:, 1:]).sub_(label_smoothing / (n_cols * world_size))
        )
        local = inside[some].nonzero()[:, 0]
        grads[local, column[some][local]] -= 1 - label_smoothing
        rows[some] = grads * factors[some, None]
        rows[some][targets[some] == ignore_idx] = 0  # also where the product is NaN
