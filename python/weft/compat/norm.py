"""LayerNorm and RMSNorm: weft's operations with the reference's module arguments."""

from __future__ import annotations

from typing import Any

import torch

from .. import ops


def _shape(owner: str, normalized_shape: Any, hidden_size: int | None) -> Any:
    if normalized_shape is None and hidden_size is None:
        raise ValueError(f"{owner}: normalized_shape is not given")
    return normalized_shape if normalized_shape is not None else hidden_size


class _Marked(torch.nn.Module):
    """Its Parameters carry `sequence_parallel`, by which frameworks find gradients that they must sum over ranks."""

    sequence_parallel: bool | None = None

    def reset_parameters(self, device: torch.device | str | None = None, defer_init: bool = False) -> None:
        if not defer_init:
            super().reset_parameters(device)
        self._mark_parameters()

    reset_layer_norm_parameters = reset_parameters

    def _mark_parameters(self) -> None:
        for param in self.parameters(recurse=False) if self.sequence_parallel is not None else ():
            param.sequence_parallel = self.sequence_parallel


class LayerNorm(_Marked, ops.LayerNorm):
    """y = (x - mean)·γ/√(var + eps) + β"""

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("dtype", params_dtype)
        shape = _shape("LayerNorm", normalized_shape, hidden_size)
        ops.LayerNorm.__init__(self, shape, eps=eps, zero_centered_gamma=zero_centered_gamma, **kwargs)
        self.sequence_parallel = sequence_parallel
        self._mark_parameters()


class RMSNorm(_Marked, ops.RMSNorm):
    """y = x·γ/√(mean(x²) + eps)"""

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("dtype", params_dtype)
        shape = _shape("RMSNorm", normalized_shape, hidden_size)
        ops.RMSNorm.__init__(self, shape, eps=eps, zero_centered_gamma=zero_centered_gamma, **kwargs)
        self.sequence_parallel = sequence_parallel
        self._mark_parameters()
