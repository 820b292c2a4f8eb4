"""weft fuses transformer blocks on CPUs: a sequence of operations runs as one pipeline, forward and backward."""

import torch

# Its default arguments are the default group at the time of import. Imported after init_process_group, as by the first
# optimizer, they keep that group and its threads until the process exits, where such a thread may abort the process.
import torch.distributed.nn.functional

from . import _built_with

__version__ = _built_with.VERSION

if torch.__version__.split(".")[:2] != _built_with.TORCH.split(".")[:2]:  # the C++ ABI is stable within a minor version
    raise ImportError(
        f"weft {__version__} was built with torch {_built_with.TORCH}, found torch {torch.__version__}; rebuild weft "
        "from its source folder with `pip install --no-build-isolation --force-reinstall --no-deps .`, or install "
        f"`torch=={_built_with.TORCH}`."
    )

from . import _C, checkpoint, fusion, ops, optim, quantization, recipe
from ._autocast import autocast
from ._ddp import MainGradNotReducedWarning
from ._explain import Explanation, explain
from ._grouped_parameters import deinterleave_glu, interleave_glu
from ._packing import packed_bytes, packing_limit, prepack, set_packing_limit
from ._recompute import recompute_contexts
from ._rng import RNGStatesTracker
from ._userbuffers import destroy_ub, initialize_ub
from .ops import Sequential

__all__ = [
    "Explanation",
    "MainGradNotReducedWarning",
    "RNGStatesTracker",
    "autocast",
    "checkpoint",
    "Sequential",
    "deinterleave_glu",
    "destroy_ub",
    "explain",
    "fusion",
    "initialize_ub",
    "interleave_glu",
    "ops",
    "optim",
    "packed_bytes",
    "packing_limit",
    "prepack",
    "quantization",
    "recipe",
    "recompute_contexts",
    "set_packing_limit",
]
