"""weft fuses transformer blocks on CPUs: a sequence of operations runs as one pipeline, forward and backward."""

import torch

__version__ = "0.1.0"

if not torch.__version__.startswith("2.13."):
    raise ImportError(
        f"weft {__version__} requires torch 2.13, found torch {torch.__version__}. "
        "Install a matching torch: pip install 'torch==2.13.*'"
    )

from . import _C, checkpoint, fusion, ops
from ._ddp import MainGradNotReducedWarning
from ._explain import explain
from ._grouped_parameters import deinterleave_glu, interleave_glu
from ._packing import packed_bytes, packing_limit, prepack, set_packing_limit
from ._rng import RNGStatesTracker
from ._userbuffers import destroy_ub, initialize_ub
from .ops import Sequential

__all__ = [
    "MainGradNotReducedWarning",
    "RNGStatesTracker",
    "checkpoint",
    "Sequential",
    "deinterleave_glu",
    "destroy_ub",
    "explain",
    "fusion",
    "initialize_ub",
    "interleave_glu",
    "ops",
    "packed_bytes",
    "packing_limit",
    "prepack",
    "set_packing_limit",
]
