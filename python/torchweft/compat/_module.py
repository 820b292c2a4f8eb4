"""Base of the module classes: Parameters with Transformer Engine's names, read by pipelines of weft's operations."""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from threading import Lock
from types import MappingProxyType
from typing import Any, cast

import torch

from .. import _delayed_scaling, _dispatcher, ops
from .._arguments import argument_names, checked_arguments, reject_unknown
from .._autocast import active, called_in_backward
from .._native import default_device, empty_parameter_on, on_meta
from .._weight_copies import WeightCopies
from . import _recipes

# Arguments about names and about GPU buffers and kernels: accepted, without effect on the result.
_IGNORED_ARGUMENTS = {
    "bias_dropout_fusion", "micro_batch_size", "name", "rng_tracker_name", "save_original_input", "seq_length",
    "symmetric_ar_type", "ub_atomic_gemm_ag", "ub_atomic_gemm_rs", "ub_bulk_dgrad", "ub_bulk_wgrad", "ub_name",
    "ub_overlap_ag", "ub_overlap_ag_dgrad", "ub_overlap_ag_fprop", "ub_overlap_rs", "ub_overlap_rs_dgrad",
    "ub_overlap_rs_fprop", "ub_tp_comm_overlap", "use_grouped_tensor",
}  # fmt: skip

_BUILD_LOCK = Lock()  # threads that call a new module at the same time build it once

NORMS = {"LayerNorm": ops.LayerNorm, "RMSNorm": ops.RMSNorm}


def reject_unknown_arguments(owner: Any, arguments: dict[str, Any]) -> None:
    """Raises TypeError for an argument that Transformer Engine does not have."""
    for name in arguments:
        if name not in _IGNORED_ARGUMENTS:
            reject_unknown(type(owner).__name__, name, argument_names(inspect.signature(type(owner).__init__)))


def normal_init(weight: torch.Tensor) -> torch.Tensor:
    """Transformer Engine's default initialization: normal, standard deviation 0.023."""
    return torch.nn.init.normal_(weight, mean=0.0, std=0.023)


class EmptyExtraState(torch.nn.Module):
    """A module whose state_dict has an empty tensor `_extra_state`, and which loads without it."""

    def get_extra_state(self) -> torch.Tensor:
        """Returns an empty tensor."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Ignores the state; with a warning if it is not empty."""
        if not _delayed_scaling.is_empty(state):
            name = type(self).__name__
            _delayed_scaling.warn_ignored(f"_extra_state of {name}", f"{name} has no such state")

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing_keys: list[str], *rest: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing_keys, *rest)
        if prefix + "_extra_state" in missing_keys:
            missing_keys.remove(prefix + "_extra_state")


@cache
def _with_parameters_of_owner(cls: type[torch.nn.Module], names: tuple[tuple[str, str], ...]) -> type[torch.nn.Module]:
    """Returns a subclass that reads its Parameters from `_parameter_owner`; `names` has pairs (own name, owner's)."""

    def parameter_of_owner(name: str) -> property:
        return property(lambda self: getattr(self._parameter_owner, name))

    return type(
        cls.__name__, (cls,), {"__module__": cls.__module__} | {own: parameter_of_owner(name) for own, name in names}
    )


class BoundSequential:
    """A Sequential whose operations read the Parameters of `owner` in each call and hold none themselves. A call writes
    nothing, so threads may share it."""

    def __init__(self, owner: torch.nn.Module) -> None:
        self.owner = owner
        self.sequential = ops.Sequential()
        self.sequential._label = type(owner).__name__

    def add(self, op: torch.nn.Module, **parameters: str) -> None:
        """Appends an operation. `parameters` maps its Parameter names to those of the owner."""
        if parameters:
            op.__class__ = _with_parameters_of_owner(cast("Any", type(op)), tuple(parameters.items()))
            op.__dict__["_parameter_owner"] = self.owner
            op.__dict__["_parameter_names"] = parameters
            op._parameters.clear()
        self.sequential.append(op)

    def extend(self, other: BoundSequential) -> None:
        self.sequential.extend(other.sequential)


