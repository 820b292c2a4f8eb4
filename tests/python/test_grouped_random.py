"""GroupedLinear with random numbers of groups and rows and random skew, compared with plain linears in float64.

A seed determines a case: `wrong(case(seed))` returns its errors. `test_grouped_random.py::test_five_thousand…` runs the
long series.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from experts import compare, layer, truth, uniform

CHUNK, FAST, SLOW = 20, 300, 5000
DTYPES = [torch.float32] * 5 + [torch.bfloat16] * 4 + [torch.float16, torch.float64]
WIDTHS = (1, 2, 3, 5, 8, 16, 17, 24, 32, 33, 64)
ROWS = (0, 1, 2, 7, 31, 64, 65, 128, 300, 1000, 4096)


@dataclass
class Case:
    seed: int
    sizes: list[int]
    tail: int  # rows after the last group
    k: int
    n: int
    dtype: torch.dtype
    splits_dtype: torch.dtype
    options: dict[str, bool]
    skew: str

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.tail


def uniform_sizes(rng, groups: int, rows: int) -> list[int]:
    return [rows // groups + (g < rows % groups) for g in range(groups)]


def drawn(rng, groups: int, rows: int, weights: list[float]) -> list[int]:
    sizes = [0] * groups
    for g in rng.choices(range(groups), weights, k=rows):
        sizes[g] += 1
    return sizes


def drawn_sizes(rng, groups: int, rows: int) -> list[int]:
    return drawn(rng, groups, rows, [1.0] * groups)


def zipf_sizes(rng, groups: int, rows: int) -> list[int]:
    return drawn(rng, groups, rows, [1 / (g + 1) for g in range(groups)])


def one_has_all(rng, groups: int, rows: int) -> list[int]:
    last = rng.randrange(groups)
    return [rows if g == last else 0 for g in range(groups)]


def most_empty(rng, groups: int, rows: int) -> list[int]:
    return drawn(rng, groups, rows, [1.0 if g == 0 else float(rng.random() < 0.1) for g in range(groups)])


def one_row_each(rng, groups: int, rows: int) -> list[int]:
    return [int(g < rows) for g in range(groups)]


SKEWS = {f.__name__: f for f in (uniform_sizes, drawn_sizes, zipf_sizes, one_has_all, most_empty, one_row_each)}


def case(seed: int) -> Case:
    rng = random.Random(seed)
    groups = rng.choice((1, 2, 3, 8, rng.randint(1, 64), 64))
    rows = rng.choice(ROWS) if rng.random() < 0.7 else rng.randint(0, 400)
    skew = rng.choice(list(SKEWS))
    sizes = SKEWS[skew](rng, groups, rows)
    if rng.random() < 0.5:
        rng.shuffle(sizes)
    names = ("bias", "scale_bias", "single_grouped_weight", "single_grouped_bias", "split_path")
    return Case(
        seed=seed,
        sizes=sizes,
        tail=rng.choice((0, 0, 0, 1, 13)),
        k=rng.choice(WIDTHS),
        n=rng.choice(WIDTHS),
        dtype=rng.choice(DTYPES),
        splits_dtype=rng.choice((torch.int32, torch.int64)),
        options={name: rng.random() < (0.25 if name == "split_path" else 0.5) for name in names},
        skew=skew,
    )


def wrong(c: Case) -> str:
    torch.manual_seed(c.seed)
    op = layer(c.k, c.n, groups=len(c.sizes), dtype=c.dtype, **c.options)
    x, dy = uniform(c.rows, c.k, dtype=c.dtype), uniform(c.rows, c.n, dtype=c.dtype)
    extras = [torch.tensor(c.sizes, dtype=c.splits_dtype)]
    if op.num_extra_inputs == 2:
        extras.append(uniform(c.rows, dtype=c.dtype))
    for t in (x, dy, *extras[1:]):
        t[sum(c.sizes) :] = float("nan")  # ignored
    try:
        found, exact = by_weft(op, dy, x, *extras), by_loop(op, c, dy, x, *extras)
        compare(found, exact, c.dtype, floor=0.1)
    except (AssertionError, RuntimeError, ValueError) as error:
        return f"{c}: {type(error).__name__}: {error}"
    return ""


def by_weft(op, dy, x, splits, *scales) -> dict[str, torch.Tensor]:
    leaves = [t.requires_grad_() for t in (x, *scales)]
    y = op(x, splits, *scales)
    params = dict(op.named_parameters())
    grads = torch.autograd.grad(y, [*leaves, *params.values()], dy)
    return {"y": y.detach(), **dict(zip(["x", "scales"][: len(leaves)] + list(params), grads, strict=True))}


def by_loop(op, c: Case, dy, x, splits, *scales) -> dict[str, torch.Tensor]:
    """Computes the rows of groups; the rest is 0."""
    active = sum(c.sizes)
    given = [t.detach()[:active].requires_grad_() for t in (x, *scales)]
    found = truth(op, dy[:active], given[0], splits, *given[1:])
    exact = {"y": found["y"], "x": found["gradient of x"]}
    if scales:
        exact["scales"] = found["gradient of extra 1"]
    exact = {name: torch.cat([t, t.new_zeros(c.tail, *t.shape[1:])]) for name, t in exact.items()}
    return exact | {name: found[f"gradient of {name}"] for name, _ in op.named_parameters()}


def failures(seeds) -> list[str]:
    return [text for text in (wrong(case(seed)) for seed in seeds) if text]


@pytest.mark.parametrize("first", range(0, FAST, CHUNK), ids=lambda first: f"{first}-{first + CHUNK - 1}")
def test_random_splits_match_loop(first):
    reports = failures(range(first, first + CHUNK))
    assert not reports, "\n".join(["", *reports])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_thousand_random_splits_match_loop(capsys):
    reports = failures(range(SLOW))
    with capsys.disabled():
        print(f"\n{SLOW} cases, {len(reports)} wrong")
    assert not reports, "\n".join(["", *reports])


def test_generator_covers_every_kind_of_case():
    cases = [case(seed) for seed in range(FAST)]
    assert {c.skew for c in cases} == set(SKEWS)
    assert {c.dtype for c in cases} == set(DTYPES)
    assert {1, 64} <= {len(c.sizes) for c in cases}
    assert {0, 4096} <= {sum(c.sizes) for c in cases}
    assert any(c.tail for c in cases) and any(0 in c.sizes for c in cases)


def test_wrong_result_is_found():
    c = case(3)
    c.sizes, c.tail, c.k, c.n, c.dtype = [3, 4], 0, 5, 6, torch.float32
    assert not wrong(c)
    torch.manual_seed(0)
    op = layer(5, 6, groups=2)
    x, dy, splits = uniform(7, 5, dtype=torch.float32), uniform(7, 6, dtype=torch.float32), torch.tensor([3, 4])
    exact = by_loop(op, c, dy, x, splits)
    with pytest.raises(AssertionError, match="is off by"):
        compare(by_weft(op, dy, x, torch.tensor([4, 3])), exact, torch.float32)
