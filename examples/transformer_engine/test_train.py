"""Tests of train.py that need no GPU and take seconds."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import train
import transformer_engine.pytorch as te
from conftest import SIMULATED

NEAR = {"rtol": 1e-4, "atol": 1e-5} if SIMULATED else {"rtol": 1e-2, "atol": 1e-3}  # GPUs multiply in TF32
NEAR_LOSS = 1e-5 if SIMULATED else 1e-2
SCRIPT = str(Path(train.__file__))


def test_loss_falls():
    losses = train.main(["--steps", "40"])
    assert losses[-1] < losses[0] / 2


def test_resumed_run_matches_uninterrupted_run(tmp_path):
    whole = train.main(["--steps", "6"])
    before = train.main(["--steps", "3", "--checkpoint", str(tmp_path)])
    after = train.main(["--steps", "6", "--checkpoint", str(tmp_path)])
    assert len(after) == 3
    assert before + after == pytest.approx(whole, rel=NEAR_LOSS)


def plain_gpt(p, tokens):
    """The model in plain torch, given its Parameters `p` by name."""
    x = p["tokens.weight"][tokens] + p["positions.weight"]
    heads, channels = train.HEADS // train.GROUPS, train.WIDTH // train.HEADS
    for i in range(train.LAYERS):
        attention, mlp = f"layers.{i}.self_attention.", f"layers.{i}.layernorm_mlp."
        normed = F.rms_norm(x, [train.WIDTH], p[attention + "layernorm_qkv.layer_norm_weight"], 1e-5)
        mixed = F.linear(normed, p[attention + "layernorm_qkv.weight"])
        mixed = mixed.unflatten(-1, (train.GROUPS, heads + 2, channels))  # per group: its queries, a key, a value
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in mixed.split([heads, 1, 1], 3))
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + F.linear(context.transpose(1, 2).flatten(2), p[attention + "proj.weight"])
        normed = F.rms_norm(x, [train.WIDTH], p[mlp + "layer_norm_weight"], 1e-5)
        gate, up = F.linear(normed, p[mlp + "fc1_weight"]).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, p[mlp + "fc2_weight"])
    return F.linear(F.rms_norm(x, [train.WIDTH], p["head.0.weight"], 1e-5), p["head.1.weight"])


def test_values_and_gradients_match_plain_torch():
    model, tokens = train.make_model(), train.batch(0)[:, :-1]
    parameters = dict(model.named_parameters())
    output, plain_output = model(tokens), plain_gpt(parameters, tokens)
    torch.testing.assert_close(output, plain_output, **NEAR)
    grad_output = torch.randn_like(plain_output)  # gradients of about ten: 1e-5 is the rounding of float32
    grads = torch.autograd.grad(output, parameters.values(), grad_output)
    plain_grads = torch.autograd.grad(plain_output, parameters.values(), grad_output)
    for name, gradient, expected in zip(parameters, grads, plain_grads, strict=True):
        torch.testing.assert_close(gradient, expected, **NEAR, msg=lambda text, name=name: f"{name}: {text}")


def test_micro_batch_gradients_accumulate_in_main_grad():
    fused = train.main(["--steps", "5", "--microbatches", "4", "--fuse-wgrad"])
    assert fused == pytest.approx(train.main(["--steps", "5"]), rel=NEAR_LOSS)


LAYER = {
    "self_attention.layernorm_qkv.layer_norm_weight": (64,),
    "self_attention.layernorm_qkv.weight": (128, 64),
    "self_attention.proj.weight": (64, 64),
    "layernorm_mlp.layer_norm_weight": (64,),
    "layernorm_mlp.fc1_weight": (256, 64),
    "layernorm_mlp.fc2_weight": (64, 128),
}
CHECKPOINT = {
    "tokens.weight": (64, 64),
    "positions.weight": (16, 64),
    **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()},
    "head.0.weight": (64,),
    "head.1.weight": (64, 64),
}


def test_checkpoint_names_and_shapes_are_stable():
    """Otherwise older checkpoints do not load. `_extra_state` is the state of FP8."""
    state = train.make_model().state_dict()
    found = {name: tuple(value.shape) for name, value in state.items() if not name.endswith("_extra_state")}
    assert found == CHECKPOINT


def test_two_ranks_match_one(torchrun):
    lines = torchrun(SCRIPT, "--steps", "5").splitlines()
    two = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert two == pytest.approx(train.main(["--steps", "5"]), rel=NEAR_LOSS)


@pytest.mark.skipif(not te.is_fp8_available(), reason="this GPU has no FP8")
def test_fp8_trains():
    losses, plain = train.main(["--steps", "20", "--fp8"]), train.main(["--steps", "20"])
    assert losses != plain and losses[-1] < losses[0]
