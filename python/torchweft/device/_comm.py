"""`torch._C._broadcast` and the other functions below `torch.nn.parallel`, which a build of torch for the CPU lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensors = Sequence[torch.Tensor]


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(torch.device("cuda", device)) for device in devices)


def _broadcast_out(tensor: torch.Tensor, out: Tensors) -> Tensors:
    for t in out:
        t.copy_(tensor)
    return out


def _broadcast_coalesced(tensors: Tensors, devices: Sequence[int], buffer_size: int) -> list[list[torch.Tensor]]:
    return [[tensor.to(torch.device("cuda", device)) for tensor in tensors] for device in devices]


def _scatter(
    tensor: torch.Tensor, devices: Sequence[int], chunk_sizes: Sequence[int] | None, dim: int, streams: Any = None
) -> tuple[torch.Tensor, ...]:
    chunks = tensor.split(list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(devices), dim)
    return tuple(chunk.to(torch.device("cuda", device)) for chunk, device in zip(chunks, devices, strict=False))


def _scatter_out(tensor: torch.Tensor, out: Tensors, dim: int, streams: Any = None) -> Tensors:
    for t, chunk in zip(out, tensor.split([t.size(dim) for t in out], dim), strict=True):
        t.copy_(chunk)
    return out


def _gather(tensors: Tensors, dim: int, destination: int | None) -> torch.Tensor:
    index = torch.cuda.current_device() if destination is None else destination
    place = torch.device("cpu") if index == -1 else torch.device("cuda", index)
    return torch.cat([tensor.to(place) for tensor in tensors], dim)


def _gather_out(tensors: Tensors, out: torch.Tensor, dim: int) -> torch.Tensor:
    return out.copy_(torch.cat([tensor.to(out.device) for tensor in tensors], dim))


def install() -> None:
    for function in (
        _broadcast,
        _broadcast_out,
        _broadcast_coalesced,
        _scatter,
        _scatter_out,
        _gather,
        _gather_out,
    ):
        setattr(torch._C, function.__name__, function)
