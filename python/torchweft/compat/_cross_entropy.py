"""Cross entropy of logits that may be sharded over ranks, with Transformer Engine's arguments."""

from __future__ import annotations

from functools import lru_cache

import torch

from .. import ops
from .._process_groups import group_name_and_size, named_group


@lru_cache(maxsize=64)
def _loss(label_smoothing: float, reduction: str, ignore_index: int, group: str | None, size: int) -> ops.CrossEntropy:
    """Returns the operation. `size` is the number of ranks of `group`, whose name another group may get later."""
    return ops.CrossEntropy(
        label_smoothing=label_smoothing,
        reduction=reduction,
        ignore_index=ignore_index,
        tensor_parallel=size > 1,
        tensor_parallel_group=named_group(group),
    )


def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: torch.distributed.ProcessGroup | None = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> torch.Tensor:
    """Returns the cross entropy of each token, or the mean over the tokens that are not ignored, in float32 (float64
    for float64).

    Args:
        inp: logits, ``(B, SQ, V)`` or ``(SQ, B, V)``; with a group of p ranks this rank's ``V / p`` classes. Not
            overwritten in backward.
        target: class indices, one per token, in the order of `inp`; may be flat.
        label_smoothing: share of the probability that is spread over all classes.
        reduce_loss: return the mean instead of one loss per token.
        dist_process_group: ranks over which the classes are sharded; None for one rank.
        ignore_idx: tokens with this target have loss 0 and gradient 0.
        is_cg_capturable: ignored, for CUDA graphs only.
    """
    tokens = inp.shape[:-1]
    if inp.dim() < 1 or target.shape not in (tokens, (tokens.numel(),)):
        raise ValueError(
            f"parallel_cross_entropy: target has shape {list(target.shape)}, inp has shape {list(inp.shape)}; expected "
            f"one class index per token, {list(tokens)} or [{tokens.numel()}]."
        )
    group, size = (
        (None, 1) if dist_process_group is None else group_name_and_size("parallel_cross_entropy", dist_process_group)
    )
    loss = _loss(float(label_smoothing), "mean" if reduce_loss else "none", int(ignore_idx), group, size)
    y: torch.Tensor = loss(inp, target.reshape(tokens))
    return y
