"""The backend "nccl" of `torch.distributed`: Gloo on the memory of the devices."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import constants, is_available

from .. import _device

_NCCL_VERSION = (2, 27, 5)  # what torch.cuda.nccl.version says: that of the CUDA build of torch 2.13


def install() -> None:
    if not is_available():
        return
    from torch.distributed import distributed_c10d

    major, minor, patch = _NCCL_VERSION
    c10d: Any = distributed_c10d
    c10d.ProcessGroupNCCL = _device.ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = constants.default_pg_timeout
    bindings: Any = torch._C
    bindings._nccl_version = lambda: major << 32 | minor << 16 | patch
    bindings._nccl_version_suffix = lambda: b""
