"""Cache of packed weights.

The AMX kernels pack a weight into tile order in each call. For frozen weights the packed copies are kept between calls.
"""

from __future__ import annotations

import torch

from . import _C
from ._grouped_parameters import GroupedParameters
from ._wgrad import WgradModule


def _weights(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    modules = ((name, m) for name, m in module.named_modules() if isinstance(m, WgradModule))
    # Packed copies of grouped weights are not kept.
    return {f"{name}.weight".lstrip("."): m.weight for name, m in modules if not isinstance(m, GroupedParameters)}


def prepack(module: torch.nn.Module, frozen: bool = True) -> torch.nn.Module:
    """Freezes the weights of every `Linear` in ``module`` and keeps their packed copies between calls.

    You guarantee that these weights do not change. After a change, call ``prepack`` again. Until then, a change that
    the weight's version counter records (most optimizers, ``load_state_dict``, any in-place operation) makes the next
    call raise. A change that it does not record (torch's fused optimizers, ``.data``, NumPy, shared memory) goes
    unnoticed: the results are those of the old values.

    Args:
        module: a `Linear`, or any module that contains some.
        frozen: ``False`` unfreezes the weights and drops the packed copies.

    Returns:
        ``module``.

    Example::

        >>> model = torchweft.prepack(model.eval())
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
    """Returns the number of bytes of packed weights that are currently kept."""
    return _C.packed_bytes()


def packing_limit() -> int:
    """Returns the maximum number of bytes of packed weights to keep.

    The default is the environment variable ``WEFT_PACKED_BYTES``, or 1 GiB if it is not set.
    """
    return _C.packing_limit()


def set_packing_limit(limit: int) -> None:
    """Sets the maximum number of bytes of packed weights to keep.

    Frozen weights that do not fit are packed in each call.

    Args:
        limit: number of bytes; 0 keeps no packed weights.
    """
    if not isinstance(limit, int) or limit < 0:
        raise ValueError(f"set_packing_limit: limit is {limit!r}, expected a number of bytes, 0 or more.")
    _C.set_packing_limit(limit)
