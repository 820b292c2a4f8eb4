"""Python classes for the operations registered in C++.

Each class is generated from one entry of the registry: its keyword arguments are the fields of the operation, its
Parameters those that the operation declares.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from . import _C
from ._arguments import bind, check_device
from ._dispatcher import give_handle
from ._docstrings import CONVERTED_TYPES, PYTHON_ARGUMENTS, native_docstring
from ._grouped_parameters import GroupedParameters
from ._operation import BasicOperation
from ._process_groups import GROUP_FIELDS, group_name_and_size, is_dtensor, named_group, resolve_parallel
from ._wgrad import WgradModule

_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}
# Fields computed from other arguments; users do not pass them.
_DERIVED = {"tensor_parallel_size", "process_group_size", "fan_in"}
_ASSUMED_LAYOUT = (
    "DotProductAttention: qkv_layout is not given; assuming 'group_interleaved' (for each group its query heads, key "
    "and value, as Megatron's linear_qkv writes them). Pass it, or pass 'concatenated' for torch.cat([q, k, v], -1)."
)


class NativeOperation(BasicOperation):
    """An operation computed in C++. It holds the operation's description and its Parameters."""

    _native = True
    _written_in_python = False
    _type: str
    _op: _C.Op
    _tracker: Callable[[], Any] | None
    _descriptions: dict[str, str]  # of its arguments
    _optional_parameters: frozenset[str] = frozenset()  # Parameters that a field of the same name turns off
    _arguments: inspect.Signature  # what `__init__` takes
    __signature__: inspect.Signature | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        defining = next(base for base in cls.__mro__ if not {"__signature__", "__init__"}.isdisjoint(base.__dict__))
        if "__signature__" not in defining.__dict__:
            cls.__signature__ = None  # the subclass has its own `__init__`, which inspect.signature then reads
        for name in ("op_forward", "op_backward", "fuser_forward", "fuser_backward"):
            if name in cls.__dict__:
                raise TypeError(
                    f"{cls.__name__}.{name} would never be called: {cls.__mro__[1].__name__} is computed in C++. "
                    "Subclass torchweft.ops.BasicOperation to write an operation in Python."
                )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        arguments = bind(type(self).__name__, self._arguments, args, kwargs)
        if self._type == "DotProductAttention" and "qkv_layout" not in kwargs and arguments["num_attention_heads"] != 1:
            warnings.warn(_ASSUMED_LAYOUT, stacklevel=2)
        device = arguments.pop("device", None)
        check_device(type(self).__name__, device)
        tracker = arguments.pop("rng_state_tracker_function", None)
        object.__setattr__(self, "te_keys", arguments.pop("te_keys"))
        if "dtype" in arguments:
            arguments["dtype"] = arguments["dtype"] or torch.get_default_dtype()
        if isinstance(arguments.get("sm_margin"), dict):  # Transformer Engine's option per stage; unused on CPUs
            arguments["sm_margin"] = max(arguments["sm_margin"].values(), default=0)
        resolve_parallel(type(self).__name__, arguments)
        object.__setattr__(self, "_tracker", tracker)
        object.__setattr__(self, "_op", _C.make_op(self._type, {k: _to_cpp_value(v) for k, v in arguments.items()}))
        self._update_description()
        self._make_parameters(device)

    @property
    def num_extra_inputs(self) -> int:  # type: ignore[override]
        """Number of extra inputs."""
        return self._op.extra_inputs

    @property
    def num_extra_outputs(self) -> int:  # type: ignore[override]
        """Number of extra outputs."""
        return self._op.extra_outputs

    def _description(self) -> _C.Op:
        return self._op

    def _fields_text(self) -> str:
        return str(self._op.fields())

    def _parameter_slots(self) -> list[tuple[torch.nn.Module, str]]:
        owner = self.__dict__.get("_owner", self)  # a component of Linear reads Linear's Parameters
        return [(owner, name) for name, *_ in self._op.params()]

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Adds a Parameter, as in :class:`torch.nn.Module`. Raises ValueError for one that a field turned off."""
        if param is not None and name in self._optional_parameters and name not in (p[0] for p in self._op.params()):
            raise ValueError(
                f"{type(self).__name__}: cannot assign a {name}, because it was created with {name}=False. Create it "
                f"with {name}=True."
            )
        super().register_parameter(name, param)

    def _make_parameters(self, device: torch.device | str | None) -> None:
        for name, shape, dtype, *_ in self._op.params():
            self.register_parameter(name, torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))
        for name in self._optional_parameters - self._parameters.keys():
            self.register_parameter(name, None)
        if not on_meta(self):
            self.reset_parameters()

    def reset_parameters(self, device: torch.device | str | None = None) -> None:
        """Initializes the Parameters, on ``device`` if given. Parameters on the meta device are allocated there, or on
        torch's default device."""
        initialize(self, self._op, device, self._tracker)

    def _materialize(self, device: torch.device) -> None:
        initialize(self, self._op, device, self._tracker, only_meta=True)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_op"] = self._op.fields()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        fields = state.pop("_op")
        super().__setstate__(state)
        object.__setattr__(self, "_op", _C.make_op(self._type, fields))
        self._update_description()

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeOperation:
        import copy

        other = type(self).__new__(type(self))
        memo[id(self)] = other
        state = self.__getstate__()
        keep: dict[str, Any] = {key: state.pop(key) for key in ("_op", "_tracker") if key in state}
        other.__setstate__({**copy.deepcopy(state, memo), **keep})
        return other

    def extra_repr(self) -> str:
        return repr(self._op).partition("(")[2][:-1]


