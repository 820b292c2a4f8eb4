"""LayerNorm and RMSNorm: weft's operations with the reference's module arguments."""

from __future__ import annotations

from typing import Any

import torch

from .. import ops
from ._module import EmptyExtraState


class _Norm(EmptyExtraState):
    """The module arguments of a norm. Its Parameters carry `sequence_parallel`, by which frameworks find gradients that
    they must sum over ranks."""

    sequence_parallel: bool | None = None

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
        shape = normalized_shape if normalized_shape is not None else hidden_size
        if shape is None:
            raise ValueError(f"{type(self).__name__}: normalized_shape is not given")
        kwargs.setdefault("dtype", params_dtype)
        super().__init__(shape, eps=eps, zero_centered_gamma=zero_centered_gamma, **kwargs)
        self.sequence_parallel = sequence_parallel
        self._mark_parameters()

    def reset_parameters(self, device: torch.device | str | None = None, defer_init: bool = False) -> None:
        if not defer_init:
            super().reset_parameters(device)
        self._mark_parameters()

    reset_layer_norm_parameters = reset_parameters

    def _mark_parameters(self) -> None:
        for param in self.parameters(recurse=False) if self.sequence_parallel is not None else ():
            param.sequence_parallel = self.sequence_parallel


class LayerNorm(_Norm, ops.LayerNorm):
    """y = (x - mean)·γ/√(var + eps) + β"""


class RMSNorm(_Norm, ops.RMSNorm):
    """y = x·γ/√(mean(x²) + eps)"""
