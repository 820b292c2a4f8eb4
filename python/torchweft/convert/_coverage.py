"""Checks whether slices cover a shape exactly once. A slice has one (start, stop) per dimension."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import torch

SliceBounds = tuple[tuple[int, int], ...]


def coverage_error(shape: Sequence[int], slices: list[SliceBounds]) -> str | None:
    """Returns why they do not: a slice outside the shape, an overlap, or a gap. None if they do."""
    for bounds in slices:
        if any(stop > size for (_, stop), size in zip(bounds, shape, strict=True)):
            return f"the chunk {format_slice(bounds)} is outside its shape {list(shape)}"
    filled = [bounds for bounds in slices if volume(bounds)]
    if pair := find_overlap(filled):
        return f"the chunks {format_slice(pair[0])} and {format_slice(pair[1])} overlap"
    if sum(map(volume, filled)) < math.prod(shape):
        return f"no chunk covers {format_slice(find_gap(shape, filled))} of its shape {list(shape)}"
    return None


def format_slice(bounds: SliceBounds) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in bounds)}]"


def volume(bounds: Sequence[tuple[int, int]]) -> int:
    return math.prod(stop - start for start, stop in bounds)


def find_overlap(slices: list[SliceBounds]) -> tuple[SliceBounds, SliceBounds] | None:
    """Returns two slices that share an element. Compares each slice with those that start before its end along the
    dimension with the most distinct starts."""
    if len(slices) < 2 or not slices[0]:
        return (slices[0], slices[1]) if len(slices) > 1 else None
    starts, stops = torch.tensor(slices).unbind(-1)
    along = max(range(starts.shape[1]), key=lambda dim: starts[:, dim].unique().numel())
    order = starts[:, along].argsort()
    starts, stops = starts[order], stops[order]
    ends = torch.searchsorted(starts[:, along].contiguous(), stops[:, along].contiguous()).tolist()
    for one, end in enumerate(ends):
        if end > one + 1:
            others = slice(one + 1, end)
            shared = ((starts[one] < stops[others]) & (starts[others] < stops[one])).all(1)
            if shared.any():
                return slices[order[one]], slices[order[one + 1 + int(shared.int().argmax())]]
    return None


def find_gap(shape: Sequence[int], slices: list[SliceBounds]) -> SliceBounds:
    """Returns a region that no slice covers. `slices` do not overlap and have fewer elements than the shape."""
    found = []
    for dim, size in enumerate(shape):
        change: dict[int, int] = defaultdict(int, {0: 0, size: 0})
        for bounds in slices:
            change[bounds[dim][0]] += volume(bounds[dim + 1 :])
            change[bounds[dim][1]] -= volume(bounds[dim + 1 :])
        covered, required = 0, math.prod(shape[dim + 1 :])
        for edges in pairwise(sorted(change)):
            covered += change[edges[0]]
            if covered < required:
                break
        found.append(edges)
        slices = [bounds for bounds in slices if bounds[dim][0] <= edges[0] and edges[1] <= bounds[dim][1]]
    return tuple(found)
