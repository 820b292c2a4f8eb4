"""Tensors that lie in files: their shape and dtype are known, any box of them can be read, none is held.

A box is one (start, stop) for each dimension. What `read` gives has the tensor's bytes in an integer type of its size.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .coverage import Box, fault

PIECE = 16 << 20  # bytes that are held at a time
SLAB = 4 << 20  # bytes of one read
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
MOST_DIMS = 64  # of a tensor of torch



class ConversionError(ValueError):
    """A checkpoint that cannot be converted; the text says what to do."""


def whole_numbers(values: Any, what: str) -> tuple[int, ...]:
    """Integers from a file that are sizes, strides or offsets: none below 0, each one that torch can hold."""
    if not isinstance(values, (list, tuple)):
        raise ConversionError(f"{what} is a {type(values).__name__}, expected a list of integers")
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            shown = value if type(value) is int and abs(value) < 1 << 80 else f"a {type(value).__name__}"
            raise ConversionError(f"{what} has {shown}, expected integers from 0 to 2^63 - 1")
    return tuple(values)


def checked_shape(shape: Any, dtype: Any) -> tuple[int, ...]:
    """The shape of a tensor that torch can hold, given by a file."""
    if not isinstance(dtype, torch.dtype):
        raise ConversionError(f"its dtype is a {type(dtype).__name__}, expected a dtype of torch")
    shape = whole_numbers(shape, "its shape")
    if len(shape) > MOST_DIMS or math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 1 << 63:
        raise ConversionError(f"its shape has {len(shape)} dimensions and is larger than a tensor can be")
    return shape


class Lazy:
    """A tensor that is read in boxes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, box: Box) -> torch.Tensor:
        raise NotImplementedError

    def whole(self) -> Box:
        return tuple((0, size) for size in self.shape)

    def tensor(self) -> torch.Tensor:
        """All of it; for small ones."""
        return self.read(self.whole()).view(self.dtype)

    def pieces(self) -> Iterator[tuple[Box, torch.Tensor]]:
        """In row-major order, at most PIECE bytes each."""
        for box in boxes(self.shape, self.dtype.itemsize):
            yield box, self.read(box).contiguous()


