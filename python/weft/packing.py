"""Weights in the order the matrix kernels want, kept between calls.

The AMX kernels pack a weight before they multiply by it. From its second use on the copy is kept, and at each use a
checksum over all of the weight decides whether it still holds: a change is seen, whoever made it. A weight that does
not change can be frozen, which saves the checksum.
"""

from __future__ import annotations

import torch

from . import _C
from .grouped import GroupedParameters
from .wgrad import WgradModule


def _weights(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    modules = (m for m in module.modules() if isinstance(m, WgradModule))
    return [m.weight for m in modules if not isinstance(m, GroupedParameters)]  # grouped weights are read in place


def prepack(module: torch.nn.Module, frozen: bool = True) -> torch.nn.Module:
    """Promises that the weights of every `Linear` in ``module`` stay as they are, so that their packed copies are used
    unchecked; with ``frozen=False`` takes the promise back. Returns ``module``.

    Call it again after a change: until then results are those of the old values.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"prepack: got {type(module).__name__}, expected a torch.nn.Module, e.g. a Linear or a model.")
    for weight in _weights(module):
        (_C.freeze if frozen else _C.thaw)(weight.detach())
    return module


def packed_bytes() -> int:
    """Bytes of packed weights kept now."""
    return _C.packed_bytes()


def packing_limit() -> int:
    """Most bytes of packed weights to keep: ``WEFT_PACKED_BYTES`` of the environment, else 1 GiB."""
    return _C.packing_limit()


def set_packing_limit(limit: int) -> None:
    """Sets the most bytes to keep. 0 keeps none: weights are packed in each call."""
    _C.set_packing_limit(limit)
