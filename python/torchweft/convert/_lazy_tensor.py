"""Lazy tensors: shape and dtype are known, and any slice can be read from the file on demand.

A slice has one (start, stop) per dimension. `read` returns the tensor's bytes bit-cast to an integer dtype of the same
size.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from ._coverage import SliceBounds, coverage_error

MAX_BLOCK_BYTES = 16 << 20  # bytes in memory at a time
MAX_READ_BYTES = 4 << 20  # bytes per read
BITCAST_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
MAX_DIMS = 64  # torch's limit


class ConversionError(ValueError):
    """A checkpoint is damaged or cannot be converted. The message says what to do."""


def nonnegative_ints(values: Any, what: str) -> tuple[int, ...]:
    """Checks sizes, strides or offsets from a file: integers from 0 to 2^63 - 1."""
    if not isinstance(values, (list, tuple)):
        raise ConversionError(f"{what} is a {type(values).__name__}, expected a list of integers")
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            shown = value if type(value) is int and abs(value) < 1 << 80 else f"a {type(value).__name__}"
            raise ConversionError(f"{what} has {shown}, expected integers from 0 to 2^63 - 1")
    return tuple(values)


def checked_shape(shape: Any, dtype: Any) -> tuple[int, ...]:
    """Checks the shape of a tensor from a file against torch's limits."""
    if not isinstance(dtype, torch.dtype):
        raise ConversionError(f"its dtype is a {type(dtype).__name__}, expected a torch.dtype")
    sizes = nonnegative_ints(shape, "its shape")
    if len(sizes) > MAX_DIMS or math.prod(max(size, 1) for size in sizes) * dtype.itemsize >= 1 << 63:
        raise ConversionError(f"its shape with {len(sizes)} dimensions is larger than a tensor can be")
    return sizes


class LazyTensor:
    """Base class of tensors that are read slice by slice."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, bounds: SliceBounds) -> torch.Tensor:
        raise NotImplementedError

    def full_slice(self) -> SliceBounds:
        return tuple((0, size) for size in self.shape)

    def tensor(self) -> torch.Tensor:
        """Reads the full tensor; for small ones."""
        return self.read(self.full_slice()).view(self.dtype)

    def blocks(self) -> Iterator[tuple[SliceBounds, torch.Tensor]]:
        """Yields the tensor in row-major order, in blocks of at most MAX_BLOCK_BYTES bytes."""
        for bounds in row_major_slices(self.shape, self.dtype.itemsize):
            yield bounds, self.read(bounds).contiguous()

    def write(self, file: IO[bytes], on_write: OnWrite) -> None:
        """Writes the tensor's bytes in row-major order. Calls `on_write` for every block."""
        for _, block in self.blocks():
            view = raw_bytes(block)
            file.write(view)
            on_write(self, view)


OnWrite = Callable[[LazyTensor, memoryview], None]


