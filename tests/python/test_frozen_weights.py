"""A frozen weight (torchweft.prepack) that has changed raises on every CPU, with or without packed copies."""

from __future__ import annotations

import copy

import pytest
import torch

import torchweft
from torchweft import ops

CHANGED = r"prepack: .*weight was changed in place while it was frozen"


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torchweft.prepack(ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32)))


def plain(module, x):
    return module(x)


def no_grad(module, x):
    with torch.no_grad():
        return module(x)


def autocast(module, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module(x)


def quantized(module, x):
    with torchweft.autocast(recipe=torchweft.recipe.MXFP8BlockScaling()):
        return module(x)


def compiled(module, x):
    return torch.compile(module, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("call", [plain, no_grad, autocast, quantized, compiled])
def test_optimizer_step_raises_until_prepack(call):
    module, x = model(), torch.randn(32, 32)
    call(module, x).float().sum()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(x).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=CHANGED):
        call(module, x)
    changed = copy.deepcopy(module)
    torch.testing.assert_close(call(torchweft.prepack(module), x), call(changed, x))


def test_change_before_the_first_call_counts():
    module, x = model(), torch.randn(4, 32)
    with torch.no_grad():
        module[1].weight.mul_(2)
    assert torch.equal(module(x), copy.deepcopy(module)(x))


def test_version_bump_without_change_does_not_raise():
    module, x = model(), torch.randn(4, 32)
    y = module(x)
    with torch.no_grad():
        module[1].weight.mul_(1)
    assert torch.equal(module(x), y)


def test_swapped_rows_raise():
    """The checksum depends on the order of the values."""
    module, x = model(), torch.randn(4, 32)
    module(x)
    with torch.no_grad():
        module[1].weight[[0, 1]] = module[1].weight[[1, 0]].clone()
    with pytest.raises(RuntimeError, match=CHANGED):
        module(x)


@pytest.mark.parametrize("end", [lambda m: torchweft.prepack(m, frozen=False), copy.deepcopy])
def test_weights_that_are_not_frozen_may_change(end):
    module, x = model(), torch.randn(4, 32)
    module(x)
    free = end(module)
    with torch.no_grad():
        free[1].weight.mul_(2)
    free(x)


def test_weight_that_is_a_transposed_view_is_checked():
    module, x = ops.Linear(16, 8), torch.randn(4, 16)
    module.weight = torch.nn.Parameter(torch.randn(16, 8).t())
    torchweft.prepack(module)
    module(x)
    with torch.no_grad():
        module.weight[0].add_(1)
    with pytest.raises(RuntimeError, match=CHANGED):
        module(x)
