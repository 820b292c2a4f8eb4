"""Warns when DistributedDataParallel wraps modules whose weight gradients it does not reduce.

DistributedDataParallel reduces ``.grad``. A module with `accumulate_into_main_grad` adds its weight gradients to
``main_grad``, so each rank would keep only its local gradients.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel


class MainGradNotReducedWarning(UserWarning):
    """DistributedDataParallel does not reduce the ``main_grad`` of the weights named in the message."""


def main_grad_names(module: torch.nn.Module) -> list[str]:
    """Returns the names of the Parameters in `module` whose gradients go to ``main_grad``."""
    # weft modules with weights define `_main_grad_parameters`; for others, `list` returns an empty list.
    found = {id(param) for child in module.modules() for param in getattr(child, "_main_grad_parameters", list)()}
    return [name for name, param in module.named_parameters() if id(param) in found and param.requires_grad]


def _warn_if_wrapped_by_ddp(parent: torch.nn.Module, name: str, module: Any) -> None:
    """Module-registration hook: torch calls it whenever a module becomes a child of another."""
    if not isinstance(parent, DistributedDataParallel) or name != "module":
        return
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    names = [found for found in main_grad_names(module) if found not in ignored]
    if not names:
        return
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    warnings.warn(
        f"DistributedDataParallel reduces .grad, but the gradients of {listed} go to main_grad "
        "(accumulate_into_main_grad, fuse_wgrad_accumulation) and are not reduced. Turn the option off, or all-reduce "
        "main_grad after backward and silence this warning: "
        "warnings.simplefilter('ignore', torchweft.MainGradNotReducedWarning).",
        MainGradNotReducedWarning,
        stacklevel=4,  # the line that creates the DistributedDataParallel
    )


register_module_module_registration_hook(_warn_if_wrapped_by_ddp)
