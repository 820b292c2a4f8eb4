"""torchweft.convert reads and writes the names of Transformer Engine's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from torchweft.convert import convert, inspect

HIDDEN, FFN, HEADS, GROUPS = 16, 32, 4, 2


@pytest.mark.parametrize("option", ("plain", "fuse_qkv_params", "output_layernorm"))
def test_layer_names_round_trip(tmp_path: Path, option: str) -> None:
    def layers() -> Any:
        options = {"num_gqa_groups": GROUPS, "activation": "swiglu"} | ({option: True} if option != "plain" else {})
        return torch.nn.ModuleDict(
            {"layers": torch.nn.ModuleList([te.TransformerLayer(HIDDEN, FFN, HEADS, **options) for _ in range(2)])}
        )

    model, other = layers(), layers()
    torch.save({key: value.cpu() for key, value in model.state_dict().items()}, tmp_path / "te.pt")
    convert(tmp_path / "te.pt", tmp_path / "plain", to="safetensors")
    plain = inspect(tmp_path / "plain")
    assert plain["layout"] == "native" and "layers.0.mlp_norm.bias" in plain["tensors"]
    assert not [name for name in plain["tensors"] if "layer_norm_" in name or "fc1_" in name]
    convert(tmp_path / "plain", tmp_path / "back.pt", to="te")
    other.load_state_dict(torch.load(tmp_path / "back.pt", weights_only=True), strict=True)
    x = torch.randn(5, 2, HIDDEN, device="cuda")
    for one, two in zip(model["layers"].eval(), other["layers"].eval(), strict=True):
        assert torch.equal(one(x), two(x))
