"""LayerNorm and RMSNorm: weft's operations with the arguments of Transformer Engine's modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .. import ops
from .._native import NativeOperation
from ._module import EmptyExtraState


class _Norm(EmptyExtraState, NativeOperation):
    """Adds the module arguments to a norm. Its Parameters have the attribute `sequence_parallel`, by which frameworks
    find gradients to all-reduce."""

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
            raise ValueError(f"{type(self).__name__}: normalized_shape is required.")
        kwargs.setdefault("dtype", params_dtype)
        super().__init__(shape, eps=eps, zero_centered_gamma=zero_centered_gamma, **kwargs)
        self.sequence_parallel = sequence_parallel
        self._mark_parameters()

    def reset_parameters(self, device: torch.device | str | None = None, defer_init: bool = False) -> None:
        """Initializes the Parameters, on ``device`` if given; with `defer_init` only sets their attributes."""
        if not defer_init:
            super().reset_parameters(device)
        self._mark_parameters()

    reset_layer_norm_parameters = reset_parameters

    def _mark_parameters(self) -> None:
        params: Iterable[Any] = self.parameters(recurse=False) if self.sequence_parallel is not None else ()
        for param in params:
            param.sequence_parallel = self.sequence_parallel


class LayerNorm(_Norm, ops.LayerNorm):
    """Applies layer normalization: y = (x - mean) · γ / √(var + eps) + β.

    Args:
        normalized_shape: trailing dimensions to normalize; `hidden_size` is the older name.
        eps: added to the variance.
        sequence_parallel: set as an attribute of the Parameters; None: not set.
        params_dtype: dtype of the Parameters.
        zero_centered_gamma: scale by 1 + γ.
        **kwargs: arguments of :class:`torchweft.ops.LayerNorm`.

    Shape:
        - Input: ``(*, normalized_shape)``.
        - Output: same as the input.
    """


class RMSNorm(_Norm, ops.RMSNorm):
    """Applies RMS normalization: y = x · γ / √(mean(x²) + eps).

    Args:
        normalized_shape: trailing dimensions to normalize; `hidden_size` is the older name.
        eps: added to the mean square.
        sequence_parallel: set as an attribute of the Parameters; None: not set.
        params_dtype: dtype of the Parameters.
        zero_centered_gamma: scale by 1 + γ.
        **kwargs: arguments of :class:`torchweft.ops.RMSNorm`.

    Shape:
        - Input: ``(*, normalized_shape)``.
        - Output: same as the input.
    """