def boxes(shape: Sequence[int], itemsize: int, bound: int | None = None) -> Iterator[Box]:
    """Boxes that cover a shape in row-major order, each of at most `bound` bytes (PIECE) and contiguous in it."""
    bound = PIECE if bound is None else bound
    if not shape or math.prod(shape) * itemsize <= bound:
        yield tuple((0, size) for size in shape)
        return
    cut = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) * itemsize <= bound)
    step = max(1, bound // (math.prod(shape[cut + 1 :]) * itemsize))
    for outer in itertools.product(*(range(size) for size in shape[:cut])):
        for start in range(0, shape[cut], step):
            middle = (start, min(start + step, shape[cut]))
            yield (*((i, i + 1) for i in outer), middle, *((0, size) for size in shape[cut + 1 :]))


def sizes(box: Box) -> list[int]:
    return [stop - start for start, stop in box]


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, not copied."""
    if not tensor.numel():
        return memoryview(b"")
    memory = (ctypes.c_ubyte * (tensor.numel() * tensor.itemsize)).from_address(tensor.data_ptr())
    memory.owner = tensor  # the view holds the array, the array the tensor
    return memoryview(memory).cast("B")


class Held(Lazy):
    """A small tensor in memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.held = tensor.contiguous().view(CARRIERS[tensor.dtype.itemsize])

    def read(self, box: Box) -> torch.Tensor:
        return self.held[tuple(slice(*bounds) for bounds in box)]


class InFile(Lazy):
    """Elements of a file from byte `offset` on, with strides. `check` runs once, before the first read."""

    def __init__(
        self,
        path: Path,
        offset: int,
        dtype: torch.dtype,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.path, self.offset, self.dtype, self.shape = path, offset, dtype, checked_shape(shape, dtype)
        self.strides = row_major(self.shape) if strides is None else whole_numbers(strides, "its strides")
        self.check = check
        if len(self.strides) != len(self.shape):
            raise ConversionError(f"it has {len(self.shape)} dimensions and {len(self.strides)} strides")
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        self.stop = offset + (last + 1) * dtype.itemsize if math.prod(self.shape) else offset

    def read(self, box: Box) -> torch.Tensor:
        if self.check:
            self.check()
            self.check = None
        out = torch.empty(sizes(box), dtype=CARRIERS[self.dtype.itemsize])
        with self.path.open("rb", buffering=0) as file:
            self._fill(file.fileno(), [start for start, _ in box], out)
        return out

    def _fill(self, fd: int, starts: list[int], out: torch.Tensor) -> None:
        """Reads the span from the first element to the last and picks; or half by half if that is much more."""
        if not out.numel():
            return
        item = self.dtype.itemsize
        span = item * (1 + sum((size - 1) * stride for size, stride in zip(out.shape, self.strides, strict=True)))
        run = item * (out.shape[-1] if out.dim() and self.strides[-1] == 1 else 1)
        if span <= SLAB and (span <= 4 * out.numel() * item or run < 4096) or out.numel() == 1:
            first = self.offset + item * sum(i * stride for i, stride in zip(starts, self.strides, strict=True))
            buffer = torch.frombuffer(pread(fd, self.path, first, span), dtype=torch.uint8).view(out.dtype)
            out.copy_(buffer.as_strided(out.shape, self.strides))
            return
        cut = max((d for d in range(out.dim()) if out.shape[d] > 1), key=lambda d: self.strides[d])
        half = out.shape[cut] // 2
        self._fill(fd, starts, out.narrow(cut, 0, half))
        later = [start + half * (d == cut) for d, start in enumerate(starts)]
        self._fill(fd, later, out.narrow(cut, half, out.shape[cut] - half))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def pread(fd: int, path: Path, offset: int, length: int) -> bytearray:
    """Exactly `length` bytes."""
    size = os.fstat(fd).st_size
    if offset < 0 or offset + length > size:
        raise ConversionError(
            f"{path} is truncated: it has {size} bytes, up to {offset + length} are needed. Copy it anew"
        )
    buffer, filled = bytearray(length), 0
    view = memoryview(buffer)
    while filled < length:
        count = os.preadv(fd, [view[filled:]], offset + filled)
        if not count:
            raise ConversionError(f"{path} was shortened while it was read")
        filled += count
    return buffer


class Tiled(Lazy):
    """A tensor of several, each at an offset in it, that cover it exactly."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, tiles: list[tuple[tuple[int, ...], Lazy]]) -> None:
        self.shape, self.dtype, self.tiles = checked_shape(shape, dtype), dtype, tiles
        if wrong := {tile.dtype for _, tile in tiles} - {dtype}:
            raise ConversionError(f"it has pieces of {', '.join(map(str, wrong))}, expected {dtype}")
        if any(not len(offset) == len(tile.shape) == len(self.shape) for offset, tile in tiles):
            raise ConversionError(f"a piece of it has another number of dimensions than its shape {list(self.shape)}")
        covered = [
            tuple((at, at + size) for at, size in zip(offset, tile.shape, strict=True)) for offset, tile in tiles
        ]
        if reason := fault(self.shape, covered):
            raise ConversionError(f"{reason}. Copy the checkpoint anew")

    def read(self, box: Box) -> torch.Tensor:
        out = None
        for offset, tile in self.tiles:
            common = [
                (max(start, at), min(stop, at + size))
                for (start, stop), at, size in zip(box, offset, tile.shape, strict=True)
            ]
            if any(start >= stop for start, stop in common):
                continue
            part = tile.read(tuple((start - at, stop - at) for (start, stop), at in zip(common, offset, strict=True)))
            if tuple(common) == box:
                return part
            out = torch.empty(sizes(box), dtype=part.dtype) if out is None else out
            out[tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(common, box, strict=True))] = part
        return torch.empty(sizes(box), dtype=CARRIERS[self.dtype.itemsize]) if out is None else out  # an empty box


class Narrow(Lazy):
    """`length` entries of dimension `dim` from `start` on."""

    def __init__(self, whole: Lazy, dim: int, start: int, length: int) -> None:
        self.source, self.dim, self.start, self.dtype = whole, dim, start, whole.dtype
        self.shape = (*whole.shape[:dim], length, *whole.shape[dim + 1 :])

    def read(self, box: Box) -> torch.Tensor:
        start, stop = box[self.dim]
        moved = (start + self.start, stop + self.start)
        return self.source.read((*box[: self.dim], moved, *box[self.dim + 1 :]))


class Layer(Lazy):
    """Entry `index` of the first dimension, without that dimension."""

    def __init__(self, whole: Lazy, index: int) -> None:
        self.source, self.index, self.dtype, self.shape = whole, index, whole.dtype, whole.shape[1:]

    def read(self, box: Box) -> torch.Tensor:
        return self.source.read(((self.index, self.index + 1), *box)).squeeze(0)


class Lifted(Lazy):
    """The same with a first dimension of 1."""

    def __init__(self, source: Lazy) -> None:
        self.source, self.dtype, self.shape = source, source.dtype, (1, *source.shape)

    def read(self, box: Box) -> torch.Tensor:
        return self.source.read(box[1:]).unsqueeze(0)


def cat(parts: Sequence[Lazy], dim: int) -> Lazy:
    """As torch.cat."""
    if len(parts) == 1:
        return parts[0]
    tiles, at = [], 0
    for part in parts:
        outside = [(*shape[:dim], *shape[dim + 1 :]) for shape in (part.shape, parts[0].shape)]
        if not dim < len(part.shape) == len(parts[0].shape) or outside[0] != outside[1]:
            raise ConversionError(f"parts of shape {list(parts[0].shape)} and {list(part.shape)} do not join in {dim}")
        tiles.append((tuple(at if d == dim else 0 for d in range(len(part.shape))), part))
        at += part.shape[dim]
    first = parts[0].shape
    return Tiled((*first[:dim], at, *first[dim + 1 :]), parts[0].dtype, tiles)


def stack(parts: Sequence[Lazy]) -> Lazy:
    """As torch.stack in dimension 0."""
    return cat([Lifted(part) for part in parts], 0)


def chunk(whole: Lazy, count: int, dim: int) -> list[Lazy]:
    """Equal parts of a dimension that `count` divides."""
    if dim >= len(whole.shape) or whole.shape[dim] % count:
        raise ConversionError(f"dimension {dim} of {list(whole.shape)} does not divide into {count} parts")
    size = whole.shape[dim] // count
    return [Narrow(whole, dim, i * size, size) for i in range(count)] if count > 1 else [whole]


def same(one: Lazy, other: Lazy) -> bool:
    """Equal in dtype, shape and every bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(raw_bytes(piece) == raw_bytes(other.read(box).contiguous()) for box, piece in one.pieces())
