"""Wrong or unusual split sizes on every path of the grouped operations: an error that names the cause, or a defined
result whose rows after the last group are 0."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from experts import GROUPS, ROWS, SPLITS, compare, layer, leaf, mlp, run, splits_of, truth, unfused

K, N = 12, 10
LARGEST = 2**63 - 1

PATHS = {
    "grouped": lambda: layer(K, N),
    "grouped, one weight": lambda: layer(K, N, single_grouped_weight=True, single_grouped_bias=True),
    "split": lambda: layer(K, N, split_path=True),
    "mlp": lambda: mlp(k=K, n=N),
    "mlp, unfused": lambda: mlp(k=K, n=N),
}


def changed(rng: random.Random, change: Callable[[int], int], dtype=torch.int64) -> torch.Tensor:
    """The correct splits with one changed."""
    sizes = list(SPLITS)
    group = rng.randrange(GROUPS)
    sizes[group] = change(sizes[group])
    return splits_of(sizes, dtype)


def decreasing(rng: random.Random) -> torch.Tensor:
    """The correct sum, but a partial sum is smaller than the one before it."""
    sizes = list(SPLITS)
    low, high = rng.sample(range(GROUPS), 2)
    most = sizes[low] + 1 + rng.randrange(5)
    sizes[low], sizes[high] = sizes[low] - most, sizes[high] + most
    return splits_of(sizes)


def wrapping(rng: random.Random) -> torch.Tensor:
    """The sum is correct modulo 2^64."""
    sizes = [2**62] * 4 + [ROWS, 0]
    rng.shuffle(sizes)
    return splits_of(sizes)


def wrapping_in_32_bits(rng: random.Random) -> torch.Tensor:
    sizes = [2**31 - 1, 2**31 - 1, 2, ROWS, 0, 0]
    rng.shuffle(sizes)
    return splits_of(sizes, torch.int32)


def shorter(rng: random.Random) -> torch.Tensor:
    sizes = [rng.randrange(size + 1) for size in SPLITS]
    return splits_of(sizes, rng.choice((torch.int32, torch.int64)))


WRONG = {
    "negative": lambda rng: changed(rng, lambda size: -1 - rng.randrange(9)),
    "negative, int32": lambda rng: changed(rng, lambda size: -1 - rng.randrange(9), torch.int32),
    "smallest": lambda rng: changed(rng, lambda size: -LARGEST - 1),
    "one row too many": lambda rng: changed(rng, lambda size: size + 1),
    "too large": lambda rng: changed(rng, lambda size: rng.choice((ROWS + 1, 2**31, 2**32 + size, 2**40, LARGEST))),
    "too large, int32": lambda rng: changed(rng, lambda size: 2**31 - 1, torch.int32),
    "decreasing sums": decreasing,
    "wrapping": wrapping,
    "wrapping in 32 bits": wrapping_in_32_bits,
    "too few": lambda rng: splits_of(SPLITS[: rng.randrange(GROUPS)]),
    "too many": lambda rng: splits_of((*SPLITS, *[0] * (1 + rng.randrange(3)))),
    "floating": lambda rng: splits_of().to(rng.choice((torch.float32, torch.float64, torch.bfloat16))),
    "bool or complex": lambda rng: splits_of().to(rng.choice((torch.bool, torch.complex64))),
    "on meta": lambda rng: splits_of(dtype=rng.choice((torch.int32, torch.int64))).to("meta"),
    "no tensor": lambda rng: rng.choice((list(SPLITS), None, 3)),
}
DEFINED = {
    "a tail": shorter,
    "nothing but a tail": lambda rng: splits_of([0] * GROUPS),
    "gaps in memory": lambda rng: shorter(rng).repeat_interleave(2)[::2],
    "two dimensions": lambda rng: shorter(rng).view(2, 3).t().contiguous().t(),
    "narrow integers": lambda rng: shorter(rng).to(rng.choice((torch.int8, torch.int16, torch.uint8))),
}
EACH = 2  # cases of each kind on each path
CASES = len(PATHS) * (len(WRONG) + len(DEFINED)) * EACH


def arguments(model, splits, rows: int = ROWS, last=None) -> list:
    """Returns x and the extra inputs. `last`: splits of the last layer, if different."""
    probs = torch.rand(rows).requires_grad_()
    if model.num_extra_inputs == 1:
        return [leaf(rows, K), splits]
    return [leaf(rows, K), splits, probs, splits if last is None else last, leaf(rows)]


def check_right(model) -> None:
    given, dy = arguments(model, splits_of()), leaf(ROWS, N).detach()
    compare(run(model, dy, *given), truth(model, dy, *given), torch.float32)


def check_raises(model, splits, rng: random.Random) -> None:
    """Expects an error that names the cause, and a correct next call."""
    given = arguments(model, splits)
    if len(given) == 5 and rng.random() < 0.5:  # one layer gets the correct splits
        given = arguments(model, *rng.choice(((splits, ROWS, splits_of()), (splits_of(), ROWS, splits))))
    with pytest.raises((ValueError, TypeError, RuntimeError), match="split|integer|extra input|Tensor"):
        model(*given)
    check_right(model)


def check_defined(model, splits) -> None:
    """Expects the result without the tail, and 0 in the tail, whose inputs are NaN and infinity."""
    active = int(splits.sum())
    given, dy = arguments(model, splits), leaf(ROWS, N).detach()
    floats = [t for t in (dy, *given) if t.is_floating_point()]
    for t in floats:
        t.data[active:] = float("nan") if t is not dy else float("inf")
    found = run(model, dy, *given)
    short = [t.detach()[:active].requires_grad_() if t.is_floating_point() else t.reshape(-1).long() for t in given]
    for name, t in found.items():
        if t is not None and (name == "y" or name.startswith(("gradient of x", "gradient of extra"))):
            assert t.shape[0] == ROWS and not t[active:].any(), name
            found[name] = t[:active]
    compare(found, truth(model, dy[:active], *short), torch.float32)


def check_path(path: str) -> int:
    model, cases = PATHS[path](), 0
    for number in range(EACH):
        for kind, make in (WRONG | DEFINED).items():
            rng = random.Random(f"{path}{kind}{number}")
            splits = make(rng)
            try:
                check_raises(model, splits, rng) if kind in WRONG else check_defined(model, splits)
            except BaseException as error:
                error.add_note(f"{path}, {kind}: {splits}")
                raise
            cases += 1
    return cases


def test_bad_splits_raise_or_give_defined_result():
    cases = 0
    for path in PATHS:
        if path.endswith("unfused"):
            with unfused():
                cases += check_path(path)
        else:
            cases += check_path(path)
    assert cases == CASES >= 200
    print(f"{cases} bad splits, {len(PATHS)} paths")
