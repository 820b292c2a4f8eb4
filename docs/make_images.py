"""Draws the pictures of the docs: plans, the README's plan of a block beside its measured times, overlap over networks,
a quantized step.

Run: PYTHONPATH=python python docs/make_images.py
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import torch

from torchweft import ops

IMAGES = Path(__file__).parent / "images"
RESULTS = Path(__file__).parent.parent / "benchmarks/results/2026-11-15-block.json"
NETWORK = RESULTS.parent / "network.json"


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


def mlp_block(hidden: int, ffn: int) -> ops.Sequential:
    """The block that RESULTS were measured with."""
    return ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        ops.RMSNorm(hidden, dtype=torch.bfloat16),
        ops.Linear(hidden, ffn, dtype=torch.bfloat16),
        ops.GELU(),
        ops.Linear(ffn, hidden, dtype=torch.bfloat16),
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    )


def draw_times(axes: plt.Axes, results: dict) -> None:
    """Bars of the time of forward and backward, eager and weft, with the ratio and its interval."""
    for y, row in enumerate(results["rows"]):
        eager = next(peer for peer in row["versus"] if peer["against"] == "eager")
        low, high = eager["interval"]
        axes.barh(y - 0.2, 1, 0.36, color="#d98c3f", label="eager" if y == 0 else None)
        error = [[eager["ratio"] - low], [high - eager["ratio"]]]
        axes.barh(
            y + 0.2, eager["ratio"], 0.36, color="#3f7fbf", xerr=error, ecolor="#333333", label=None if y else "weft"
        )
        axes.text(high + 0.02, y + 0.2, f"{eager['ratio']:.2f} [{low:.2f}, {high:.2f}]", va="center", fontsize=8)
    sizes = [dict(word.split("=") for word in row["problem"].split()[1:]) for row in results["rows"]]
    axes.set_yticks(range(len(sizes)), [f"{size['m']} × {size['h']}" for size in sizes], fontsize=9)
    axes.set_ylabel("rows × hidden size", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("time of forward + backward / eager", fontsize=9)
    axes.set_title(f"bfloat16, {results['tier']}, one thread, {results['date']}", fontsize=9)
    axes.legend(fontsize=8, loc="lower right")


def draw_readme(plan: Path, out: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.4), width_ratios=[2.1, 1], layout="constrained")
    left.imshow(plt.imread(plan))
    left.axis("off")
    draw_times(right, json.loads(RESULTS.read_text()))
    figure.savefig(out, dpi=130, metadata={"Software": None})


def draw_overlap(out: Path) -> None:
    """GEMM and transfers one after the other, and overlapped, as parts of their sum."""
    rows = json.loads(NETWORK.read_text())["rows"]
    figure, axes = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
    for y, row in enumerate(rows):
        gemm, blocks = row["product_ms"], row["blocks_ms"]
        overlapped = row["ratios"] * max(gemm, blocks)
        axes.barh(y - 0.2, gemm / (gemm + blocks), 0.36, color="#3f7fbf", label=None if y else "GEMM")
        left = {"left": gemm / (gemm + blocks)}
        axes.barh(y - 0.2, blocks / (gemm + blocks), 0.36, color="#d98c3f", label=None if y else "transfers", **left)
        axes.barh(y + 0.2, overlapped / (gemm + blocks), 0.36, color="#5a9e5a", label=None if y else "overlapped")
        axes.text(overlapped / (gemm + blocks) + 0.01, y + 0.2, f"{overlapped:.0f} ms", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{row['schedule']}, {row['gigabits']:g} Gb/s" for row in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("time / one after the other", fontsize=9)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.4, 1.16), ncols=3, frameon=False)
    figure.savefig(out, dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    draw_overlap(IMAGES / "overlap.png")
    print(block().explain(torch.randn(1024, 512, requires_grad=True)).save(IMAGES / "plan.png"))
    x = torch.randn(1024, 1024, dtype=torch.bfloat16, requires_grad=True)
    plan = Path(mlp_block(1024, 4096).explain(x).save(IMAGES / "mlp_plan.png"))
    draw_readme(plan, IMAGES / "block.png")
    plan.unlink()
    page = (IMAGES.parent / "compare_recipes.md").read_text()
    example = re.search(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1]
    subprocess.run([sys.executable, "-c", example], cwd=IMAGES, check=True)
