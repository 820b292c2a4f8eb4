"""Converts checkpoints of Megatron and Transformer Engine to and from safetensors with torch's names, on any machine.

``python -m torchweft.convert SOURCE TARGET --to safetensors``, or ``convert(source, target, to="safetensors")``.
Tensors are read and written in blocks of bounded size, and nothing in a file is executed. See docs/convert.md.
"""

from ._check import compare, inspect, verify
from ._convert import convert
from ._lazy_tensor import ConversionError

__all__ = ["ConversionError", "compare", "convert", "inspect", "verify"]
