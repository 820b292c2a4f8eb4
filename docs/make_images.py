"""Draws the plan shown in the docs. Run: PYTHONPATH=python python docs/make_images.py"""

from pathlib import Path

import torch

from weft import ops

HERE = Path(__file__).parent


def block() -> ops.Sequential:
    """A block whose plan shows fusions in both passes, a channel and a rejected rule."""
    return ops.Sequential(
        ops.LayerNorm(512),
        ops.MakeExtraOutput(in_place=True).set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.Linear(512, 2048),
        ops.GELU(),
        ops.MakeExtraOutput(),
        ops.Linear(2048, 512),
        ops.AddExtraInput(in_place=True).set_extra_input_channel(0, "residual"),
    )


if __name__ == "__main__":
    print(block().explain(torch.randn(1024, 512, requires_grad=True)).save(HERE / "images/plan.png"))
