"""`torchweft.recompute_contexts`: activation checkpointing repeats a call as it was."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import torchweft
from torchweft import ops, recipe

CONTEXTS = torchweft.recompute_contexts


@pytest.mark.parametrize("kind", ("Float8CurrentScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "DelayedScaling"))
def test_repeats_with_the_recipe(kind):
    torch.manual_seed(0)
    linear = ops.Linear(64, 64, dtype=torch.bfloat16)
    results = []
    for function in (linear, lambda t: checkpoint(linear, t, use_reentrant=False, context_fn=CONTEXTS)):
        x = torch.randn(32, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        linear.zero_grad()
        linear.__dict__.pop("_delayed_scaling", None)
        torch.manual_seed(2)
        with torchweft.autocast(recipe=getattr(recipe, kind)()):
            y = function(x)
        y.sum().backward()
        results.append((y, x.grad, linear.weight.grad))
    assert all(map(torch.equal, *results))


def test_repeats_outside_of_a_backward():
    """Tools may read what a checkpoint would recompute; the history does not move then."""
    linear = ops.Linear(16, 16)
    with torchweft.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)):
        y = checkpoint(lambda t: linear(t).sin(), torch.randn(4, 16), use_reentrant=False, context_fn=CONTEXTS)
    before = linear.state_dict()["_extra_state"]
    assert y.grad_fn._saved_self.shape == (4, 16)
    assert torch.equal(linear.state_dict()["_extra_state"], before)


def test_repeats_with_the_states_of_a_tracker():
    tracker = torchweft.RNGStatesTracker()
    tracker.add("model-parallel-rng", 3)
    masks = []

    def function(x):
        with tracker.fork():
            masks.append(torch.rand_like(x))
        return F.dropout(x * masks[-1], 0.5)

    x = torch.randn(20, requires_grad=True)
    y = checkpoint(function, x, use_reentrant=False, context_fn=partial(CONTEXTS, tracker))
    after = tracker.get_states()["model-parallel-rng"]
    y.sum().backward()
    assert len(masks) == 2 and torch.equal(*masks)
    assert torch.equal(tracker.get_states()["model-parallel-rng"], after)
    torch.testing.assert_close(x.grad * x.detach(), y.detach())


def test_threads_repeat_a_call_at_the_same_time():
    linear, x = ops.Linear(32, 16), torch.randn(4, 32)
    current, mxfp8 = recipe.Float8CurrentScaling(), recipe.MXFP8BlockScaling()
    with torchweft.autocast(recipe=mxfp8):
        expected, repeated = linear(x), CONTEXTS()[1]
    with torchweft.autocast(recipe=current):
        outer = linear(x)
    found, barrier = {}, threading.Barrier(2, timeout=10)

    def repeat(who):
        with torchweft.autocast(recipe=current):
            if who == "second":
                barrier.wait()
            with repeated:
                if who == "first":
                    barrier.wait()
                    barrier.wait()
                found[who] = linear(x)
                if who == "second":
                    barrier.wait()
            found[who + ", after"] = linear(x)

    threads = [threading.Thread(target=repeat, args=(who,)) for who in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for name, value in found.items():
        assert torch.equal(value, outer if "after" in name else expected), name


def test_wrong_tracker_raises():
    with pytest.raises(TypeError, match=r"tracker is .*expected a torchweft\.RNGStatesTracker or None"):
        torchweft.recompute_contexts(lambda: None)
