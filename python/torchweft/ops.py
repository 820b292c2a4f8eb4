"""The operations, with the names of transformer_engine.pytorch.ops."""

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
