"""What ``torchweft bench`` times: each problem in weft's operations and in plain PyTorch, with the same values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .. import ops

Run = Callable[[], object]
WIDTH, HEADS, TOKENS, BATCH, VOCABULARY = 512, 8, 256, 4, 8192


class Sides(NamedTuple):
    """The calls to time; `compiled` makes the one of torch.compile."""

    weft: Run
    eager: Run
    compiled: Callable[[], Run]


def _residual(name: str, *body: torch.nn.Module) -> list[torch.nn.Module]:
    """x + body(x)."""
    branch = ops.MakeExtraOutput().set_extra_output_channel(0, name, output_to_caller=False)
    return [branch, *body, ops.AddExtraInput().set_extra_input_channel(0, name)]


def _weft_mlp() -> list[torch.nn.Module]:
    return _residual(
        "mlp", ops.LayerNorm(WIDTH), ops.Linear(WIDTH, 4 * WIDTH), ops.GELU(), ops.Linear(4 * WIDTH, WIDTH)
    )


def _weft_layer() -> torch.nn.Module:
    attention = ops.DotProductAttention(HEADS, WIDTH // HEADS, qkv_format="bshd", qkv_layout="concatenated")
    body = ops.LayerNorm(WIDTH), ops.Linear(WIDTH, 3 * WIDTH), attention, ops.Linear(WIDTH, WIDTH)
    return ops.Sequential(*_residual("attention", *body), *_weft_mlp())


def plain_attention(qkv: torch.Tensor) -> torch.Tensor:
    """Causal attention on qkv [batch, tokens, q | k | v]."""
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class PlainMLP(torch.nn.Module):
    """x + MLP(norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))
        return x + y


class PlainLayer(torch.nn.Module):
    """Attention and MLP, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = PlainMLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(x + self.projection(plain_attention(self.qkv(self.norm(x)))))
        return y


class PlainHead(torch.nn.Module):
    """The loss of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.linear = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.linear(self.norm(x)).float().flatten(0, 1), targets.flatten())


class GPT(torch.nn.Module):
    """Two layers and the loss."""

    def __init__(self, layers: list[torch.nn.Module], head: torch.nn.Module) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.Sequential(*layers)
        self.head = head

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.layers(self.embedding(tokens)), targets)
        return loss


def _copy_parameters(source: torch.nn.Module, target: torch.nn.Module) -> None:
    with torch.no_grad():
        for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
            ours.copy_(theirs)


def _passes(
    function: Callable[[torch.Tensor], torch.Tensor], parameters: Sequence[torch.Tensor], x: torch.Tensor
) -> Run:
    """Forward and backward."""
    generator = torch.Generator().manual_seed(1)
    leaf, dy = x.clone().requires_grad_(), torch.randn(*x.shape[:-1], WIDTH, generator=generator).to(x.dtype)
    return lambda: torch.autograd.grad(function(leaf), [leaf, *parameters], dy)


def block(dtype: torch.dtype) -> Sides:
    plain, ours = PlainMLP().to(dtype), ops.Sequential(*_weft_mlp()).to(dtype)
    _copy_parameters(plain, ours)
    x = torch.randn(BATCH * TOKENS, WIDTH, dtype=dtype)
    weights = list(plain.parameters())
    return Sides(
        _passes(ours, list(ours.parameters()), x),
        _passes(plain, weights, x),
        lambda: _passes(torch.compile(plain), weights, x),
    )


def attention(dtype: torch.dtype) -> Sides:
    ours = ops.DotProductAttention(HEADS, WIDTH // HEADS, qkv_format="bshd", qkv_layout="concatenated")
    qkv = torch.randn(BATCH, TOKENS, 3 * WIDTH, dtype=dtype)
    return Sides(
        _passes(ours, [], qkv),
        _passes(plain_attention, [], qkv),
        lambda: _passes(torch.compile(plain_attention), [], qkv),
    )


def step(dtype: torch.dtype) -> Sides:
    plain = GPT([PlainLayer() for _ in range(2)], PlainHead()).to(dtype)
    head = ops.Sequential(ops.LayerNorm(WIDTH), ops.Linear(WIDTH, VOCABULARY, bias=False), ops.CrossEntropy())
    ours = GPT([_weft_layer() for _ in range(2)], head).to(dtype)
    _copy_parameters(plain, ours)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1))

    def training_step(model: torch.nn.Module, call: Callable[..., torch.Tensor]) -> Run:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def run() -> None:
            optimizer.zero_grad()
            call(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()

        return run

    compiled = copy.deepcopy(plain)
    return Sides(
        training_step(ours, ours), training_step(plain, plain), lambda: training_step(compiled, torch.compile(compiled))
    )


PROBLEMS: dict[str, Callable[[torch.dtype], Sides]] = {"block": block, "attention": attention, "step": step}
