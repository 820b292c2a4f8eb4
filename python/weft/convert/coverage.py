"""Whether boxes cover a shape exactly once. A box is one (start, stop) for each dimension."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import torch

Box = tuple[tuple[int, int], ...]


def fault(shape: Sequence[int], boxes: list[Box]) -> str | None:
    """Why they do not: a box that leaves the shape, two that overlap, or a hole. None if they do."""
    for box in boxes:
        if any(stop > size for (_, stop), size in zip(box, shape, strict=True)):
            return f"the piece {shown(box)} lies outside of its shape {list(shape)}"
    filled = [box for box in boxes if volume(box)]
    if pair := overlap(filled):
        return f"the pieces {shown(pair[0])} and {shown(pair[1])} overlap"
    if sum(map(volume, filled)) < math.prod(shape):
        return f"no piece covers {shown(hole(shape, filled))} of its shape {list(shape)}"
    return None


def shown(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def volume(box: Sequence[tuple[int, int]]) -> int:
    return math.prod(stop - start for start, stop in box)


def overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Two that share an element; each box is compared with those that begin before it ends in one dimension."""
    if len(boxes) < 2 or not boxes[0]:
        return (boxes[0], boxes[1]) if len(boxes) > 1 else None
    starts, stops = torch.tensor(boxes).unbind(-1)
    along = max(range(starts.shape[1]), key=lambda dim: starts[:, dim].unique().numel())
    order = starts[:, along].argsort()
    starts, stops = starts[order], stops[order]
    ends = torch.searchsorted(starts[:, along].contiguous(), stops[:, along].contiguous()).tolist()
    for one, end in enumerate(ends):
        if end > one + 1:
            others = slice(one + 1, end)
            shared = ((starts[one] < stops[others]) & (starts[others] < stops[one])).all(1)
            if shared.any():
                return boxes[order[one]], boxes[order[one + 1 + int(shared.int().argmax())]]
    return None


def hole(shape: Sequence[int], boxes: list[Box]) -> Box:
    """A box that none of `boxes`, which do not overlap and are too few, touches."""
    found = []
    for dim, size in enumerate(shape):
        change: dict[int, int] = defaultdict(int, {0: 0, size: 0})
        for box in boxes:
            change[box[dim][0]] += volume(box[dim + 1 :])
            change[box[dim][1]] -= volume(box[dim + 1 :])
        covered, wanted = 0, math.prod(shape[dim + 1 :])
        for edges in pairwise(sorted(change)):
            covered += change[edges[0]]
            if covered < wanted:
                break
        found.append(edges)
        boxes = [box for box in boxes if box[dim][0] <= edges[0] and edges[1] <= box[dim][1]]
    return tuple(found)
