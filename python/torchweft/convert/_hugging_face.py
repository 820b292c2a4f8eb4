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
from ._model import Entry, HeadCounts, Model, saved_arguments, split_qkv
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
PARTS = (*LLAMA.values(), *GPT2.values())
OUTSIDE = {
    "llama": {"embedding": "model.embed_tokens", "final_norm": "model.norm", "output": "lm_head"},
    "gpt2": {
        "embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "output": "lm_head",
    },
}


# Arguments of Megatron with which a model computes something else than Llama or GPT-2 of transformers.
UNSUPPORTED = (
    "apply_layernorm_1p",
    "normalization_1p",
    "openai_gelu",
    "quick_geglu",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "squared_relu",
    "use_rope_scaling",
)


class TransposedTensor(LazyTensor):
    """As torch.t."""

    def __init__(self, source: LazyTensor) -> None:
        self.source, self.dtype, self.shape = source, source.dtype, source.shape[::-1]

    def read(self, bounds: SliceBounds) -> torch.Tensor:
        return self.source.read(bounds[::-1]).t()


def convert_names(model: Model, names: NameTable, heads: HeadCounts) -> dict[str, Any]:
    """Gives the entries of a model the names, and for GPT-2 the layout, of transformers. Returns config.json."""
    dropped = [name for name in model.entries if name.endswith("_extra_state")]
    for name in dropped:
        model.skipped |= {source: "transformers has no such state" for source in model.entries.pop(name).sources}
    model.skipped |= {name: "transformers has no place for it" for name in (*model.raw, *model.common)}
    family = _family(model)
    config = _config(model, family, heads)
    split_qkv(model, names, heads)
    entries = dict(_llama(model) if family == "llama" else _gpt2(model))
    tied = "lm_head.weight" not in entries
    model.entries, model.common, model.raw = entries, {}, {}
    return config | {"tie_word_embeddings": tied}


def _family(model: Model) -> str:
    """Returns "llama" or "gpt2". Raises for a model that is neither."""
    for name in (
        "embedding.weight",
        "layers.0.self_attention.qkv.weight",
        "layers.0.mlp.fc1.weight",
        "layers.0.mlp.fc2.weight",
    ):
        if name not in model.entries or len(model.entries[name].lazy.shape) != 2:
            raise ConversionError(f"--to hf converts decoders, Llama and GPT-2; this model has no matrix {name}")
    args = saved_arguments(model.common)
    wrong = [name for name in UNSUPPORTED if args.get(name)]
    if args.get("rotary_percent", 1) != 1:
        wrong.append("rotary_percent")
    if wrong:
        raise ConversionError(
            f"--to hf: transformers' Llama and GPT-2 do not compute what {wrong[0]} of this model says"
        )
    gated = (
        model.entries["layers.0.mlp.fc1.weight"].lazy.shape[0]
        == 2 * model.entries["layers.0.mlp.fc2.weight"].lazy.shape[1]
    )
    positions = "position_embedding.weight" in model.entries
    biases = sorted(name for name in model.entries if name.endswith(".bias"))
    if gated and not positions and not biases:
        return "llama"
    norms = [name for name in model.entries if re.search(r"norm\.weight$", name)]
    if positions and not gated and all(name.replace(".weight", ".bias") in biases for name in norms):
        return "gpt2"
    found = f"MLPs {'with' if gated else 'without'} a gate, {'' if positions else 'no '}position embeddings"
    raise ConversionError(
        "--to hf converts Llama (gated MLPs, rotary positions, no biases) and GPT-2 (position embeddings, LayerNorm, "
        f"no gate); this model has {found}, {biases[0] if biases else 'no biases'}"
    )


def _config(model: Model, family: str, heads: HeadCounts) -> dict[str, Any]:
    """What transformers needs to build the model."""
    shape = {name: entry.lazy.shape for name, entry in model.entries.items()}
    layers = 1 + max(int(found[1]) for name in shape if (found := re.match(r"layers\.(\d+)\.", name)))
    vocabulary, width = shape["embedding.weight"]
    head_dim = shape["layers.0.self_attention.qkv.weight"][0] // (heads.heads + 2 * heads.groups)
    args = saved_arguments(model.common)
    epsilon = args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5  # Megatron's default
    dtype = str(model.entries["embedding.weight"].lazy.dtype).removeprefix("torch.")
    if family == "gpt2":
        if heads.groups != heads.heads or head_dim * heads.heads != width:
            raise ConversionError(
                f"GPT-2 of transformers has {width // heads.heads} features per head and no query groups"
            )
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
        "head_dim": head_dim,
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
