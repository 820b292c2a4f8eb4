"""state_dict keys: the names of a module's Parameters, or Transformer Engine's keys."""

from __future__ import annotations

import re
from typing import Any

import torch

from . import _delayed_scaling

_EXTRA_STATE = re.compile(r"(basic_ops\.\d+\.)?_extra_state")


class StateKeys(torch.nn.Module):
    """A module whose ``state_dict`` has the names of ``named_parameters``, or with `te_keys` Transformer Engine's keys.

    For example, the weight of a Linear is ``weight``, and with `te_keys` ``basic_ops.0.weight``. Both kinds of keys
    load, regardless of `te_keys`. `_extra_state` is the state of delayed scaling, if there is one; Transformer Engine's
    loads, too. With `te_keys` its keys are written, empty. A subclass that defines ``get_extra_state`` and
    ``set_extra_state`` saves and loads its own extra state, as in torch.
    """

    te_keys: bool = False
    _has_delayed_scaling = False  # whether delayed scaling has a state for its weight

    def _te_names(self) -> dict[str, str]:
        """Returns {Parameter name: Transformer Engine's key}, for the keys that differ."""
        return {}

    def _te_op_prefixes(self) -> list[str]:
        """Returns the key prefixes of the operations that have an `_extra_state` in Transformer Engine."""
        return []

    def _is_read_by_child(self, key: str, prefix: str) -> bool:
        """Whether the `_extra_state` with this key is that of a module in this one."""
        path = key.removeprefix(prefix).rpartition(".")[0]
        return bool(path) and any(name == path for name, _ in self.named_modules())

    def _holds_part_of_weight(self, state_dict: dict[str, Any], prefix: str) -> bool:
        """Whether the weight in a state_dict has fewer rows than this module's, and could be one of several."""
        own, given = getattr(self, "weight", None), state_dict.get(prefix + "weight")
        return (
            isinstance(own, torch.Tensor)
            and isinstance(given, torch.Tensor)
            and (own.dim(), given.dim()) == (2, 2)
            and len(given) < len(own)
            and given.shape[1] == own.shape[1]
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (scaling := _delayed_scaling.save(self)) is not None:
            destination.setdefault(prefix + "_extra_state", scaling)
        if not self.te_keys:
            return
        for name, key in self._te_names().items():
            if prefix + name in destination:
                destination[prefix + key] = destination.pop(prefix + name)
        for op_prefix in self._te_op_prefixes():
            destination.setdefault(f"{prefix}{op_prefix}_extra_state", torch.empty(0, dtype=torch.uint8))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        has_own_state = type(self).set_extra_state is not torch.nn.Module.set_extra_state
        read = prefix + "_extra_state" if has_own_state else None  # the key of the state that is read
        if not has_own_state and self._has_delayed_scaling:
            # Weft's key, and Transformer Engine's of the operation that has the weight.
            keys = [key for key in (f"{prefix}_extra_state", f"{prefix}basic_ops.0._extra_state") if key in state_dict]
            for key in sorted(keys, key=lambda key: _delayed_scaling.is_empty(state_dict[key]))[:1]:
                _delayed_scaling.load(self, state_dict[key], key)
                read = key
        local: dict[str, Any] = {}
        for key, value in state_dict.items():
            is_extra_state = key.startswith(prefix) and _EXTRA_STATE.fullmatch(key, len(prefix))
            if not is_extra_state or (has_own_state and key == read):
                local[key] = value
            elif key != read and not _delayed_scaling.is_empty(value) and not self._is_read_by_child(key, prefix):
                _delayed_scaling.warn_ignored(key, f"{type(self).__name__} has no such state")
        for name, key in self._te_names().items():
            if prefix + key in local and prefix + name not in local:
                local[prefix + name] = local.pop(prefix + key)
        super()._load_from_state_dict(local, prefix, *args)
        if self._holds_part_of_weight(local, prefix):
            error_msgs: list[str] = args[-1]
            error_msgs.append(
                f"{prefix}weight: if it is that of query, key and value, which the checkpoint has one by one, "
                "concatenate them: torch.cat([q, k, v]). A DotProductAttention after it then needs "
                "qkv_layout='concatenated'."
            )
