"""`fused_weight_gradient_mlp_cuda`, Apex's compiled module. With it Megatron-core adds the weight gradients of its own
linears to `main_grad` (`gradient_accumulation_fusion`)."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import torch

NAME = "fused_weight_gradient_mlp_cuda"


def add_weight_gradient(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad += dyᵀ x"""
    rows, grads = x.flatten(0, -2), dy.flatten(0, -2)
    main_grad.addmm_(grads.t().to(main_grad.dtype), rows.to(main_grad.dtype))


def provide() -> None:
    """Makes the module importable, unless Apex is installed."""
    if NAME in sys.modules or importlib.util.find_spec(NAME) is not None:
        return
    module = ModuleType(NAME, __doc__)
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = add_weight_gradient  # type: ignore[attr-defined]
    sys.modules[NAME] = module