def _init_groups(init: Callable[[torch.Tensor], Any], weights: torch.Tensor) -> None:
    for weight in weights:
        init(weight)


class CompatModule(EmptyExtraState):
    """Base of Transformer Engine's module classes. Subclasses declare Parameters with `_declare` and build their
    pipelines in `_build`.

    The pipelines are not submodules and hold no Parameters: ``state_dict``, ``.to()``, FSDP and replaced Parameters
    involve this module only.
    """

    # Frameworks read these before they write or read a checkpoint of grouped linears, which have no state.
    fp8 = fp8_calibration = False
    save_original_input = False  # frameworks set it; what is saved does not change
    fp8_meta: Mapping[str, Any] = MappingProxyType({"fp8_checkpoint": False})
    # Of subclasses with a norm.
    layer_norm_weight: torch.nn.Parameter
    normalization: str
    eps: float
    zero_centered_gamma: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = checked_arguments(cls.__init__)  # type: ignore[method-assign]

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Does nothing: the state of delayed scaling is created when it is used."""

    def _setup(
        self,
        *,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        tp_group: Any,
        tp_size: int,
        get_rng_state_tracker: Callable[[], Any] | None,
        params_dtype: torch.dtype | None,
        device: Any,
        delay_wgrad_compute: bool,
        unused: dict[str, Any],
    ) -> None:
        reject_unknown_arguments(self, unused)
        torch.nn.Module.__init__(self)
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.get_rng_state_tracker = get_rng_state_tracker
        self.rng_tracker_name = unused.get("rng_tracker_name")
        self.ub_name = unused.get("ub_name")
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.device = device
        self._inits: dict[str, Callable[[torch.Tensor], Any]] = {}
        self._parameter_attributes: dict[str, dict[str, Any]] = {}
        self._weights: list[str] = []
        self._wgrad_hooks: list[Callable[[], Any]] = []
        self._delayed_overwrites: deque[bool] = deque()  # one per backward whose weight gradients are pending
        self._saved_overwrite_flags: list[tuple[Any, Any]] = []  # weights and their previous flag
        self._weight_copies = WeightCopies(*(active.model_init or ()))
        self.primary_weights_in_fp8 = self._weight_copies.recipe is not None

    # ---- state of delayed scaling ---------------------------------------------------------------------------------

    def get_extra_state(self) -> torch.Tensor:
        """Returns the state of delayed scaling as one float32 tensor; an empty tensor without one."""
        scales = self._weight_copies.rounding_scales(self._scaled_weights)
        state = _delayed_scaling.save(self, self._scaled_weights, scales)
        return super().get_extra_state() if state is None else state

    def set_extra_state(self, state: Any) -> None:
        """Loads what :meth:`get_extra_state` returned, or Transformer Engine's state of delayed scaling, of which
        nothing is executed. Scales start at 1 after an empty or, with a warning, unreadable state."""
        if not self._scaled_weights:
            super().set_extra_state(state)
            return
        key = f"_extra_state of {type(self).__name__}"
        scales = _delayed_scaling.load(self, state, key, self._scaled_weights, self._te_linears())
        self._weight_copies.set_rounding_scales(self._scaled_weights, scales)

    @property
    def _scaled_weights(self) -> list[str]:
        """Weights of linears, for which delayed scaling has a state."""
        return self._weights

    def _te_linears(self) -> int:
        """Returns the number of linears in Transformer Engine."""
        return len(self._weights)

    # ---- parameters -----------------------------------------------------------------------------------------------

    def _declare(
        self, name: str, shape: tuple[int, ...], init: Callable[[torch.Tensor], Any], **attributes: Any
    ) -> None:
        """Registers a Parameter with its initialization and the attributes that frameworks read from it."""
        self.register_parameter(
            name, torch.nn.Parameter(torch.empty(shape, dtype=self.params_dtype, device=self.device))
        )
        self._inits[name], self._parameter_attributes[name] = init, attributes

    def _declare_weight(
        self, name: str, shape: tuple[int, ...], init: Callable[[torch.Tensor], Any] | None, mode: str | None
    ) -> None:
        """Registers a weight [out, in], or the weights [groups, out, in] of all groups, initialized one by one."""
        attributes: dict[str, Any] = {}
        if mode is not None:
            attributes = {
                "tensor_model_parallel": True,
                "partition_dim": len(shape) - (1 if mode == "row" else 2),
                "partition_stride": 1,
            }
        if self.delay_wgrad_compute:
            attributes["skip_backward_post_hook"] = True
        init_one = init or normal_init
        init_all = functools.partial(_init_groups, init_one) if len(shape) == 3 else init_one
        self._declare(name, shape, init_all, **attributes)
        self._weights.append(name)

    def _declare_bias(self, name: str, shape: tuple[int, ...], mode: str | None, enabled: bool = True) -> None:
        """Registers a bias [out], or the biases [groups, out] of all groups, initialized with zeros; if not enabled,
        the attribute is an empty tensor."""
        if not enabled:
            setattr(self, name, torch.empty(0, dtype=self.params_dtype))
            return
        attributes: dict[str, Any] = {"sequence_parallel": self.sequence_parallel} if mode == "row" else {}
        if mode == "column":
            attributes = {"tensor_model_parallel": True, "partition_dim": len(shape) - 1, "partition_stride": 1}
        self._declare(name, shape, torch.nn.init.zeros_, **attributes)

    def _declare_norm(self, kind: str, size: int, zero_centered_gamma: bool) -> None:
        if kind not in NORMS:
            raise ValueError(f"{type(self).__name__}: normalization is {kind!r}, expected {' or '.join(NORMS)}.")
        gamma_init = torch.nn.init.zeros_ if zero_centered_gamma else torch.nn.init.ones_
        self._declare("layer_norm_weight", (size,), gamma_init, sequence_parallel=self.sequence_parallel)
        if kind == "LayerNorm":
            self._declare("layer_norm_bias", (size,), torch.nn.init.zeros_, sequence_parallel=self.sequence_parallel)
        else:
            self.register_parameter("layer_norm_bias", None)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initializes the Parameters; those on the meta device are allocated on torch's default device.

        Args:
            defer_init: only set the attributes of the Parameters; do not initialize or allocate them.
        """
        for name, init in self._inits.items():
            param = self.get_parameter(name)
            if not defer_init:
                param = self._initialize_parameter(name, default_device(param), init)
            for attribute, value in self._parameter_attributes[name].items():
                setattr(param, attribute, value)
        self._round_weights()

    def _materialize(self, device: torch.device) -> None:
        """Allocates and initializes the Parameters that are still on the meta device."""
        if not on_meta(self):
            return
        with _BUILD_LOCK:
            for name, param in self._parameters.items():
                if param is not None and param.is_meta:
                    self._initialize_parameter(name, device, self._inits[name])

    def _initialize_parameter(
        self, name: str, device: torch.device, init: Callable[[torch.Tensor], Any]
    ) -> torch.nn.Parameter:
        """Initializes a Parameter on `device`. If it moves, the new one is assigned after it has values."""
        param = self.get_parameter(name)
        if param.device != device:
            param = empty_parameter_on(param, device)
        if not param.is_meta:
            tracker = self.get_rng_state_tracker if name in self._weights else None
            states = () if self.rng_tracker_name is None else (self.rng_tracker_name,)
            with tracker().fork(*states) if tracker is not None else nullcontext(), torch.no_grad():
                init(param.detach())
            if name in self._weights:
                self._weight_copies.preserve(name, param)
        self._parameters[name] = param
        return param

    # ---- pipelines ------------------------------------------------------------------------------------------------

    def _build(self) -> Any:
        """Builds the pipelines that forward runs."""
        raise NotImplementedError

    def _round_weights(self) -> None:
        """Sets quantized Parameters that have changed to the values of their copies."""
        if self.primary_weights_in_fp8:
            self._weight_copies.round_parameters(self, self._weights)

    def _quantized_weights(self, first: bool | None) -> AbstractContextManager[None]:
        """The region of a call in which the linears multiply by weights that this module has quantized, if any."""
        has_copies = self.primary_weights_in_fp8 or first is not None
        if not has_copies or active.recipe is None or torch.compiler.is_compiling():
            return nullcontext()
        return self._weight_copies.used_by(self, self._scaled_weights, first)

    def _get_pipelines(self, input: torch.Tensor) -> Any:
        if input.device.type != "meta":
            self._materialize(input.device)
        self._round_weights()
        # Not during backward, where this is a recomputation.
        if self._saved_overwrite_flags and not called_in_backward():
            self._end_overwrite()
        # A replica has the attributes of its original.
        if torch.compiler.is_compiling() or self.__dict__.get("_built_for") != id(self):
            self._build_once()
        return self._built

    @_dispatcher.evaluated_when_traced
    def _build_once(self) -> None:
        self._check_group()
        with _BUILD_LOCK:
            if self.__dict__.get("_built_for") == id(self):
                return
            self._wgrad_ops: list[Any] = []
            with _recipes.quantized_model_init(enabled=False):  # operations hold no Parameters
                object.__setattr__(self, "_built", self._build())
            object.__setattr__(self, "_built_for", id(self))

    def _check_group(self) -> None:
        if self.tp_size > 1 and self.tp_group is None and self._needs_group():
            raise RuntimeError(
                f"{type(self).__name__}: tp_size is {self.tp_size}, but tp_group is None. Pass tp_group, or call "
                "set_tensor_parallel_group(group) before forward."
            )

    def _needs_group(self) -> bool:
        return False

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Sets the tensor-parallel process group."""
        self.tp_group = tp_group
        for name in ("_built", "_built_for"):
            self.__dict__.pop(name, None)

    def _norm(self) -> tuple[torch.nn.Module, dict[str, str]]:
        options: dict[str, Any] = {"eps": self.eps, "zero_centered_gamma": self.zero_centered_gamma}
        norm = NORMS[self.normalization](
            self.layer_norm_weight.shape, device="meta", dtype=self.params_dtype, **options
        )
        names = {"weight": "layer_norm_weight", "bias": "layer_norm_bias"}
        return norm, {name: own for name, own in names.items() if name in norm._parameters}

    def _add_linear(
        self, pipeline: BoundSequential, features: tuple[int, int], mode: str | None, weight: str, bias: str | None
    ) -> None:
        """Appends y = x Wᵀ [+ b] with this module's tensor parallelism and weight-gradient options. `features` are the
        input and output features over all ranks. The bias of a row linear is replicated and added after the reduction;
        the caller reduces its gradient."""
        parallel: dict[str, Any] = {}
        if mode is not None and self.tp_size > 1:
            parallel = {"tensor_parallel_mode": mode, "tensor_parallel_group": self.tp_group}
            parallel["sequence_parallel"] = self.sequence_parallel
        linear = ops.BasicLinear(
            *features,
            device="meta",
            dtype=self.params_dtype,
            accumulate_into_main_grad=self.fuse_wgrad_accumulation,
            delay_wgrad_compute=self.delay_wgrad_compute,
            **parallel,
        )
        self._wgrad_ops.append(linear)
        pipeline.add(linear, weight=weight)
        if bias is not None:
            size = getattr(self, bias).numel()
            pipeline.add(ops.Bias(size, device="meta", dtype=self.params_dtype), bias=bias)

    def __getstate__(self) -> dict[str, Any]:
        built = ("_built", "_built_for", "_wgrad_ops")
        return {name: value for name, value in self.__dict__.items() if name not in built} | {
            "_wgrad_hooks": [],
            "_delayed_overwrites": deque(),
            "_saved_overwrite_flags": [],
        }  # a copy has no pending backward

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _dispatcher.discard_handles(self)
        self._weight_copies.attach_initial_values(self)

    # ---- weight gradients -----------------------------------------------------------------------------------------

    def _main_grad_parameters(self) -> list[torch.nn.Parameter | None]:
        """Returns the Parameters whose gradients go to ``main_grad``."""
        return [self._parameters.get(name) for name in self._weights] if self.fuse_wgrad_accumulation else []

    def _first_microbatch(self, output: torch.Tensor, first: bool | None) -> None:
        """Makes the weight gradients of this call overwrite main_grad if it is the first micro-batch."""
        if not self.fuse_wgrad_accumulation or not (first or self.delay_wgrad_compute):
            return
        node = output.grad_fn
        if node is None:
            return
        if not any(getattr(self, name).requires_grad for name in self._weights):
            return
        if self.delay_wgrad_compute:
            node.register_prehook(lambda grads: self._delayed_overwrites.append(bool(first)))
        else:
            node.register_prehook(lambda grads: self._begin_overwrite())
            node.register_hook(lambda *grads: self._end_overwrite())

    def _begin_overwrite(self) -> None:
        self._end_overwrite()
        params: list[Any] = [self._parameters[name] for name in self._weights]
        for param in params:
            self._saved_overwrite_flags.append((param, getattr(param, "overwrite_main_grad", None)))
            param.overwrite_main_grad = True

    def _end_overwrite(self) -> None:
        """Restores the flags of the weights. The next forward calls it too, because a backward that raised did not."""
        while self._saved_overwrite_flags:
            param, before = self._saved_overwrite_flags.pop()
            if before is None:
                del param.overwrite_main_grad
            else:
                param.overwrite_main_grad = before

    def need_backward_dw(self) -> bool:
        """Whether weight gradients are computed in :meth:`backward_dw` instead of in backward."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Computes the weight gradients delayed by the oldest pending backward, last layer first, then runs the hooks.

        Does nothing if none are pending. Call it once per backward.
        """
        pending = [op for op in reversed(self.__dict__.get("_wgrad_ops", ())) if op.pending_backward_dw]
        if not self.delay_wgrad_compute or not pending:
            return
        overwrite = self._delayed_overwrites.popleft() if self._delayed_overwrites else False
        if overwrite:
            self._begin_overwrite()
        try:
            for op in pending:
                op.backward_dw()
        finally:
            self._end_overwrite()
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Registers a hook that runs after each :meth:`backward_dw` that computed a gradient.

        Args:
            hook: called without arguments.
        """
        self._wgrad_hooks.append(hook)


def divide_evenly(owner: Any, total: int, ranks: int) -> int:
    """Returns the features per rank."""
    if total % ranks:
        raise ValueError(f"{type(owner).__name__}: {total} features do not divide over {ranks} ranks.")
    return total // ranks


def reject_gathered_output(owner: Any, gathered: bool) -> None:
    """Raises if the gathered output of the norm is requested under sequence parallelism."""
    if gathered and owner.sequence_parallel:
        raise NotImplementedError(
            f"{type(owner).__name__}: return_layernorm_output_gathered=True is not supported under sequence "
            "parallelism. Use return_layernorm_output=True and all-gather the rows."
        )


def reject_quantized(owner: Any, **flags: Any) -> None:
    """Handles flags such as fp8_output, which request quantized tensors: raises or warns."""
    for name, value in flags.items():
        if value:
            _recipes.enter_quantized(f"{type(owner).__name__}: {name}=True")
