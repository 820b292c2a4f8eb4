"""Llama and GPT-2 as the package transformers loads them: tensors under its names, and config.json.

Llama has gated MLPs, norms without biases and rotary positions; GPT-2 has position embeddings and biases. GPT-2 stores
the weights of linears transposed, [in, out].
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from ._coverage import SliceBounds
from ._lazy_tensor import ConversionError, LazyTensor, cat, chunk
from ._model import Entry, HeadCounts, Model, split_qkv
from ._name_table import NameTable

CONFIG = "config.json"
# Names in a layer: torch's, and those of transformers.
LLAMA = {
    "input_norm": "input_layernorm",
    "self_attention.q": "self_attn.q_proj",
    "self_attention.k": "self_attn.k_proj",
    "self_attention.v": "self_attn.v_proj",
    "self_attention.proj": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
}
GPT2 = {
    "input_norm": "ln_1",
    "self_attention.qkv": "attn.c_attn",
    "self_attention.proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
OUTSIDE = {
    "llama": {"embedding": "model.embed_tokens", "final_norm": "model.norm", "output": "lm_head"},
    "gpt2": {
        "embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "output": "lm_head",
    },
}


class TransposedTensor(LazyTensor):
    """As torch.t."""

    def __init__(self, source: LazyTensor) -> None:
        self.source, self.dtype, self.shape = source, source.dtype, source.shape[::-1]

    def read(self, bounds: SliceBounds) -> torch.Tensor:
        return self.source.read(bounds[::-1]).t()


def convert_names(model: Model, names: NameTable, heads: HeadCounts) -> dict[str, Any]:
    """Gives the entries of a model the names, and for GPT-2 the layout, of transformers. Returns config.json."""
    family = _family(model)
    model.skipped |= {
        source: "transformers has no such state"
        for name, entry in model.entries.items()
        if name.endswith("_extra_state")
        for source in entry.sources
    }
    model.entries = {name: entry for name, entry in model.entries.items() if not name.endswith("_extra_state")}
    config = _config(model, family, heads)
    split_qkv(model, names, heads)
    entries = dict(_llama(model) if family == "llama" else _gpt2(model))
    tied = "lm_head.weight" not in entries
    model.entries, model.common, model.raw = entries, {}, {}
    return config | {"tie_word_embeddings": tied}


def _family(model: Model) -> str:
    up, down = (model.entries.get(f"layers.0.mlp.{name}.weight") for name in ("fc1", "fc2"))
    if up is None or down is None or len(down.lazy.shape) != 2:
        raise ConversionError("--to hf converts decoders with layers.N.mlp.fc1 and fc2: Llama and GPT-2")
    gated = up.lazy.shape[0] == 2 * down.lazy.shape[1]
    positions, biases = "position_embedding.weight" in model.entries, "layers.0.mlp.fc1.bias" in model.entries
    if gated and not positions and not biases:
        return "llama"
    if positions and not gated:
        return "gpt2"
    found = f"MLPs {'with' if gated else 'without'} a gate and {'with' if positions else 'without'} position embeddings"
    raise ConversionError(
        "--to hf converts Llama (gated MLPs, no biases, rotary positions) and GPT-2 (position embeddings, no gate); "
        f"this model has {found}{', and biases' if biases else ''}"
    )


def _config(model: Model, family: str, heads: HeadCounts) -> dict[str, Any]:
    """What transformers needs to build the model. What the checkpoint does not store has its default."""
    shape = {name: entry.lazy.shape for name, entry in model.entries.items()}
    layers = 1 + max(int(found[1]) for name in shape if (found := re.match(r"layers\.(\d+)\.", name)))
    vocabulary, width = shape["embedding.weight"]
    args = model.common.get("args", {})
    args = args.get("of", args) if isinstance(args, dict) else {}
    if family == "llama" and args.get("rotary_interleaved"):
        raise ConversionError("Llama in transformers does not rotate interleaved pairs (rotary_interleaved)")
    epsilon = args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5
    dtype = str(model.entries["embedding.weight"].lazy.dtype).removeprefix("torch.")
    if family == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": vocabulary,
            "n_positions": shape["position_embedding.weight"][0],
            "n_embd": width,
            "n_layer": layers,
            "n_head": heads.heads,
            "n_inner": shape["layers.0.mlp.fc2.weight"][1],
            "layer_norm_epsilon": epsilon,
            "torch_dtype": dtype,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shape["layers.0.mlp.fc2.weight"][1],
        "num_hidden_layers": layers,
        "num_attention_heads": heads.heads,
        "num_key_value_heads": heads.groups,
        "rms_norm_eps": epsilon,
        "rope_theta": args.get("rotary_base") or 10000,
        "max_position_embeddings": args.get("max_position_embeddings") or args.get("seq_length") or 2048,
        "torch_dtype": dtype,
    }


def _named(name: str, table: dict[str, str], prefix: str, family: str) -> str:
    """The name of a tensor in transformers."""
    layer = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if layer and layer[2] in table:
        return f"{prefix}.{layer[1]}.{table[layer[2]]}.{layer[3]}"
    outside = re.fullmatch(r"(\w+)\.(weight|bias)", name)
    if outside and outside[1] in OUTSIDE[family]:
        return f"{OUTSIDE[family][outside[1]]}.{outside[2]}"
    raise ConversionError(f"{name} has no name in transformers' {family}")


def _llama(model: Model) -> Iterator[tuple[str, Entry]]:
    for name, entry in model.entries.items():
        parts = {name: entry.lazy}
        if ".mlp.fc1." in name:
            gate, up = chunk(entry.lazy, 2, 0)
            parts = {name.replace(".fc1.", ".gate."): gate, name.replace(".fc1.", ".up."): up}
        for part, lazy in parts.items():
            yield _named(part, LLAMA, "model.layers", "llama"), Entry(lazy, entry.sources, entry.match)


def _gpt2(model: Model) -> Iterator[tuple[str, Entry]]:
    for name, entry in model.entries.items():
        if re.search(r"self_attention\.[kv]\.", name):
            continue  # with the query
        lazy, target = entry.lazy, name
        if ".self_attention.q." in name:
            three = [model.entries[name.replace(".q.", f".{letter}.")].lazy for letter in "qkv"]
            lazy, target = cat(three, 0), name.replace(".q.", ".qkv.")
        if name.startswith("layers.") and len(lazy.shape) == 2:
            lazy = TransposedTensor(lazy)
        yield _named(target, GPT2, "transformer.h", "gpt2"), Entry(lazy, entry.sources, entry.match)
