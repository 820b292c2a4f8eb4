"""Packed copies of weights that do not change.

The AMX kernels pack a weight into an order of their own before they multiply by it, in each call. For frozen weights
the packed copies are kept between calls.
"""

from __future__ import annotations

import torch

from . import _C
from ._grouped_parameters import GroupedParameters
from ._wgrad import WgradModule


def _weights(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    modules = ((name, m) for name, m in module.named_modules() if isinstance(m, WgradModule))
    # Grouped weights are read in place.
    return {f"{name}.weight".lstrip("."): m.weight for name, m in modules if not isinstance(m, GroupedParameters)}


def prepack(module: torch.nn.Module, frozen: bool = True) -> torch.nn.Module:
    """Freezes the weights of every `Linear` in ``module``: their packed copies are kept between calls.

    You guarantee that the weights do not change. After a change call ``prepack`` again. Until then a change that the
    weight's version counter records (most optimizers, ``load_state_dict``, any in-place operation) makes the next call
    raise; one that it does not record (fused optimizers, ``.data``, numpy, shared memory) goes unnoticed, and results
    are those of the old values.

    Args:
        module: a `Linear`, or any module that contains some.
        frozen: ``False`` ends the guarantee and drops the copies.

    Returns:
        ``module``.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"prepack: got {type(module).__name__}, expected a torch.nn.Module, e.g. a Linear or a model.")
    for name, weight in _weights(module).items():
        if frozen:
            _C.freeze(weight.detach(), name)
        else:
            _C.unfreeze(weight.detach())
    return module


def packed_bytes() -> int:
    """Bytes of packed weights kept now."""
    return _C.packed_bytes()


def packing_limit() -> int:
    """Most bytes of packed weights to keep: ``WEFT_PACKED_BYTES`` of the environment, else 1 GiB."""
    return _C.packing_limit()


def set_packing_limit(limit: int) -> None:
    """Sets the most bytes to keep. Frozen weights that do not fit are packed in each call; 0 keeps none."""
    _C.set_packing_limit(limit)
