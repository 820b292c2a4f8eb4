"""Linear: a GEMM and a bias, with the Parameter names of torch.nn.Linear."""

from __future__ import annotations

from typing import Any

import torch

from . import _C
from ._arguments import check_device, checked_arguments
from ._native import NativeOperation, initialize, native_classes, on_meta
from ._operation import FusedOperation, FusibleOperation
from ._process_groups import named_group, resolve_parallel
from ._wgrad import WgradModule


def _gemm_field(name: str) -> property:
    def get(self: Linear) -> Any:
        return self._component_specs[0][1][name]

    def set(self: Linear, value: Any) -> None:
        self._component_specs[0][1][name] = value
        self.__dict__.pop("_components", None)
        self._description_version += 1

    return property(get, set)


def _full_field(name: str) -> property:
    def get(self: Linear) -> Any:
        return self._full_fields[name]

    return property(get)


def _divide_evenly(what: str, total: int, ranks: int) -> int:
    if total % ranks:
        raise ValueError(f"Linear: {what} {total} does not divide over {ranks} ranks.")
    return total // ranks


def _component_specs_of(gemm: dict[str, Any], bias: bool, replicated_bias: bool) -> list[tuple[str, dict[str, Any]]]:
    """Returns type and fields of the operations that a Linear consists of. `gemm` has the fields of the full layer.

    mode None, column       BasicLinear, Bias
    mode row                BasicLinear of this rank's features, Bias, reduction over ranks
    mode row, replicated    BasicLinear of this rank's features, reduction over ranks, Bias
    """
    group, ranks = gemm["tensor_parallel_group"], gemm["tensor_parallel_size"]
    row, scattered = gemm["tensor_parallel_mode"] == "row", gemm["sequence_parallel"]
    fields = {"size": gemm["out_features"], "dtype": gemm["dtype"]}
    fields |= {"tensor_parallel_group": group, "tensor_parallel_size": ranks}
    if not row:
        specs = [("BasicLinear", gemm), ("Bias", fields | {"tensor_parallel": ranks > 1})]
        return specs if bias else specs[:1]

    features = gemm["in_features"]
    gemm = gemm | {"in_features": _divide_evenly("in_features", features, ranks), "fan_in": features}
    gemm |= {"tensor_parallel_mode": None, "tensor_parallel_group": None, "sequence_parallel": False}
    reduction: tuple[str, dict[str, Any]]
    reduction = ("AllReduce", {"process_group": group, "process_group_size": ranks, "reduce_in_backward": False})
    if scattered:
        reduction = ("ReduceScatter", {"process_group": group, "process_group_size": ranks})
    if not bias:
        return [("BasicLinear", gemm), reduction]
    if replicated_bias:
        return [("BasicLinear", gemm), reduction, ("Bias", fields | {"sequence_parallel": scattered})]
    own = fields | {"size": ranks * gemm["out_features"], "tensor_parallel": True}
    return [("BasicLinear", gemm), ("Bias", own), reduction]


