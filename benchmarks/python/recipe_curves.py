"""Loss curves of a GPT under each quantization recipe and in bfloat16, from the same weights and batches.

    python benchmarks/python/recipe_curves.py                 500 steps of a small model
    python benchmarks/python/recipe_curves.py --quick         a tiny model, 60 steps
    python benchmarks/python/recipe_curves.py --json FILE --image FILE.png

All linears are quantized, that of the head too. Each figure is the mean loss over the last sixth of the steps, divided
by that in bfloat16.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from gpt_models import PRESETS, Config
from loss_curves import TINY, TextTraining, last_mean, standard_library

import torchweft

SMALL = replace(PRESETS["tiny"], width=128, inner=384, tokens=64, batch=8, vocabulary=256)
RECIPES = {
    "delayed": torchweft.recipe.DelayedScaling(amax_history_len=16),
    "current": torchweft.recipe.Float8CurrentScaling(),
    "block": torchweft.recipe.Float8BlockScaling(),
    "MXFP8": torchweft.recipe.MXFP8BlockScaling(),
    "NVFP4": torchweft.recipe.NVFP4BlockScaling(),
}
BOUNDS = dict.fromkeys(RECIPES, 1.02) | {"NVFP4": 1.05}


def losses(c: Config, name: str, text: torch.Tensor, steps: int) -> list[float]:
    training = TextTraining(c, "weft", "bf16", text, seed=1)
    found = []
    for _ in range(steps):
        with torchweft.autocast(name in RECIPES, recipe=RECIPES.get(name)):
            found.append(training.step().loss)
    print(f"{name}: loss {found[0]:.4f} to {found[-1]:.4f}", flush=True)
    return found


def draw(curves: dict[str, list[float]], file: Path) -> None:
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    window = max(1, len(curves["bf16"]) // 25)
    smooth = {name: torch.tensor(curve).unfold(0, window, 1).mean(1) for name, curve in curves.items()}
    for name, curve in smooth.items():
        axes[0].plot(curve, label=name, linewidth=1)
        axes[1].plot(curve / smooth["bf16"], label=name, linewidth=1)
    axes[0].set(xlabel="step", ylabel=f"loss, mean of {window} steps")
    axes[1].set(xlabel="step", ylabel="loss / loss in bf16")
    axes[0].legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, 60 steps")
    parser.add_argument("--json", type=Path, help="write the curves to this file")
    parser.add_argument("--image", type=Path, help="draw the curves")
    a = parser.parse_args()
    config, steps = (TINY, 60) if a.quick else (SMALL, 500)
    text = standard_library()
    curves = {name: losses(config, name, text, steps) for name in ("bf16", *RECIPES)}
    ratios = {name: last_mean(curves[name]) / last_mean(curves["bf16"]) for name in RECIPES}
    figures = [
        {"name": f"{name} / bf16", "value": ratios[name], "at_most": BOUNDS[name], "exact": True} for name in RECIPES
    ]
    for f in figures:
        print(f"{f['name']}: {f['value']:.4f}, at most {f['at_most']}")
    if a.json:
        a.json.write_text(json.dumps([{"steps": steps, "curves": curves, "figures": figures}], indent=1))
    if a.image:
        draw(curves, a.image)


if __name__ == "__main__":
    main()
