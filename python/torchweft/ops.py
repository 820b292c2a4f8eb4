"""The operations, with the names of transformer_engine.pytorch.ops."""

from typing import NoReturn as _NoReturn

import torch as _torch

from . import _C
from ._linear import Linear
from ._native import native_classes
from ._operation import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from ._sequential import Sequential
from .fusion import (
    FusionHandle,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)

globals().update(native_classes)

__all__ = [
    "BasicOperation",
    "FusedOperation",
    "FusibleOperation",
    "FusionHandle",
    "Linear",
    "OperationContext",
    "Sequential",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
    *native_classes,
]


def __getattr__(name: str) -> _NoReturn:
    cure = _C.did_you_mean(name, __all__)
    if not name.startswith("_") and hasattr(_torch.nn, name):
        cure = f" Use torch.nn.{name}: a torchweft.Sequential takes other modules, too."
    raise AttributeError(f"torchweft.ops has no operation {name!r}.{cure}", name=name)
