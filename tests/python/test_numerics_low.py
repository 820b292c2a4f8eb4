"""Fused low-precision results are no worse than eager's: relative Frobenius errors, compared with float64."""

from __future__ import annotations

from collections.abc import Callable

import plain
import pytest
import torch

from torchweft import ops

ALLOWED = 1.02
DRAWS = 24
M, H, F = 192, 256, 384
DTYPES = [torch.bfloat16, torch.float16]


def residual(*modules: torch.nn.Module) -> list[torch.nn.Module]:
    """x + modules(x)."""
    return [
        ops.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=False),
        *modules,
        ops.AddExtraInput().set_extra_input_channel(0, "residual"),
    ]


def block(h: int, f: int, gated: bool) -> list[torch.nn.Module]:
    up, activation = (2 * f, ops.SwiGLU()) if gated else (f, ops.GELU())
    return residual(ops.RMSNorm(h), ops.Linear(h, up), activation, ops.Linear(f, h))


ACTIVATIONS = ["GELU", "QGELU", "ReLU", "SReLU", "SiLU"]
GATED = ["GLU", "GEGLU", "QGEGLU", "ReGLU", "SReGLU", "SwiGLU", "SiTUGLU", "ClampedSwiGLU"]
SAMPLES = {
    "linear+bias": lambda: [ops.Linear(H, F)],
    **{f"linear+bias+{name}": lambda name=name: [ops.Linear(H, F), getattr(ops, name)()] for name in ACTIVATIONS},
    **{
        f"linear+{name}": lambda name=name: [ops.Linear(H, F, bias=False), getattr(ops, name)()] for name in ACTIVATIONS
    },
    **{f"linear+bias+{name}": lambda name=name: [ops.Linear(H, 2 * F), getattr(ops, name)()] for name in GATED},
    "linear+add": lambda: residual(ops.Linear(H, H, bias=False)),
    "linear+bias+add": lambda: residual(ops.Linear(H, H)),
    "linear+scale+add": lambda: residual(ops.Linear(H, H, bias=False), ops.ConstantScale(0.7)),
    "linear+scale": lambda: [ops.Linear(H, F, bias=False), ops.ConstantScale(0.7)],
    "RMSNorm+linear": lambda: [ops.RMSNorm(H), ops.Linear(H, F)],
    "LayerNorm+linear": lambda: [ops.LayerNorm(H), ops.Linear(H, F)],
    "dropout+add": lambda: residual(ops.Dropout(0.3)),
    "add+RMSNorm": lambda: residual(ops.RMSNorm(H)),
    "add+LayerNorm": lambda: residual(ops.LayerNorm(H)),
    "bias+GELU": lambda: [ops.Bias(H), ops.GELU()],
    "linear+bias+GELU erf": lambda: [ops.Linear(H, F), ops.GELU("none")],
    "LayerNorm without bias": lambda: [ops.LayerNorm(H, bias=False), ops.Linear(H, F)],
}
BLOCKS = [(64, 128, 512), (256, 256, 1024), (200, 192, 520)]


def by_plain(modules: list[torch.nn.Module], x: torch.Tensor, of: plain.Of) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    for op in modules:
        extras = (kept[0],) if isinstance(op, ops.AddExtraInput) else ()
        x, extra = plain.apply(op, x, *extras, of=of)
        kept.extend(extra)
    return x


def results(modules: list[torch.nn.Module], x: torch.Tensor, dy: torch.Tensor, dtype: torch.dtype | None):
    """Returns y and all gradients, by weft or by plain torch in `dtype`."""
    params = [p for module in modules for p in module.parameters()]
    leaf = x.to(dtype or x.dtype, copy=True).requires_grad_()
    torch.manual_seed(1)  # of dropout
    if dtype is None:
        twins, y = params, ops.Sequential(*modules)(leaf)
    else:
        twins = [p.detach().to(dtype, copy=True).requires_grad_() for p in params]
        of = {id(p): twin for p, twin in zip(params, twins, strict=True)}
        y = by_plain(modules, leaf, lambda p: of[id(p)])
    grads = torch.autograd.grad(y, [leaf, *twins], dy.to(y.dtype))
    names = [name for i, module in enumerate(modules) for name in (f"{i}.{n}" for n, _ in module.named_parameters())]
    return dict(zip(["y", "dx", *names], [y.detach(), *grads], strict=True))


def error(got: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Error over all draws together: a single draw of a short vector varies too much."""
    distance = sum((a.double() - b).square().sum() for a, b in zip(got, exact, strict=True))
    return (distance / sum(b.square().sum() for b in exact)).sqrt().item()


def check(make: Callable[[], list[torch.nn.Module]], m: int, h: int, dtype: torch.dtype) -> None:
    draws = []
    for seed in range(DRAWS):
        torch.manual_seed(seed)
        modules = [module.to(dtype) for module in make()]
        x = torch.randn(m, h).to(dtype)
        with torch.no_grad():
            dy = torch.randn_like(ops.Sequential(*modules)(x))
        draws.append([results(modules, x, dy, d) for d in (None, dtype, torch.float64)])
    found = {}
    for what in draws[0][0]:
        ours, eager, exact = ([way[what] for way in ways] for ways in zip(*draws, strict=True))
        found[what] = error(ours, exact), error(eager, exact)
    print({what: round(mine / theirs, 4) if theirs else mine for what, (mine, theirs) in found.items()})
    worse = {what: pair for what, pair in found.items() if not pair[0] <= ALLOWED * pair[1]}
    assert not worse, f"errors of weft and eager: {worse}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SAMPLES)
def test_fusion_is_as_accurate_as_eager(name, dtype):
    check(SAMPLES[name], M, H, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "swiglu"])
@pytest.mark.parametrize("m, h, f", BLOCKS)
def test_block_is_as_accurate_as_eager(m, h, f, gated, dtype):
    check(lambda: block(h, f, gated), m, h, dtype)
