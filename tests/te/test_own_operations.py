"""weft's own operations against Transformer Engine."""

from __future__ import annotations

import pytest
import torch
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

from torchweft import ops

HEADS = 4


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("tensor_format", ("sbhd", "bshd"))
def test_rotary_embedding(tensor_format: str, interleaved: bool) -> None:
    x = torch.randn(6, 5, HEADS * 16, device="cuda")
    freqs = RotaryPositionEmbedding(16, interleaved=interleaved)(8)
    expected = apply_rotary_pos_emb(x.unflatten(-1, (HEADS, 16)), freqs, tensor_format, interleaved=interleaved)
    options = {"qkv_layout": None, "interleaved": interleaved, "qkv_format": tensor_format}
    y = ops.RotaryEmbedding(HEADS, 16, **options)(x)
    torch.testing.assert_close(y, expected.flatten(-2), rtol=1e-5, atol=1e-5)
