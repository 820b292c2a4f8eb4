"""Optimizers, and functions on lists of tensors that training loops clip gradients with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..optim import FusedAdam

__all__ = ["FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale"]


class FusedSGD(torch.optim.SGD):
    """torch.optim.SGD with the arguments of Transformer Engine's FusedSGD.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        momentum: factor of the running average of the gradient.
        dampening: fraction of the gradient that is left out of that average.
        weight_decay: factor of the weight decay, which is added to the gradient.
        nesterov: use Nesterov momentum.
        wd_after_momentum: not supported.
        materialize_master_grads: ignored.
        set_grad_none: ignored; see :meth:`zero_grad`.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if wd_after_momentum:
            raise NotImplementedError("FusedSGD: wd_after_momentum=True is not supported. Leave it out.")
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)


def multi_tensor_applier(
    op: Callable[..., Any], noop_flag_buffer: torch.Tensor, tensor_lists: Sequence[Sequence[torch.Tensor]], *args: Any
) -> Any:
    """Returns ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``; the size of chunks has no effect."""
    return op(0, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Sequence[Sequence[torch.Tensor]], per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the float32 norm of all tensors together, a tensor of one element, and if `per_tensor` also of each."""
    tensors = list(tensor_lists[0])
    each = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)) if tensors else torch.zeros(0)
    return each.norm().reshape(1), each if per_tensor else None


def multi_tensor_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Sequence[Sequence[torch.Tensor]], scale: float
) -> None:
    """Writes scale · a to b, computed in float32, for each pair of the lists a and b. Sets `noop_flag` to 1 if a value
    of a is not finite."""
    sources, targets = tensor_lists
    for source, target in zip(sources, targets, strict=True):
        if source.shape != target.shape:
            raise ValueError(
                f"multi_tensor_scale: the shapes are {list(source.shape)} and {list(target.shape)}, expected the same."
            )
        if not source.isfinite().all():
            noop_flag.fill_(1)
        wide = source if source.dtype == torch.float64 else source.float()
        target.copy_(wide * scale)
