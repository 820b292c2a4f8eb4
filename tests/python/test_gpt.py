"""The GPT of benchmarks/python has the same loss and gradients in weft as in plain torch.nn, for all options."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tolerances import allowed_in_a_pipeline, distance

import torchweft

BENCHMARKS = Path(__file__).parents[2] / "benchmarks/python"
sys.path.append(str(BENCHMARKS))

import gpt_models  # noqa: E402
from gpt_training import Training  # noqa: E402

SMALLEST = replace(gpt_models.PRESETS["tiny"], width=32, inner=48, tokens=9, vocabulary=17)
OPTIONS = {
    "norm": ("layer", "rms"),
    "activation": ("gelu", "swiglu"),
    "positions": ("learned", "rotary"),
    "groups": (0, 1, 2),
    "tied": (False, True),
    "bias": (False, True),
}
CONFIGS = [
    replace(SMALLEST, **dict(zip(OPTIONS, values, strict=True))) for values in itertools.product(*OPTIONS.values())
]


def described(c: gpt_models.Config) -> str:
    names = [
        c.norm,
        c.activation,
        c.positions,
        f"{c.groups or c.heads}groups",
        *(n for n in ("tied", "bias") if getattr(c, n)),
    ]
    return "-".join(names)


def randomize(model: gpt_models.Model) -> None:
    """Random values also where initialize() sets 0 and 1, so that a misplaced bias or norm weight shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)


def batch(c: gpt_models.Config) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(c.vocabulary, (2, c.batch, c.tokens)).unbind()


def loss_and_gradients(model: gpt_models.Model, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    loss = model(tokens, targets)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return {"loss": loss, **dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))}


@pytest.mark.parametrize("c", CONFIGS, ids=described)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_weft_model_has_loss_and_gradients_of_plain_model(c, dtype):
    plain, ours = gpt_models.plain_model(c), gpt_models.weft_model(c)
    randomize(plain)
    gpt_models.copy_parameters(plain, ours)
    data = batch(c)
    exact = loss_and_gradients(plain.double(), *data)
    eager = loss_and_gradients(plain.to(dtype), *data)
    actual = loss_and_gradients(ours.to(dtype), *data)
    for name, value, plain_value, truth in zip(exact, actual.values(), eager.values(), exact.values(), strict=True):
        scale = truth.abs().max().item()
        allowed = allowed_in_a_pipeline(dtype, distance(plain_value, truth) / scale)
        assert scale > 0 and distance(value, truth) <= allowed * scale, name


@pytest.mark.parametrize("tied", (False, True))
def test_weft_adds_to_main_grad_what_plain_training_adds(tied):
    c = replace(SMALLEST, tied=tied)
    plain, fused = (Training(c, variant, "main_grad") for variant in ("eager", "weft"))
    linears = [module for module in fused.model.modules() if isinstance(module, torchweft.ops.Linear)]
    assert len(linears) == 4 * c.layers + 1 and all(linear.accumulate_into_main_grad for linear in linears)
    first, second = plain.step(), fused.step()
    assert second.loss == pytest.approx(first.loss, rel=1e-3) and second.norm == pytest.approx(first.norm, rel=1e-2)
    for theirs, ours in zip(plain.parameters, fused.parameters, strict=True):
        assert ours.dtype == torch.bfloat16 and ours.main_grad.dtype == torch.float32 and ours.grad is None
        assert theirs.main_grad.abs().max() > 0
        assert distance(ours.main_grad, theirs.main_grad) <= 0.03 * theirs.main_grad.abs().max()
    for master, parameter in zip(fused.trained, fused.parameters, strict=True):
        assert torch.equal(master.bfloat16(), parameter), "the parameter is not its rounded master weight"


def test_variants_train_on_the_same_tokens_from_the_same_parameters():
    eager, fused = (Training(gpt_models.PRESETS["tiny"], variant, "fp32") for variant in ("eager", "weft"))
    for _ in range(3):
        assert fused.step().loss == pytest.approx(eager.step().loss, rel=1e-5)


def test_benchmark_reports_figures(tmp_path):
    words = "tiny --precision bf16 --threads 1 --variants eager weft --rounds 3".split()
    command = [sys.executable, str(BENCHMARKS / "gpt.py"), *words, "--json", str(tmp_path / "rows.json")]
    environment = {**os.environ, "PYTHONPATH": str(Path(torchweft.__file__).parent.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    for name in ("eager", "weft"):
        variant = row["variants"][name]
        assert variant["tokens_per_s"] > 0 and variant["peak_bytes"] > 0 and variant["first_step_s"] > 0
    assert [f["name"] for f in row["figures"]] == [
        "tiny bf16 on 1: weft / eager",
        "tiny bf16 on 1: weft / eager, peak memory",
    ]