def on_meta(module: torch.nn.Module) -> bool:
    """Whether `module` itself (not its children) has a Parameter on the meta device."""
    return any(param is not None and param.is_meta for param in module._parameters.values())


def default_device(param: torch.Tensor) -> torch.device:
    """Returns the device on which a Parameter is initialized: its own, or torch's default device if it is on the meta
    device. A sharded Parameter (DTensor) stays on the meta device until ``to_empty``, as FSDP2 requires."""
    return torch.get_default_device() if param.is_meta and not is_dtensor(param) else param.device


def empty_parameter_on(param: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    """Returns an uninitialized Parameter on `device` with the attributes of `param`."""
    other = torch.nn.Parameter(torch.empty_like(param, device=device), requires_grad=param.requires_grad)
    other.__dict__.update(param.__dict__)
    if other.__dict__.pop("_main_grad_handle", None) is not None:
        give_handle(other)
    return other


def initialize(
    module: torch.nn.Module,
    op: _C.Op,
    device: torch.device | str | None,
    tracker: Callable[[], Any] | None,
    only_meta: bool = False,
) -> None:
    """Initializes the Parameters of `op` that `module` holds, and moves them to `device` if given. Parameters on the
    meta device are allocated on `device`, or on torch's default device."""
    for name, _, _, init, fan_in, main_grad in op.params():
        param = module._parameters.get(name)
        if param is None or (only_meta and param.device.type != "meta"):
            continue
        target = default_device(param) if device is None else torch.device(device)
        if param.device != target:
            param = empty_parameter_on(param, target)
        if not param.is_meta:
            weights = param.detach() if main_grad and param.dim() == 3 else [param.detach()]  # 3-D: one per group
            for weight in weights:
                with tracker().fork() if tracker is not None else nullcontext():
                    _fill(weight, init, fan_in)
        module._parameters[name] = param  # assigned once it has values: other threads may read it


def _fill(weight: torch.Tensor, init: str, fan_in: int) -> None:
    if init == "fan_in_uniform":
        bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
        weight.uniform_(-bound, bound)
    else:
        weight.fill_(1.0 if init == "ones" else 0.0)


def _to_cpp_value(value: Any) -> Any:
    """Converts an argument for C++: a userbuffers_options dict becomes its comm_name."""
    return value.get("comm_name", "") if isinstance(value, dict) else value


def _field_property(name: str) -> property:
    def get(self: NativeOperation) -> Any:
        value = self._op.fields()[name]
        if name in GROUP_FIELDS:
            return named_group(value)
        return _DTYPES.get(value, value) if name == "dtype" else value

    def set(self: NativeOperation, value: Any) -> None:
        fields = {**self._op.fields(), name: _to_cpp_value(value)}
        if name in GROUP_FIELDS:
            fields[name], fields[GROUP_FIELDS[name]] = group_name_and_size(type(self).__name__, value)
        object.__setattr__(self, "_op", _C.make_op(self._type, fields))
        self._update_description()

    return property(get, set)


def _signature(fields: list[tuple[str, Any, str, str, str]], params: list[Any]) -> inspect.Signature:
    kinds = inspect.Parameter
    parameters = []

    def add_python_argument(name: str, default: Any) -> None:
        parameters.append(kinds(name, kinds.KEYWORD_ONLY, default=default, annotation=PYTHON_ARGUMENTS[name][0]))

    for field, default, param_kind, annotation, _ in fields:
        if field in _DERIVED:
            continue
        kind = kinds.KEYWORD_ONLY if param_kind == "keyword" else kinds.POSITIONAL_OR_KEYWORD
        default = kinds.empty if param_kind == "required" else None if field == "dtype" else default
        annotation = CONVERTED_TYPES.get(field, annotation)
        parameters.append(kinds(field, kind, default=default, annotation=annotation))
    if params:
        add_python_argument("device", None)
    if any(main_grad for *_, main_grad in params) or any(field == "tensor_parallel_mode" for field, *_ in fields):
        add_python_argument("rng_state_tracker_function", None)
    add_python_argument("te_keys", False)
    return inspect.Signature(parameters)


def make_class(
    name: str, doc: dict[str, str], fields: list[tuple[str, Any, str, str, str]], sample: _C.Op
) -> type[NativeOperation]:
    """Makes the Python class of a registered operation. `sample` is an instance from which its Parameters are read."""
    # A field named like a method of torch.nn.Module (Quantize's `forward`) or like a Parameter gets no property.
    parameter_names = {param.rstrip("0123456789") for param, *_ in sample.params()}
    members: dict[str, Any] = {
        field: _field_property(field)
        for field, *_ in fields
        if not hasattr(NativeOperation, field) and field not in parameter_names
    }
    signature = _signature(fields, sample.params())
    descriptions = {field: text for field, *_, text in fields} | {k: text for k, (_, text) in PYTHON_ARGUMENTS.items()}
    members |= {
        "__doc__": native_docstring(name, doc, signature, descriptions, sample),
        "__module__": "torchweft.ops",
        "__signature__": signature,
        "_arguments": signature,
        "_type": name,
        "_descriptions": descriptions,
        "_optional_parameters": frozenset(field for field, *_ in fields if field in parameter_names),
    }
    mixins = {"num_groups": GroupedParameters, "delay_wgrad_compute": WgradModule}
    bases = tuple(mixin for key, mixin in mixins.items() if any(field == key for field, *_ in fields))
    return type(name, (*bases, NativeOperation), members)


native_classes: dict[str, type[NativeOperation]] = {row[0]: make_class(*row) for row in _C.op_types()}
