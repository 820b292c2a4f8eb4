"""Linear: a product and a bias under the names that PyTorch users know."""

from __future__ import annotations

from typing import Any

import torch

from . import _C
from .native import NativeOperation, forgive_extra_state, initialize, native_classes
from .operation import FusedOperation, FusibleOperation
from .wgrad import WgradModule


def _product_field(name: str) -> property:
    def get(self: Linear) -> bool:
        return self._part_specs[0][1][name]

    def set(self: Linear, value: bool) -> None:
        self._part_specs[0][1][name] = value
        self.__dict__.pop("_parts", None)
        self._edition += 1

    return property(get, set)


class Linear(WgradModule, FusedOperation):
    """y = x Wᵀ + b.

    A pipeline sees its parts, `BasicLinear` and `Bias`. The Parameters `weight` and `bias` are registered here, once;
    the parts read the same ones. `state_dict` uses the keys of the parts (`basic_ops.0.weight`, …); `torch.nn.Linear`'s
    `weight` and `bias` load as well.

    `accumulate_into_main_grad` and `delay_wgrad_compute` are those of `BasicLinear`; see `WgradModule`.
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        FusibleOperation.__init__(self)
        product = native_classes["BasicLinear"](
            in_features,
            out_features,
            device="meta",
            dtype=dtype,
            tensor_parallel_mode=tensor_parallel_mode,
            tensor_parallel_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
            delay_wgrad_compute=delay_wgrad_compute,
        )
        parts: list[NativeOperation] = [product]
        if bias:
            parts.append(native_classes["Bias"](out_features, device="meta", dtype=dtype))
        object.__setattr__(self, "_part_specs", [(part._type, part._op.fields()) for part in parts])
        object.__setattr__(self, "_tracker", rng_state_tracker_function)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        for part in parts:
            for name, shape, dtype_, _ in part._op.params():
                self._parameters[name] = torch.nn.Parameter(torch.empty(shape, dtype=dtype_, device=device))
        self.reset_parameters()

    @property
    def basic_ops(self) -> torch.nn.ModuleList:
        parts = self.__dict__.get("_parts")
        if parts is None or parts[0]._parameters is not self._parameters:
            parts = torch.nn.ModuleList([self._part(name, fields) for name, fields in self._part_specs])
            object.__setattr__(self, "_parts", parts)
        return parts

    def _part(self, name: str, fields: dict[str, Any]) -> NativeOperation:
        cls = native_classes[name]
        part = cls.__new__(cls)
        torch.nn.Module.__init__(part)
        for key, value in (
            ("_op", _C.make_op(name, fields)),
            ("_group", None),
            ("_tracker", self._tracker),
            ("_owner", self),
        ):
            object.__setattr__(part, key, value)
        part.__dict__["_parameters"] = self._parameters
        return part

    accumulate_into_main_grad = _product_field("accumulate_into_main_grad")
    delay_wgrad_compute = _product_field("delay_wgrad_compute")

    def _product(self) -> NativeOperation:
        return self.basic_ops[0]

    @property
    def in_features(self) -> int:
        return self._part_specs[0][1]["in_features"]

    @property
    def out_features(self) -> int:
        return self._part_specs[0][1]["out_features"]

    def __setattr__(self, name: str, value: Any) -> None:
        if (
            name == "bias"
            and value is not None
            and "bias" in self.__dict__.get("_parameters", {})
            and not self._has_bias()
        ):
            raise ValueError("Linear was made with bias=False; it takes no bias.")
        super().__setattr__(name, value)

    def _has_bias(self) -> bool:
        return len(self._part_specs) > 1

    def reset_parameters(self, device: torch.device | str | None = None) -> None:
        for part in self.basic_ops:
            initialize(self, part._op, device, self._tracker)
        self._mark_weight()

    def _materialize(self, device: torch.device) -> None:
        for part in self.basic_ops:
            initialize(self, part._op, device, self._tracker, only_meta=True)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._has_bias()}"

    # ---- checkpoints: the reference's keys ------------------------------------------------------------------------

    def _keys(self) -> dict[str, str]:
        """Parameter name → key of the part that uses it."""
        return {
            name: f"basic_ops.{i}.{name}" for i, part in enumerate(self.basic_ops) for name, *_ in part._op.params()
        }

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, key in self._keys().items():
            if prefix + name in destination:
                destination[prefix + key] = destination.pop(prefix + name)
        for i, part in enumerate(self.basic_ops):
            destination[f"{prefix}basic_ops.{i}._extra_state"] = part.get_extra_state()

    def _load_from_state_dict(
        self, state_dict, prefix, metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        local = dict(state_dict)
        for i in range(len(self.basic_ops)):
            local.pop(f"{prefix}basic_ops.{i}._extra_state", None)
        for name, key in self._keys().items():
            if prefix + key in local:
                local[prefix + name] = local.pop(prefix + key)
        missing: list[str] = []
        torch.nn.Module._load_from_state_dict(
            self, local, prefix, metadata, strict, missing, unexpected_keys, error_msgs
        )
        keys = self._keys()
        missing_keys.extend(prefix + keys.get(key.removeprefix(prefix), key.removeprefix(prefix)) for key in missing)
        forgive_extra_state(prefix, missing_keys)
