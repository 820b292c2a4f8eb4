"""What a call draws from torch's generator does not depend on grad mode: reentrant checkpointing repeats in grad mode
what it first ran without, and a draw more or less would change every mask after it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torchweft
from torchweft import ops, recipe

SPLITS = torch.tensor([32, 32])
RECIPES = {
    "none": None,
    "current": recipe.Float8CurrentScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
    "nvfp4 without override": recipe.NVFP4BlockScaling(backward_override="high_precision"),
}
MODULES = {
    "linear": (lambda: ops.Linear(64, 64), ()),
    "mlp": (lambda: ops.Sequential(ops.RMSNorm(64), ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64)), ()),
    "grouped": (lambda: ops.GroupedLinear(2, 64, 64), (SPLITS,)),
    "dropout": (lambda: ops.Sequential(ops.Linear(64, 64), ops.Dropout(0.5)), ()),
    "attention": (
        lambda: ops.Sequential(
            ops.Linear(64, 192),
            ops.DotProductAttention(4, 16, attention_dropout=0.5, qkv_layout="concatenated"),
            ops.Linear(64, 64),
        ),
        (),
    ),
}


def generator_after(input: torch.Tensor, call) -> bytes:
    torch.manual_seed(3)
    call(input)
    return torch.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", MODULES)
def test_draws_are_equal_in_every_grad_mode(kind, name):
    make, extras = MODULES[kind]
    module, x = make().bfloat16(), torch.randn(64, 64, dtype=torch.bfloat16)
    states = set()

    def call(input: torch.Tensor) -> torch.Tensor:
        with torchweft.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
            return module(input, *extras)

    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for needs_dx in (False, True):
            for needs_dw in (False, True):
                module.requires_grad_(needs_dw)
                input = x.clone().requires_grad_(needs_dx)
                with mode():
                    states.add(generator_after(input, call))
    assert len(states) == 1


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["dropout", "grouped"])
def test_checkpoint_repeats_every_mask(kind, name, use_reentrant):
    make, extras = MODULES[kind]
    module, mask = make().bfloat16(), ops.Dropout(0.5)
    outputs, x = [], torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)

    def region(input: torch.Tensor) -> torch.Tensor:
        with torchweft.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
            y = mask(module(input, *extras))
        outputs.append(y.detach().clone())
        return y

    torch.manual_seed(1)
    plain = region(x)
    (expected,) = torch.autograd.grad(plain.float().square().sum(), x)
    outputs.clear()
    torch.manual_seed(1)
    y = checkpoint(region, x, use_reentrant=use_reentrant)
    y.float().square().sum().backward()
    assert torch.equal(outputs[0], outputs[-1])
    assert len(outputs) == 1 + use_reentrant  # the other kind stops once it has what backward needs
    assert torch.equal(y, plain) and torch.equal(x.grad, expected)
