"""One rank of test_compat_fsdp.py: trains modules of the Transformer Engine compatibility layer with FSDP2.

    RANK=0 WORLD_SIZE=2 python compat_fsdp.py FOLDER SITUATION…

Rank 0 writes FOLDER/SITUATION.pt: gradients and parameters, or the traceback.
"""

from __future__ import annotations

import torch
from data_parallel import WIDTH, run_situations
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torchweft.compat._layernorm_mlp import LayerNormMLP
from torchweft.compat._linear import LayerNormLinear, Linear
from torchweft.compat._transformer_layer import TransformerLayer


class Sequences(torch.nn.Module):
    """A layer that takes [batch, sequence, features]."""

    def __init__(self, **options):
        super().__init__()
        options |= {"attn_input_format": "bshd", "hidden_dropout": 0.0, "attention_dropout": 0.0}
        self.layer = TransformerLayer(WIDTH, 32, 4, num_gqa_groups=2, **options)

    def forward(self, sequences):
        return self.layer(sequences).clone()  # FSDP warns of views


MAKERS = {
    "linear": lambda **options: Linear(WIDTH, WIDTH, **options),
    "layernorm_linear": lambda **options: LayerNormLinear(WIDTH, WIDTH, normalization="RMSNorm", **options),
    "mlp": lambda **options: LayerNormMLP(WIDTH, 32, activation="swiglu", **options),
    "layer": Sequences,
}


def make_model(situation: str, **options) -> torch.nn.Module:
    torch.manual_seed(7)
    return MAKERS[situation.partition("-")[0]](**options)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def wrap(situation: str) -> torch.nn.Module:
    match situation.partition("-")[2]:
        case "":
            return fully_shard(make_model(situation))
        case "parts":  # each module that has Parameters, then the root
            model = make_model(situation)
            for child in (m for m in model.modules() if m is not model and list(m.parameters(recurse=False))):
                fully_shard(child)
            return fully_shard(model)
        case "kept":
            return fully_shard(make_model(situation), reshard_after_forward=False)
        case "checkpointed":
            return fully_shard(checkpoint_wrapper(make_model(situation)))
        case "bf16":
            return fully_shard(make_model(situation), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        case "meta":
            return from_meta(situation)
    raise ValueError(situation)


def from_meta(situation: str) -> torch.nn.Module:
    """Creates the model on the meta device, shards it, and loads the state dict of one process."""
    model = fully_shard(make_model(situation, device="meta"))
    model.to_empty(device="cpu")
    set_model_state_dict(model, make_model(situation).state_dict(), options=StateDictOptions(full_state_dict=True))
    return model


def wrapped(situation: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = wrap(situation)
    return model, make_optimizer(model)


if __name__ == "__main__":
    run_situations(wrapped)
