"""A GPT in plain torch.nn and in weft, with the same options, parameters and loss.

    x = embedding(tokens) (+ learned positions)
    x = x + projection(attention(qkv(norm(x)))),  x = x + mlp(norm(x)),  in each layer
    loss = mean cross-entropy of head(norm(x)) in float32 (float64 in float64)

`parameters()` of both models lists the same tensors in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from torchweft import ops

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [tokens, head_dim / 2]; none without rotary positions


@dataclass(frozen=True)
class Config:
    width: int
    layers: int
    heads: int
    inner: int  # features of the MLP between its linears
    tokens: int  # of a sequence
    batch: int  # sequences in a step
    vocabulary: int
    groups: int = 0  # of query heads, each with one key and value head; 0 means one per head
    norm: str = "layer"  # or "rms"
    activation: str = "gelu"  # or "swiglu"
    positions: str = "learned"  # or "rotary"
    tied: bool = True  # the head's weight is the embedding's
    bias: bool = True  # of linears and LayerNorm; the head has none

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def qkv_splits(self) -> tuple[int, int, int]:
        """Columns of q, k and v in the output of the qkv linear."""
        shared = (self.groups or self.heads) * self.head_dim
        return self.width, shared, shared

    @property
    def up_columns(self) -> int:
        """Output columns of the first linear of the MLP."""
        return 2 * self.inner if self.activation == "swiglu" else self.inner


LLAMA = {"norm": "rms", "activation": "swiglu", "positions": "rotary", "tied": False, "bias": False}
PRESETS = {
    "tiny": Config(64, 2, 4, 128, tokens=32, batch=2, vocabulary=65, groups=2, **LLAMA),
    "nano": Config(384, 6, 6, 1536, tokens=256, batch=16, vocabulary=65, bias=False),
    "small": Config(768, 12, 12, 3072, tokens=1024, batch=4, vocabulary=50304),  # GPT-2 124M
    "llama": Config(1024, 8, 16, 2816, tokens=2048, batch=2, vocabulary=32000, groups=4, **LLAMA),
}


# ---- plain torch ----------------------------------------------------------------------------------------------------


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates pairs of columns of x [batch, heads, tokens, head_dim]; a pair has a column of each half."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def dot_product_attention(qkv: torch.Tensor, c: Config, *rotation: torch.Tensor) -> torch.Tensor:
    """Causal attention on qkv [batch, tokens, q | k | v]; returns [batch, tokens, width]."""
    q, k, v = (t.unflatten(-1, (-1, c.head_dim)).transpose(1, 2) for t in qkv.split(c.qkv_splits, -1))
    if rotation:
        q, k = rotary_embedding(q, *rotation), rotary_embedding(k, *rotation)
    grouped = q.size(1) != k.size(1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2).flatten(2)


class SwiGLU(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class PlainLayer(torch.nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.qkv = torch.nn.Sequential(plain_norm(c), torch.nn.Linear(c.width, sum(c.qkv_splits), bias=c.bias))
        self.projection = torch.nn.Linear(c.width, c.width, bias=c.bias)
        self.mlp = torch.nn.Sequential(
            plain_norm(c),
            torch.nn.Linear(c.width, c.up_columns, bias=c.bias),
            SwiGLU() if c.activation == "swiglu" else torch.nn.GELU(approximate="tanh"),
            torch.nn.Linear(c.inner, c.width, bias=c.bias),
        )

    def forward(self, x: torch.Tensor, *rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.projection(dot_product_attention(self.qkv(x), self.config, *rotation))
        return x + self.mlp(x)


def plain_norm(c: Config) -> torch.nn.Module:
    return torch.nn.LayerNorm(c.width, bias=c.bias) if c.norm == "layer" else torch.nn.RMSNorm(c.width, eps=1e-5)


class PlainHead(torch.nn.Sequential):
    def __init__(self, c: Config) -> None:
        super().__init__(plain_norm(c), torch.nn.Linear(c.width, c.vocabulary, bias=False))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


# ---- weft -----------------------------------------------------------------------------------------------------------


def residual(name: str, *body: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """x + body(x): the operations between a branch and its sum, joined by a channel."""
    branch = ops.MakeExtraOutput().set_extra_output_channel(0, name, output_to_caller=False)
    return branch, *body, ops.AddExtraInput().set_extra_input_channel(0, name)


def weft_layer(c: Config, **linear: bool) -> ops.Sequential:
    """One pipeline. With rotary positions cos and sin are its extra inputs."""
    linear = {"bias": c.bias, **linear}
    heads = {"num_gqa_groups": c.groups or None, "qkv_format": "bshd", "qkv_layout": "concatenated"}
    rotary = [ops.RotaryEmbedding(c.heads, c.head_dim, rotary_base=None, **heads)] if c.positions == "rotary" else []
    attention = [
        weft_norm(c),
        ops.Linear(c.width, sum(c.qkv_splits), **linear),
        *rotary,
        ops.DotProductAttention(c.heads, c.head_dim, **heads),
        ops.Linear(c.width, c.width, **linear),
    ]
    mlp = [
        weft_norm(c),
        ops.Linear(c.width, c.up_columns, **linear),
        ops.SwiGLU() if c.activation == "swiglu" else ops.GELU(),
        ops.Linear(c.inner, c.width, **linear),
    ]
    return ops.Sequential(*residual("attention", *attention), *residual("mlp", *mlp))


def weft_norm(c: Config) -> torch.nn.Module:
    return ops.LayerNorm(c.width, bias=c.bias) if c.norm == "layer" else ops.RMSNorm(c.width)


def weft_head(c: Config, **linear: bool) -> ops.Sequential:
    return ops.Sequential(weft_norm(c), ops.Linear(c.width, c.vocabulary, bias=False, **linear), ops.CrossEntropy())


# ---- the model ------------------------------------------------------------------------------------------------------


def rotations(c: Config) -> Rotation:
    frequencies = 10000.0 ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
    angles = torch.outer(torch.arange(c.tokens), frequencies)
    return angles.cos(), angles.sin()


class Model(torch.nn.Module):
    """`forward(tokens, targets)` returns the loss; both are [batch, tokens]."""

    def __init__(self, c: Config, layers: list[torch.nn.Module], head: torch.nn.Module) -> None:
        super().__init__()
        self.config = c
        self.embedding = torch.nn.Embedding(c.vocabulary, c.width)
        self.positions = torch.nn.Embedding(c.tokens, c.width) if c.positions == "learned" else None
        self.layers = torch.nn.ModuleList(layers)
        self.head = head
        if c.tied:
            head[1].weight = self.embedding.weight
        if c.positions == "rotary":
            for name, value in zip(("cos", "sin"), rotations(c), strict=True):
                self.register_buffer(name, value, persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x if self.positions is None else x + self.positions.weight
        rotation = (self.cos, self.sin) if self.config.positions == "rotary" else ()
        for layer in self.layers:
            x = layer(x, *rotation)
        return self.head(x, targets)


def plain_model(c: Config) -> Model:
    return Model(c, [PlainLayer(c) for _ in range(c.layers)], PlainHead(c))


def weft_model(c: Config, main_grad: bool = False) -> Model:
    """With `main_grad` the linears add their weight gradients to `weight.main_grad`."""
    linear = {"accumulate_into_main_grad": True} if main_grad else {}
    return Model(c, [weft_layer(c, **linear) for _ in range(c.layers)], weft_head(c, **linear))


@torch.no_grad()
def initialize(model: Model) -> None:
    """Initializes a plain model as GPT-2 does: N(0, 0.02²), linears before a residual add smaller by √(2·layers), norms
    1, biases 0."""
    before_add = {w for layer in model.layers for w in (layer.projection.weight, layer.mlp[-1].weight)}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, 0.02 / (2 * model.config.layers) ** 0.5 if parameter in before_add else 0.02)
        elif name.endswith("bias"):
            parameter.zero_()


@torch.no_grad()
def copy_parameters(source: Model, target: Model) -> None:
    for theirs, ours in zip(target.parameters(), source.parameters(), strict=True):
        theirs.copy_(ours)