class Linear(WgradModule, FusedOperation):
    """Applies an affine transformation: y = x Wᵀ + b.

    A pipeline sees its component operations: `BasicLinear`, `Bias`, and in row mode a reduction over ranks. The
    Parameters are registered once, on this module; the components read them from here.

    Args:
        in_features: size of the last dimension of the input, over all ranks.
        out_features: size of the last dimension of the output, over all ranks.
        bias: add a bias.
        device: device of the Parameters.
        dtype: dtype of the Parameters; torch's default dtype if None.
        tensor_parallel_mode: ``"column"`` shards the output features over the ranks of the group, ``"row"`` the input
            features. None: no tensor parallelism.
        tensor_parallel_group: a ProcessGroup, a 1-D DeviceMesh, or None for the default group.
        sequence_parallel: the input of a column linear and the output of a row linear are sharded by their first
            dimension: a column linear all-gathers its input, a row linear reduce-scatters its output.
        rng_state_tracker_function: returns the :class:`weft.RNGStatesTracker` from which the weight is initialized.
        accumulate_into_main_grad: the GEMM adds the weight gradient to ``weight.main_grad``.
        delay_wgrad_compute: compute the weight gradient in :meth:`backward_dw` instead of in backward.
        replicated_bias: row mode only. By default each rank has its own bias and the biases are summed with the output.
            With True all ranks hold the same bias, added after the reduction, and training matches a single process.
        overlap: overlap tensor-parallel communication with the GEMMs. None: where it is predicted to be faster.
        userbuffers_options: Transformer Engine's options for overlap; only ``"comm_name"`` is used.
        te_keys: ``state_dict`` writes Transformer Engine's keys (``basic_ops.0.weight``, ``basic_ops.1.bias`` and an
            empty ``_extra_state`` per component) instead of ``weight`` and ``bias``. Both kinds of keys load.

    Shape:
        - Input: ``(*, in_features)``; in row mode over p ranks ``(*, in_features / p)``.
        - Output: ``(*, out_features)``; in column mode over p ranks ``(*, out_features / p)``.

    Example::

        >>> linear = weft.ops.Linear(256, 1024)
        >>> linear(torch.randn(8, 256)).shape
        torch.Size([8, 1024])
    """

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

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
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Any = None,
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
        gemm: dict[str, Any] = {
            "in_features": in_features,
            "out_features": out_features,
            "dtype": dtype or torch.get_default_dtype(),
            "tensor_parallel_mode": tensor_parallel_mode,
            "tensor_parallel_group": tensor_parallel_group,
            "sequence_parallel": sequence_parallel,
            "accumulate_into_main_grad": accumulate_into_main_grad,
            "delay_wgrad_compute": delay_wgrad_compute,
            "overlap": overlap,
            "userbuffers_options": None if userbuffers_options is None else userbuffers_options.get("comm_name", ""),
        }
        resolve_parallel("Linear", gemm)
        components = [_C.make_op(*spec) for spec in _component_specs_of(gemm, bias, replicated_bias)]
        object.__setattr__(self, "_component_specs", [(op.name, op.fields()) for op in components])
        object.__setattr__(self, "_tracker", rng_state_tracker_function)
        object.__setattr__(self, "_full_fields", gemm | {"replicated_bias": replicated_bias})
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        for op in components:
            for name, shape, dtype_, *_ in op.params():
                self._parameters[name] = torch.nn.Parameter(torch.empty(shape, dtype=dtype_, device=device))
        if on_meta(self):
            self._mark_weight()
        else:
            self.reset_parameters()

    # Fields of the full layer, over all ranks.
    in_features = _full_field("in_features")
    out_features = _full_field("out_features")
    tensor_parallel_mode = _full_field("tensor_parallel_mode")
    tensor_parallel_size = _full_field("tensor_parallel_size")
    sequence_parallel = _full_field("sequence_parallel")
    replicated_bias = _full_field("replicated_bias")

    @property
    def tensor_parallel_group(self) -> Any:
        """The ProcessGroup over which the layer is sharded; None without tensor parallelism."""
        return named_group(self._full_fields["tensor_parallel_group"])

    @property
    def basic_ops(self) -> torch.nn.ModuleList:
        """The component operations in order. They read the Parameters of this module."""
        components = self.__dict__.get("_components")
        if components is None or components[0]._owner is not self or components[0]._parameters is not self._parameters:
            components = torch.nn.ModuleList(
                [self._make_component(name, fields) for name, fields in self._component_specs]
            )
            object.__setattr__(self, "_components", components)
        return components

    def _make_component(self, name: str, fields: dict[str, Any]) -> NativeOperation:
        cls = native_classes[name]
        component = cls.__new__(cls)
        torch.nn.Module.__init__(component)
        for key, value in (
            ("_op", _C.make_op(name, fields)),
            ("_tracker", self._tracker),
            ("_owner", self),
        ):
            object.__setattr__(component, key, value)
        component.__dict__["_parameters"] = self._parameters
        return component

    accumulate_into_main_grad = _gemm_field("accumulate_into_main_grad")
    delay_wgrad_compute = _gemm_field("delay_wgrad_compute")
    overlap = _gemm_field("overlap")

    def _wgrad_op(self) -> NativeOperation:
        return self.basic_ops[0]

    def __setattr__(self, name: str, value: Any) -> None:
        if (
            name == "bias"
            and value is not None
            and "bias" in self.__dict__.get("_parameters", {})
            and not self._has_bias()
        ):
            raise ValueError(
                "Linear: cannot assign a bias to a Linear created with bias=False. Create it with bias=True."
            )
        super().__setattr__(name, value)

    def _has_bias(self) -> bool:
        return any(name == "Bias" for name, _ in self._component_specs)

    def reset_parameters(self, device: torch.device | str | None = None) -> None:
        """Initializes the Parameters, on ``device`` if given. Parameters on the meta device are allocated there, or on
        torch's default device."""
        for component in self.basic_ops:
            initialize(self, component._op, device, self._tracker)
        self._mark_weight()

    def _materialize(self, device: torch.device) -> None:
        for component in self.basic_ops:
            initialize(self, component._op, device, self._tracker, only_meta=True)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self._has_bias()}"
        if self.tensor_parallel_mode is not None:
            text += f", tensor_parallel_mode={self.tensor_parallel_mode!r}, ranks={self.tensor_parallel_size}"
            text += f", sequence_parallel={self.sequence_parallel}"
        return text

    # ---- state_dict keys ------------------------------------------------------------------------------------------

    def _te_names(self) -> dict[str, str]:
        # The bias has the same key in every parallel mode.
        return {"weight": "basic_ops.0.weight"} | ({"bias": "basic_ops.1.bias"} if self._has_bias() else {})

    def _te_op_prefixes(self) -> list[str]:
        return [f"basic_ops.{i}." for i in range(len(self._component_specs))]
