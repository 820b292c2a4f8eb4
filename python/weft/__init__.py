"""weft: sequences of small transformer operations, fused and differentiated as one pipeline."""

import torch

__version__ = "0.1.0"

from ._built_with import TORCH as _built_with_torch

if torch.__version__.split(".")[:2] != _built_with_torch.split(".")[:2]:  # the C++ ABI holds within a minor version
    raise ImportError(
        f"weft {__version__} was built with torch {_built_with_torch}, found torch {torch.__version__}; rebuild weft "
        "from its source folder with `pip install --no-build-isolation --force-reinstall --no-deps .`, or install "
        f"`torch=={_built_with_torch}`."
    )

from . import _C, checkpoint, ops
from .ddp import MainGradNotReducedWarning
from .explain import explain
from .grouped import deinterleave_glu, interleave_glu
from .ops import Sequential
from .packing import packed_bytes, packing_limit, prepack, set_packing_limit
from .rng import RNGStatesTracker
from .userbuffers import destroy_ub, initialize_ub

__all__ = [
    "MainGradNotReducedWarning",
    "RNGStatesTracker",
    "checkpoint",
    "Sequential",
    "deinterleave_glu",
    "destroy_ub",
    "explain",
    "initialize_ub",
    "interleave_glu",
    "ops",
    "packed_bytes",
    "packing_limit",
    "prepack",
    "set_packing_limit",
]
