"""Grouped operations to test, their inputs, and the reference: plain loops over the groups in float64."""

from __future__ import annotations

from contextlib import contextmanager

import plain
import torch
from tolerances import TOLERANCES, distance

import torchweft
from torchweft import fusion, ops

SPLITS = (7, 0, 12, 1, 0, 4)  # uneven, with empty groups
GROUPS, ROWS = len(SPLITS), sum(SPLITS)


def layer(k: int, n: int, groups: int = GROUPS, **options) -> ops.GroupedLinear:
    """A GroupedLinear with nonzero biases."""
    op = ops.GroupedLinear(groups, k, n, **options)
    with torch.no_grad():
        for name, p in op.named_parameters():
            if "bias" in name:
                p.uniform_(-1, 1)
    return op


GATED = ("ScaledSwiGLU", "ScaledClampedQGeGLU", "ScaledSiTUGLU")
ACTIVATIONS = (*GATED, "ScaledSReLU", "ScaledTanhSReLU")


def scaled_activation(name: str, interleave=None, **options):
    if name in GATED:
        options["glu_interleave_size"] = interleave
    if name == "ScaledTanhSReLU":
        options["tanh_clamp_scale"] = 1.5
    return getattr(ops, name)(**options)


def mlp(
    activation="ScaledSwiGLU", k=12, hidden=32, n=10, groups: int = GROUPS, interleave=None, act_options=None, **options
) -> torchweft.Sequential:
    """GroupedLinear, scaled activation, GroupedLinear; the last one scales its bias, if it has one."""
    return torchweft.Sequential(
        layer(k, hidden * (2 if activation in GATED else 1), groups, **options),
        scaled_activation(activation, interleave, **(act_options or {})),
        layer(hidden, n, groups, scale_bias=True, **options),
    )


def splits_of(sizes=SPLITS, dtype=torch.int64) -> torch.Tensor:
    return torch.tensor(sizes, dtype=dtype)


def uniform(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return (torch.rand(shape, dtype=torch.float64) * 2 - 1).to(dtype)


def leaf(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return uniform(*shape, dtype=dtype).requires_grad_()


def run(module, dy: torch.Tensor, x: torch.Tensor, *extras: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Returns the output of a call and all gradients after a backward with dy, by name."""
    return collect(module, module(x, *extras), dy, x, *extras)


def collect(module, y, dy, x, *extras) -> dict[str, torch.Tensor | None]:
    named_leaves = {"x": x, **{f"extra {i}": t for i, t in enumerate(extras)}, **dict(module.named_parameters())}
    for t in named_leaves.values():
        t.grad = None
    if y.requires_grad:
        y.backward(dy.to(y.dtype))
    return {"y": y.detach(), **{f"gradient of {name}": t.grad for name, t in named_leaves.items()}}


def truth(module, dy, x, *extras) -> dict[str, torch.Tensor | None]:
    """Returns what `run` must return: operation by operation in plain torch, in float64."""

    def wide(t):
        return (t.detach().double() if t.is_floating_point() else t).requires_grad_(t.requires_grad)

    params = {id(p): wide(p) for p in module.parameters()}
    operations = list(module) if isinstance(module, torchweft.Sequential) else [module]
    leaves = [wide(t) for t in (x, *extras)]
    y, rest = leaves[0], leaves[1:]
    for op in operations:
        given, rest = rest[: op.num_extra_inputs], rest[op.num_extra_inputs :]
        y, _ = plain.apply(op, y, *given, of=lambda p: params[id(p)])
    if y.requires_grad:
        y.backward(dy.double())
    found = {"y": y.detach(), "gradient of x": leaves[0].grad}
    found |= {f"gradient of extra {i}": t.grad for i, t in enumerate(leaves[1:])}
    return found | {f"gradient of {name}": params[id(p)].grad for name, p in module.named_parameters()}


def assert_near(actual, exact, dtype: torch.dtype, what: str = "", floor: float = 1e-3) -> None:
    """Asserts that the error is within the tolerance of `dtype`, relative to the largest value, or to `floor` if that
    is larger: sums may cancel, their rounding errors do not."""
    error, largest = distance(actual, exact), exact.abs().max().item() if exact.numel() else 0.0
    assert error <= TOLERANCES[dtype].pipeline * max(largest, floor), f"{what} is off by {error}, largest is {largest}"


def compare(actual: dict, exact: dict, dtype: torch.dtype, floor: float = 1e-3) -> None:
    """Asserts that results are equal up to rounding, and None where expected."""
    assert actual.keys() == exact.keys()
    for name, expected in exact.items():
        if expected is None or actual[name] is None:
            assert actual[name] is expected, f"{name} is {actual[name]}, expected {expected}"
        else:
            assert_near(actual[name], expected, dtype, name, floor)


@contextmanager
def unfused():
    with fusion.without_rules():
        yield


def saved_tensors(call) -> list[torch.Tensor]:
    """Returns the tensors that a call saves for backward."""
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        call()
    return kept
