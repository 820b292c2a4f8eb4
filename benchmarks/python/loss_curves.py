"""Loss curves of a GPT in weft and in eager torch, from the same weights, on the bytes of Python's standard library.

    python benchmarks/python/loss_curves.py               GPT-2 small with two layers, 300 steps
    python benchmarks/python/loss_curves.py --quick       a tiny model, 60 steps
    python benchmarks/python/loss_curves.py --json FILE   also as JSON

bf16: |weft - eager| / noise, both of the mean loss over the last sixth of the steps. The difference is a mean over
three seeds, each of which selects other batches; the noise is the range of eager's losses over these seeds. float32:
the largest difference of the losses of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
from dataclasses import replace
from pathlib import Path

import torch
from gpt_models import PRESETS, Config
from gpt_training import Training

SEEDS = (1, 2, 3)
SMALL = replace(PRESETS["small"], layers=2, tokens=256)
TINY = replace(PRESETS["tiny"], vocabulary=256, batch=4)


class TextTraining(Training):
    """Training on bytes of a text instead of random tokens."""

    def __init__(self, c: Config, variant: str, precision: str, text: torch.Tensor, seed: int) -> None:
        super().__init__(c, variant, precision)
        self.text = text
        self.generator.manual_seed(seed)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.config
        starts = torch.randint(len(self.text) - c.tokens, (c.batch,), generator=self.generator)
        rows = torch.stack([self.text[i : i + c.tokens + 1] for i in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def standard_library() -> torch.Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.tensor(list(b"".join(f.read_bytes() for f in files)[:1_000_000]))


def losses(c: Config, variant: str, precision: str, text: torch.Tensor, seed: int, steps: int) -> list[float]:
    training = TextTraining(c, variant, precision, text, seed)
    found = [training.step().loss for _ in range(steps)]
    print(f"{variant}, {precision}, seed {seed}: loss {found[0]:.4f} to {found[-1]:.4f}", flush=True)
    return found


def last_mean(curve: list[float]) -> float:
    return statistics.fmean(curve[-max(1, len(curve) // 6) :])


def measure(c: Config, steps: int) -> dict[str, object]:
    text = standard_library()
    curves = {(v, seed): losses(c, v, "bf16", text, seed, steps) for seed in SEEDS for v in ("eager", "weft")}
    eager = [last_mean(curves["eager", seed]) for seed in SEEDS]
    difference = statistics.fmean(last_mean(curves["weft", seed]) for seed in SEEDS) - statistics.fmean(eager)
    noise = max(eager) - min(eager)
    exact = {v: losses(c, v, "fp32", text, SEEDS[0], steps) for v in ("eager", "weft")}
    worst = max(abs(a - b) for a, b in zip(exact["eager"], exact["weft"], strict=True))
    figures = [
        {"name": "bf16, |weft - eager| / noise", "value": abs(difference) / noise, "at_most": 1, "exact": True},
        {"name": "float32, largest |weft - eager|", "value": worst, "at_most": 1e-4, "exact": True},
    ]
    for f in figures:
        print(f"{f['name']}: {f['value']:.3g}")
    bf16 = {f"{v}, seed {seed}": curve for (v, seed), curve in curves.items()}
    return {"steps": steps, "bf16": bf16, "fp32": exact, "figures": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, 60 steps")
    parser.add_argument("--json", help="write the curves to this file")
    a = parser.parse_args()
    row = measure(TINY, 60) if a.quick else measure(SMALL, 300)
    if a.json:
        Path(a.json).write_text(json.dumps([row], indent=1))


if __name__ == "__main__":
    main()
