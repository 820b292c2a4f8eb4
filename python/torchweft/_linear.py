"""Linear: a GEMM and a bias, with the Parameter names of torch.nn.Linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from . import _C
from ._arguments import check_device, checked_arguments
from ._docstrings import add_args
from ._native import NativeOperation, initialize, native_classes, on_meta
from ._operation import FusedOperation, FusibleOperation
from ._process_groups import named_group, resolve_parallel
from ._wgrad import WgradModule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def _field(name: str, mutable: bool = False) -> property:
    def get(self: Linear) -> Any:
        return self._fields[name]

    def set(self: Linear, value: Any) -> None:
        self._set_fields(self._fields | {name: value})

    return property(get, set if mutable else None, doc=f"The argument `{name}`.")


class Linear(WgradModule, FusedOperation):
    """Applies an affine transformation: y = x Wᵀ + b.

    A pipeline sees its component operations: `BasicLinear`, `Bias`, and in row mode a reduction over ranks. The
    Parameters are registered once, on this module; the components read them from here.

    Attributes:
        weight: ``(out_features, in_features)``, initially uniform in ±1/√in_features. Over p ranks column mode divides
            the first dimension by p, row mode the second.
        bias: ``(out_features)``, divided by p in column mode, initially zeros; None with ``bias=False``.

    Shape:
        - Input: ``(*, in_features)``; in row mode over p ranks ``(*, in_features / p)``.
        - Output: ``(*, out_features)``; in column mode over p ranks ``(*, out_features / p)``.

    Example::

        >>> linear = torchweft.ops.Linear(256, 1024)
        >>> linear(torch.randn(8, 256)).shape
        torch.Size([8, 1024])
    """

    _tracker: Callable[[], Any] | None
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    _fields: dict[str, Any]

    @checked_arguments
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: ProcessGroup | DeviceMesh | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        delay_wgrad_compute: bool = False,
        replicated_bias: bool = False,
        overlap: bool | None = None,
        userbuffers_options: dict[str, Any] | None = None,
        te_keys: bool = False,
    ) -> None:
        FusibleOperation.__init__(self)
        self.te_keys = te_keys
        check_device("Linear", device)
        if not isinstance(userbuffers_options, dict | None):
            raise TypeError(
                f"Linear: userbuffers_options is {userbuffers_options!r}, expected a dict such as "
                "{'comm_name': 'fc1'} or None."
            )
        fields: dict[str, Any] = {
            "in_features": in_features,
            "out_features": out_features,
            "bias": bool(bias),
            "dtype": dtype or torch.get_default_dtype(),
            "tensor_parallel_mode": tensor_parallel_mode,
            "tensor_parallel_group": tensor_parallel_group,
            "sequence_parallel": sequence_parallel,
            "accumulate_into_main_grad": accumulate_into_main_grad,
            "delay_wgrad_compute": delay_wgrad_compute,
            "replicated_bias": bool(replicated_bias),
            "overlap": overlap,
            "userbuffers_options": None if userbuffers_options is None else userbuffers_options.get("comm_name", ""),
        }
        resolve_parallel("Linear", fields)
        object.__setattr__(self, "_tracker", rng_state_tracker_function)
        object.__setattr__(self, "_fields", fields)
        self._update_description()
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        for component in self._stages():
            for name, shape, dtype_, *_ in component._description().params():
                self.register_parameter(name, torch.nn.Parameter(torch.empty(shape, dtype=dtype_, device=device)))
        if on_meta(self):
            self._mark_weight()
        else:
            self.reset_parameters()

    # Fields of the full layer, over all ranks.
    in_features = _field("in_features")
    out_features = _field("out_features")
    tensor_parallel_mode = _field("tensor_parallel_mode")
    tensor_parallel_size = _field("tensor_parallel_size")
    sequence_parallel = _field("sequence_parallel")
    replicated_bias = _field("replicated_bias")

    @property
    def tensor_parallel_group(self) -> Any:
        """The ProcessGroup over which the layer is sharded; None without tensor parallelism."""
        return named_group(self._fields["tensor_parallel_group"])

    @property
    def basic_ops(self) -> torch.nn.ModuleList:  # type: ignore[override]
        """The component operations in order. They read the Parameters of this module."""
        components = self.__dict__.get("_components")
        if components is None or components[0]._owner is not self or components[0]._parameters is not self._parameters:
            components = torch.nn.ModuleList([self._make_component(op) for op in _C.linear_ops(self._fields)])
            object.__setattr__(self, "_components", components)
        return components

    def _set_fields(self, fields: dict[str, Any]) -> None:
        _C.linear_ops(fields)  # raises before anything changes
        object.__setattr__(self, "_fields", fields)
        self.__dict__.pop("_components", None)
        self._update_description()

    def _fields_text(self) -> str:
        return str(self._fields)

    def _make_component(self, op: _C.Op) -> NativeOperation:
        cls = native_classes[op.name]
        component = cls.__new__(cls)
        torch.nn.Module.__init__(component)
        for key, value in (("_op", op), ("_tracker", self._tracker), ("_owner", self), ("_is_component", True)):
            object.__setattr__(component, key, value)
        component.__dict__["_parameters"] = self._parameters
        return component

    accumulate_into_main_grad = _field("accumulate_into_main_grad", mutable=True)
    delay_wgrad_compute = _field("delay_wgrad_compute", mutable=True)
    overlap = _field("overlap", mutable=True)

    def _wgrad_op(self) -> NativeOperation:
        return cast("NativeOperation", self.basic_ops[0])

    def __setattr__(self, name: str, value: Any) -> None:
        if (
            name == "bias"
            and value is not None
            and "bias" in self.__dict__.get("_parameters", {})
            and not self._fields["bias"]
        ):
            raise ValueError(
                "Linear: cannot assign a bias to a Linear created with bias=False. Create it with bias=True."
            )
        super().__setattr__(name, value)

    def reset_parameters(self, device: torch.device | str | None = None) -> None:
        """Initializes the Parameters, on ``device`` if given. Parameters on the meta device are allocated there, or on
        torch's default device."""
        for component in self._stages():
            initialize(self, component._description(), device, self._tracker)
        self._mark_weight()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._update_description()

    def _materialize(self, device: torch.device) -> None:
        for component in self._stages():
            initialize(self, component._description(), device, self._tracker, only_meta=True)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self._fields['bias']}"
        if self.tensor_parallel_mode is not None:
            text += f", tensor_parallel_mode={self.tensor_parallel_mode!r}, ranks={self.tensor_parallel_size}"
            text += f", sequence_parallel={self.sequence_parallel}"
        return text

    # ---- state_dict keys ------------------------------------------------------------------------------------------

    def _te_names(self) -> dict[str, str]:
        # The bias has the same key in every parallel mode.
        return {"weight": "basic_ops.0.weight"} | ({"bias": "basic_ops.1.bias"} if self._fields["bias"] else {})

    def _te_op_prefixes(self) -> list[str]:
        return [f"basic_ops.{i}." for i in range(len(self.basic_ops))]


add_args(
    Linear,
    native_classes["BasicLinear"]._descriptions
    | _C.linear_descriptions()
    | {
        "te_keys": "Write Transformer Engine's ``state_dict`` keys (``basic_ops.0.weight``, ``basic_ops.1.bias`` and "
        "an empty ``_extra_state`` per component) instead of ``weight`` and ``bias``; both kinds of keys load.",
    },
)
