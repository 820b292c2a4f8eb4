"""Pads the rows of each expert to the multiples that quantized GEMMs of GPUs need; weft's need only those of 16, for
NVFP4's transform."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch.nn.functional import pad

from .. import _autocast
from ..recipe import MXFP8BlockScaling, NVFP4BlockScaling


def _check_splits(module: torch.nn.Module, rows: int, m_splits: list[int], sizes: list[int], num_gemms: int) -> None:
    """Raises unless a matrix of `rows` has `num_gemms` parts of these sizes, which follow from `m_splits`."""
    if len(m_splits) != num_gemms or min(m_splits, default=0) < 0 or sum(sizes) != rows:
        raise ValueError(
            f"{type(module).__name__}: m_splits is {m_splits} for {rows} rows, expected {num_gemms} numbers of rows "
            f"that sum up to that{'' if sizes is m_splits else f' when padded to {sizes}'}."
        )


def _padded(m_splits: list[int], align_size: int) -> list[int]:
    return [-(-rows // align_size) * align_size for rows in m_splits]


class _Padding(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        if align_size is not None and align_size < 1:
            raise ValueError(f"{type(self).__name__}: align_size is {align_size}, expected 1 or more.")
        self.num_gemms, self.align_size = num_gemms, align_size

    def _multiple(self) -> int:
        if self.align_size is not None:
            return self.align_size
        recipe = _autocast.active.recipe
        return 32 if isinstance(recipe, MXFP8BlockScaling) else 128 if isinstance(recipe, NVFP4BlockScaling) else 16


class Fp8Padding(_Padding):
    """Appends rows of zeros to each part of a matrix.

    Args:
        num_gemms: number of parts.
        align_size: what the rows of each part become a multiple of; None: by the recipe of the region, 32 with MXFP8,
            128 with NVFP4, 16 otherwise.

    Shape:
        - inp: ``(sum(m_splits), features)``.
        - Output: ``(sum of padded splits, features)``.
    """

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Returns the padded matrix and its numbers of rows.

        Args:
            inp: the matrix.
            m_splits: number of rows of each part.
        """
        inp = inp.reshape(-1, inp.size(-1))
        _check_splits(self, inp.size(0), m_splits, m_splits, self.num_gemms)
        padded = _padded(m_splits, self._multiple())
        if padded == m_splits:
            return inp, m_splits
        parts = zip(inp.split(m_splits), m_splits, padded, strict=True)
        return torch.cat([pad(part, (0, 0, 0, end - rows)) for part, rows, end in parts]), padded


class Fp8Unpadding(_Padding):
    """Removes the rows that :class:`Fp8Padding` appended.

    Args:
        num_gemms: number of parts.
        align_size: as in :class:`Fp8Padding`.

    Shape:
        - inp: ``(sum of padded splits, features)``.
        - Output: ``(sum(m_splits), features)``.
    """

    def forward(self, inp: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        """Returns the matrix without padding.

        Args:
            inp: the padded matrix.
            m_splits: number of rows of each part before it was padded.
        """
        inp, padded = inp.reshape(-1, inp.size(-1)), _padded(m_splits, self._multiple())
        _check_splits(self, inp.size(0), m_splits, padded, self.num_gemms)
        if padded == m_splits:
            return inp
        starts = accumulate([0, *padded[:-1]])
        return torch.cat([inp.narrow(0, start, rows) for start, rows in zip(starts, m_splits, strict=True)])
