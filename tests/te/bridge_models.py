"""Converts two small models by Megatron-Bridge: Hugging Face, Megatron's distributed checkpoint, Hugging Face.

Prints one line for each model: how many tensors it has, and how many came back with the same bits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.core import dist_checkpointing
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def convert(model: PreTrainedModel, folder: Path) -> str:
    before, between, after = (folder / name for name in ("before", "megatron", "after"))
    model.to(torch.bfloat16).save_pretrained(before)
    bridge = AutoBridge.from_hf_pretrained(str(before))

    [saved] = bridge.to_megatron_model(wrap_with_ddp=False)
    between.mkdir()
    dist_checkpointing.save(saved.sharded_state_dict(), str(between))

    [loaded] = bridge.to_megatron_model(load_weights=False, wrap_with_ddp=False)
    loaded.load_state_dict(dist_checkpointing.load(loaded.sharded_state_dict(), str(between)))
    bridge.save_hf_weights([loaded], str(after))

    old, new = tensors(before), tensors(after)
    same = sum(name in new and torch.equal(t, new[name]) for name, t in old.items())
    return f"{type(model).__name__}: {len(old)} tensors, {same} of {len(new)} came back with the same bits"


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    models = LlamaForCausalLM(LlamaConfig(**SIZES)), Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))
    for model in models:
        print(convert(model, Path(sys.argv[1]) / type(model).__name__))


if __name__ == "__main__":  # Megatron starts a process that imports this file
    main()