def row_major_slices(shape: Sequence[int], itemsize: int, bound: int | None = None) -> Iterator[SliceBounds]:
    """Yields contiguous slices of at most `bound` bytes (default: MAX_BLOCK_BYTES) in row-major order."""
    bound = MAX_BLOCK_BYTES if bound is None else bound
    if not shape or math.prod(shape) * itemsize <= bound:
        yield tuple((0, size) for size in shape)
        return
    split_dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) * itemsize <= bound)
    step = max(1, bound // (math.prod(shape[split_dim + 1 :]) * itemsize))
    for outer in itertools.product(*(range(size) for size in shape[:split_dim])):
        for start in range(0, shape[split_dim], step):
            middle = (start, min(start + step, shape[split_dim]))
            yield (*((i, i + 1) for i in outer), middle, *((0, size) for size in shape[split_dim + 1 :]))


def slice_sizes(bounds: SliceBounds) -> list[int]:
    return [stop - start for start, stop in bounds]


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor in row-major order, without a copy if it is contiguous."""
    tensor = tensor.contiguous()
    if not tensor.numel():
        return memoryview(b"")
    memory = (ctypes.c_ubyte * (tensor.numel() * tensor.itemsize)).from_address(tensor.data_ptr())
    vars(memory)["owner"] = tensor  # keeps the tensor alive as long as the view
    return memoryview(memory).cast("B")


class InMemoryTensor(LazyTensor):
    """A small tensor in memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.data = tensor.contiguous().view(BITCAST_DTYPES[tensor.dtype.itemsize])

    def read(self, bounds: SliceBounds) -> torch.Tensor:
        return self.data[tuple(slice(start, stop) for start, stop in bounds)]


class FileTensor(LazyTensor):
    """A strided tensor in a file that starts at byte `offset`. `check` runs once, before the first read."""

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
        self.strides = row_major_strides(self.shape) if strides is None else nonnegative_ints(strides, "its strides")
        self.check = check
        if len(self.strides) != len(self.shape):
            raise ConversionError(f"it has {len(self.shape)} dimensions, but {len(self.strides)} strides")
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        self.stop = offset + (last + 1) * dtype.itemsize if math.prod(self.shape) else offset

    def read(self, bounds: SliceBounds) -> torch.Tensor:
        if self.check:
            self.check()
            self.check = None
        out = torch.empty(slice_sizes(bounds), dtype=BITCAST_DTYPES[self.dtype.itemsize])
        with self.path.open("rb", buffering=0) as file:
            self._fill(file.fileno(), [start for start, _ in bounds], out)
        return out

    def _fill(self, fd: int, starts: list[int], out: torch.Tensor) -> None:
        """Reads the span from the first to the last element and gathers from it, or splits in two if the span is much
        larger than the elements."""
        if not out.numel():
            return
        item = self.dtype.itemsize
        span = item * (1 + sum((size - 1) * stride for size, stride in zip(out.shape, self.strides, strict=True)))
        contiguous_bytes = item * (out.shape[-1] if out.dim() and self.strides[-1] == 1 else 1)
        if span <= MAX_READ_BYTES and (span <= 4 * out.numel() * item or contiguous_bytes < 4096) or out.numel() == 1:
            first = self.offset + item * sum(i * stride for i, stride in zip(starts, self.strides, strict=True))
            buffer = torch.frombuffer(pread(fd, self.path, first, span), dtype=torch.uint8).view(out.dtype)
            out.copy_(buffer.as_strided(out.shape, self.strides))
            return
        split_dim = max((d for d in range(out.dim()) if out.shape[d] > 1), key=lambda d: self.strides[d])
        half = out.shape[split_dim] // 2
        self._fill(fd, starts, out.narrow(split_dim, 0, half))
        later = [start + half * (d == split_dim) for d, start in enumerate(starts)]
        self._fill(fd, later, out.narrow(split_dim, half, out.shape[split_dim] - half))


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def pread(fd: int, path: Path, offset: int, length: int) -> bytearray:
    """Reads exactly `length` bytes."""
    size = os.fstat(fd).st_size
    if offset < 0 or offset + length > size:
        raise ConversionError(
            f"{path} is truncated: it has {size} bytes, expected at least {offset + length}. Copy it again"
        )
    buffer, filled = bytearray(length), 0
    view = memoryview(buffer)
    while filled < length:
        count = os.preadv(fd, [view[filled:]], offset + filled)
        if not count:
            raise ConversionError(f"{path} was truncated while it was read")
        filled += count
    return buffer


class ConcatenatedTensor(LazyTensor):
    """A tensor made of several, each at an offset, which cover it exactly once."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, tensors: Sequence[tuple[tuple[int, ...], LazyTensor]]
    ) -> None:
        self.shape, self.dtype, self.tensors = checked_shape(shape, dtype), dtype, tensors
        if wrong := {tensor.dtype for _, tensor in tensors} - {dtype}:
            raise ConversionError(f"it has chunks of {', '.join(map(str, wrong))}, expected {dtype}")
        if any(not len(offset) == len(tensor.shape) == len(self.shape) for offset, tensor in tensors):
            raise ConversionError(f"a chunk has another number of dimensions than its shape {list(self.shape)}")
        covered = [
            tuple((begin, begin + size) for begin, size in zip(offset, tensor.shape, strict=True))
            for offset, tensor in tensors
        ]
        if reason := coverage_error(self.shape, covered):
            raise ConversionError(f"{reason}. Copy the checkpoint again")

    def read(self, bounds: SliceBounds) -> torch.Tensor:
        out = None
        for offset, tensor in self.tensors:
            shared = [
                (max(start, begin), min(stop, begin + size))
                for (start, stop), begin, size in zip(bounds, offset, tensor.shape, strict=True)
            ]
            if any(start >= stop for start, stop in shared):
                continue
            part = tensor.read(
                tuple((start - begin, stop - begin) for (start, stop), begin in zip(shared, offset, strict=True))
            )
            if tuple(shared) == bounds:
                return part
            out = torch.empty(slice_sizes(bounds), dtype=part.dtype) if out is None else out
            out[tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(shared, bounds, strict=True))] = part
        if out is None:  # an empty slice
            return torch.empty(slice_sizes(bounds), dtype=BITCAST_DTYPES[self.dtype.itemsize])
        return out


class NarrowedTensor(LazyTensor):
    """As torch.narrow: `length` entries of dimension `dim`, starting at `start`."""

    def __init__(self, source: LazyTensor, dim: int, start: int, length: int) -> None:
        self.source, self.dim, self.start, self.dtype = source, dim, start, source.dtype
        self.shape = (*source.shape[:dim], length, *source.shape[dim + 1 :])

    def read(self, bounds: SliceBounds) -> torch.Tensor:
        start, stop = bounds[self.dim]
        shifted = (start + self.start, stop + self.start)
        return self.source.read((*bounds[: self.dim], shifted, *bounds[self.dim + 1 :]))


class SelectedTensor(LazyTensor):
    """As torch.select in dimension 0."""

    def __init__(self, source: LazyTensor, index: int) -> None:
        self.source, self.index, self.dtype, self.shape = source, index, source.dtype, source.shape[1:]

    def read(self, bounds: SliceBounds) -> torch.Tensor:
        return self.source.read(((self.index, self.index + 1), *bounds)).squeeze(0)


class UnsqueezedTensor(LazyTensor):
    """As torch.unsqueeze in dimension 0."""

    def __init__(self, source: LazyTensor) -> None:
        self.source, self.dtype, self.shape = source, source.dtype, (1, *source.shape)

    def read(self, bounds: SliceBounds) -> torch.Tensor:
        return self.source.read(bounds[1:]).unsqueeze(0)


def cat(parts: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """As torch.cat."""
    if len(parts) == 1:
        return parts[0]
    tensors, offset = [], 0
    for part in parts:
        outside = [(*shape[:dim], *shape[dim + 1 :]) for shape in (part.shape, parts[0].shape)]
        if not dim < len(part.shape) == len(parts[0].shape) or outside[0] != outside[1]:
            raise ConversionError(
                f"shards of shapes {list(parts[0].shape)} and {list(part.shape)} cannot be concatenated in dimension "
                f"{dim}"
            )
        tensors.append((tuple(offset if d == dim else 0 for d in range(len(part.shape))), part))
        offset += part.shape[dim]
    first = parts[0].shape
    return ConcatenatedTensor((*first[:dim], offset, *first[dim + 1 :]), parts[0].dtype, tensors)


def stack(parts: Sequence[LazyTensor]) -> LazyTensor:
    """As torch.stack in dimension 0."""
    return cat([UnsqueezedTensor(part) for part in parts], 0)


def chunk(source: LazyTensor, count: int, dim: int) -> list[LazyTensor]:
    """As torch.chunk, for a dimension that `count` divides."""
    if dim >= len(source.shape) or source.shape[dim] % count:
        raise ConversionError(f"dimension {dim} of {list(source.shape)} does not divide into {count} equal parts")
    size = source.shape[dim] // count
    return [NarrowedTensor(source, dim, i * size, size) for i in range(count)] if count > 1 else [source]


def bitwise_equal(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether dtype, shape and every bit are equal."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(raw_bytes(block) == raw_bytes(other.read(bounds).contiguous()) for bounds, block in one.blocks())
