"""Rotary position embeddings."""

from __future__ import annotations

import torch

from ._attention_checks import check_offsets
from ._context_parallel import chunks_of_rank


class RotaryPositionEmbedding(torch.nn.Module):
    """Returns rotary angles: position · base^(-2i / channels), repeated for both halves of the channels.

    Args:
        dim: channels per head.
        rotary_percent: fraction of the channels that is rotated.
        seq_len_interpolation_factor: positions are divided by it.
        pretrained_max_position_embeddings: not supported.
        rotary_base: base of the frequencies.
        interleaved: channel pairs are adjacent instead of split over the two halves.

    Shape:
        - Output of ``forward(max_seq_len, offset)``: ``(max_seq_len, 1, 1, channels)``.
    """

    inv_freq: torch.Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        if pretrained_max_position_embeddings is not None:
            raise NotImplementedError(
                "RotaryPositionEmbedding: pretrained_max_position_embeddings is not supported. Pass None."
            )
        dim = int(dim * rotary_percent)
        self.factor, self.interleaved = seq_len_interpolation_factor or 1.0, interleaved
        frequencies = rotary_base ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self.register_buffer("inv_freq", frequencies)

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Returns the angles of `max_seq_len` positions, starting at `offset`."""
        positions = (torch.arange(max_seq_len, device=self.inv_freq.device) + offset) / self.factor
        angles = torch.outer(positions, self.inv_freq.float())
        both = torch.stack([angles, angles], -1).flatten(1) if self.interleaved else torch.cat([angles, angles], -1)
        return both[:, None, None, :]


def _rotate_half(t: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Maps each pair (a, b) to (-b, a)."""
    if interleaved:
        pairs = t.unflatten(-1, (-1, 2))
        return torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2)
    a, b = t.chunk(2, -1)
    return torch.cat([-b, a], -1)


def _angles(
    freqs: torch.Tensor,
    rows: int,
    start_positions: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Returns the angles of the `rows` that this rank has of a sequence, ``(rows, 1 or batch, 1, channels)``."""
    starts = [0] if start_positions is None else start_positions.tolist()
    if min(starts) < 0 or max(starts) + cp_size * rows > freqs.size(0):
        raise ValueError(
            f"apply_rotary_pos_emb: freqs has {freqs.size(0)} positions, expected positions {min(starts)} to "
            f"{max(starts) + cp_size * rows - 1}."
        )
    if cp_size > 1:
        return chunks_of_rank(freqs[: cp_size * rows], cp_size, cp_rank)
    return torch.cat([freqs[start : start + rows] for start in starts], 1)


def _check_shapes(t: torch.Tensor, freqs: torch.Tensor, tensor_format: str) -> None:
    if tensor_format not in ("sbhd", "bshd", "thd"):
        raise ValueError(f"apply_rotary_pos_emb: tensor_format is {tensor_format!r}, expected 'sbhd', 'bshd' or 'thd'.")
    if t.dim() != len(tensor_format):
        raise ValueError(
            f"apply_rotary_pos_emb: t has shape {list(t.shape)}, expected {len(tensor_format)} dimensions with "
            f"tensor_format {tensor_format!r}."
        )
    if freqs.dim() != 4 or freqs.shape[1:3] != (1, 1) or freqs.size(3) % 2 or freqs.size(3) > t.size(-1):
        raise ValueError(
            f"apply_rotary_pos_emb: freqs has shape {list(freqs.shape)}, expected (positions, 1, 1, channels) with an "
            f"even number of channels, at most {t.size(-1)}."
        )


def _check_starts(start_positions: torch.Tensor | None, sequences: int) -> None:
    if start_positions is not None and start_positions.shape != (sequences,):
        raise ValueError(
            f"apply_rotary_pos_emb: start_positions has shape {list(start_positions.shape)}, expected [{sequences}], "
            "one position per sequence."
        )


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Applies a rotary embedding: t · cos + rotate_half(t) · sin on the first channels; the others are unchanged.

    Args:
        t: queries or keys.
        freqs: angles from :class:`RotaryPositionEmbedding`.
        tensor_format: layout of `t`, ``"sbhd"``, ``"bshd"`` or ``"thd"`` (packed sequences).
        start_positions: position of the first row of each sequence; None: 0.
        interleaved: channel pairs are adjacent.
        fused: ignored.
        cu_seqlens: for packed sequences, the row at which each sequence starts, and the number of rows; with context
            parallelism rows of all ranks.
        cp_size, cp_rank: number of context-parallel ranks, and this rank.

    Returns:
        A tensor of the shape of `t`.
    """
    if start_positions is not None and cp_size > 1:
        raise NotImplementedError(
            "apply_rotary_pos_emb: start_positions is not supported with cp_size > 1. Leave it out."
        )
    _check_shapes(t, freqs, tensor_format)
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise ValueError(
                "apply_rotary_pos_emb: tensor_format is 'thd', but cu_seqlens is not given. Pass the row at which each "
                "sequence starts."
            )
        check_offsets("apply_rotary_pos_emb", "cu_seqlens", cu_seqlens)
        rows = (cu_seqlens.diff() // cp_size).tolist()
        if cu_seqlens[0] != 0 or min(rows, default=0) < 0 or sum(rows) != t.size(0):
            raise ValueError(
                f"apply_rotary_pos_emb: cu_seqlens is {cu_seqlens.tolist()} for {t.size(0)} rows of each of {cp_size} "
                "ranks, expected offsets that start at 0, do not decrease and end with the rows of all ranks."
            )
        _check_starts(start_positions, len(rows))
        starts = [None] * len(rows) if start_positions is None else start_positions.split(1)
        parts = [_angles(freqs, n, start, cp_size, cp_rank) for n, start in zip(rows, starts, strict=True)]
        angles = torch.cat([freqs[:0], *parts]).squeeze(1)
    else:
        _check_starts(start_positions, t.size(tensor_format.index("b")))
        angles = _angles(freqs, t.size(0 if tensor_format == "sbhd" else 1), start_positions, cp_size, cp_rank)
        angles = angles.transpose(0, 1) if tensor_format == "bshd" else angles
    rotary, rest = t.split([angles.size(-1), t.size(-1) - angles.size(-1)], -1)
    cos, sin = angles.cos().to(t.dtype), angles.sin().to(t.dtype)
    return torch.cat([rotary * cos + _rotate_half(rotary, interleaved) * sin, rest], -1)
