"""Weights that a module quantizes itself, instead of its linears: once for several micro-batches, or because its
Parameters are quantized.

A quantized Parameter is an ordinary one with the values of its quantized copies. When these values have changed (by an
optimizer, a checkpoint, ``.to()``), the next call quantizes them, writes the values of the new copies back and
multiplies by copies of what it wrote. The codes therefore depend on the values alone: a module with the same values, by
``deepcopy``, pickle or ``state_dict``, has the same codes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import _C
from ._autocast import active, called_in_backward
from ._delayed_scaling import WeightScaling
from .recipe import DelayedScaling, Recipe

_MOST_ROUNDINGS = 16  # of a weight, until its values are those of its copies; at most 5 were seen


class _CallWeights(threading.local):
    """The quantized weights of the modules that run in this thread, by module and name."""

    def __init__(self) -> None:
        self.weights: dict[tuple[int, str | None], _C.QuantizedMatrix] = {}


_call = _CallWeights()


def weight_of_call(op: torch.nn.Module) -> _C.QuantizedMatrix | None:
    """Returns the weight that the owner of the operation's Parameters quantized for this call. Called from C++."""
    if not _call.weights:
        return None
    names: dict[str, str] = op.__dict__.get("_parameter_names", {})
    return _call.weights.get((id(op.__dict__.get("_parameter_owner")), names.get("weight")))


class _OptimizerSteps:
    """The number of steps of all optimizers, counted before and after a step."""

    count = 0

    @classmethod
    def add(cls, *_: Any) -> None:
        cls.count += 1


register_optimizer_step_pre_hook(_OptimizerSteps.add)
register_optimizer_step_post_hook(_OptimizerSteps.add)


class _Source:
    """The weight that copies were made of, and what changes when its values do.

    In-place operations change the version, ``.data = ``, ``.to()``, ``set_`` and ``swap_tensors`` the storage or the
    strides. Fused optimizers change neither, and those that step on other tensors (``.data``, a flat buffer, shards)
    may not, so a step of any optimizer counts. The address of a storage is not used again while it has a weak
    reference. The weight has a strong one, because ``swap_tensors`` raises for weights with weak references.
    """

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self._weight = weight
        self._memory = self._memory_of(weight)
        self._version = None if weight.is_inference() else weight._version
        self._steps = _OptimizerSteps.count

    def is_unchanged(self, weight: torch.nn.Parameter) -> bool:
        """Whether this is the same weight with the same values. A backward repeats the calls of a forward before the
        step of the weight, but other weights may have made theirs."""
        if weight is not self._weight or self._version is None or weight.is_inference():
            return False
        same_steps = called_in_backward() or self._steps == _OptimizerSteps.count
        return same_steps and self._version == weight._version and self._memory == self._memory_of(weight)

    @staticmethod
    def _memory_of(weight: torch.Tensor) -> tuple[Any, ...]:
        storage = StorageWeakRef(weight.untyped_storage())
        return storage, weight.data_ptr(), weight.dtype, weight.shape, weight.stride()


class _Copies(NamedTuple):
    """The quantized copies of a weight, and what they were made of."""

    matrix: _C.QuantizedMatrix
    quantizer: _C.Quantizer
    dtype: torch.dtype  # of the values that were quantized
    source: _Source

    def hold(self, values: torch.Tensor) -> bool:
        """Whether these are copies of the values."""
        same_shape = self.matrix.shape == tuple(values.shape)
        return same_shape and torch.equal(_bits(values), _bits(self.matrix.dequantize(dtype=values.dtype)))


def _bits(t: torch.Tensor) -> torch.Tensor:
    """Returns a float tensor as integers, of which those of NaN are equal to themselves."""
    return t.view(torch.int16 if t.element_size() == 2 else torch.int32)


class WeightCopies:
    """The quantized weights that a module keeps between calls.

    Args:
        recipe: of quantized Parameters; None: the Parameters are not quantized.
        preserve_init: keep the initial values of the Parameters on the CPU, as
            ``parameter.get_high_precision_init_val()``.
    """

    def __init__(self, recipe: Recipe | None = None, preserve_init: bool = False) -> None:
        self.recipe = recipe
        self.preserve_init = preserve_init
        self._scales: dict[str, torch.Tensor] = {}  # with which delayed scaling has rounded the Parameters
        self._copies: dict[str, _Copies] = {}
        self._initial_values: dict[str, _InitialValue] = {}
        self._quantizer = None if recipe is None else recipe.quantizers().weight

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("recipe", "preserve_init", "_scales", "_initial_values")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["recipe"], state["preserve_init"])  # type: ignore[misc]
        self._scales = state["_scales"]
        self._initial_values = state.get("_initial_values", {})

    # ---- quantized Parameters -------------------------------------------------------------------------------------

    def preserve(self, name: str, weight: torch.nn.Parameter) -> None:
        """Keeps the values of a Parameter that is about to be quantized for the first time."""
        if self.recipe is not None and self.preserve_init:
            self._initial_values[name] = _InitialValue(weight.detach().clone().cpu())
            self._initial_values[name].attach_to(weight)

    def attach_initial_values(self, module: torch.nn.Module) -> None:
        """Gives the Parameters of a copied module their initial values, which ``deepcopy`` leaves out."""
        for name, value in self._initial_values.items():
            if (weight := module._parameters.get(name)) is not None:
                value.attach_to(weight)

    def rounding_scales(self, names: Sequence[str]) -> torch.Tensor | None:
        """Returns the scales with which delayed scaling has rounded the Parameters, 0 for one that has none yet; None
        for other recipes."""
        if not isinstance(self.recipe, DelayedScaling):
            return None
        return torch.cat([self._scales.get(name, torch.zeros(1)) for name in names])

    def set_rounding_scales(self, names: Sequence[str], scales: torch.Tensor | None) -> None:
        """Sets the scales that :meth:`rounding_scales` of another module returned, for its values."""
        if scales is not None and isinstance(self.recipe, DelayedScaling):
            self._scales = {name: scale for name, scale in zip(names, scales.split(1), strict=True) if scale > 0}
            self._copies.clear()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def round_parameters(self, module: torch.nn.Module, names: Sequence[str]) -> None:
        """Quantizes the Parameters that have changed, and sets them to the values of their copies.

        Raises:
            RuntimeError: if the active recipe quantizes weights otherwise.
        """
        if active.quantizers is not None and active.quantizers.weight != self._quantizer:
            raise RuntimeError(
                f"{type(module).__name__}: recipe mismatch: its weights were created by quantized_model_init with "
                f"{self.recipe}, but autocast has {active.recipe}. Use the same recipe."
            )
        for name in names:
            weight = module._parameters.get(name)
            if _is_plain(weight) and not (name in self._copies and self._copies[name].hold(weight.detach())):
                self._round(module, name, weight)

    def _round(self, module: torch.nn.Module, name: str, weight: torch.nn.Parameter) -> None:
        assert self.recipe is not None and self._quantizer is not None
        values, scale, copies = weight.detach(), self._scales.get(name), None
        if scale is not None:
            copies = self._quantize(name, weight, self._quantizer, scale, weight.dtype, columnwise=True)
        # With the scale of the last time a repeated call, or a copy of the module, has the same weight again.
        if copies is None or not (called_in_backward() or copies.hold(values)):
            scaling = None
            if isinstance(self.recipe, DelayedScaling):
                scaling = WeightScaling(module, name, self.recipe.amax_history_len)
                scale = self._scales[name] = scaling.scale()
            copies = self._quantize(name, weight, self._quantizer, scale, weight.dtype, columnwise=True)
            if scaling is not None:
                scaling.record(copies.matrix)
        # Rounding again may choose other codes for the same values. It changes the last bits of some float32 and NVFP4.
        for _ in range(_MOST_ROUNDINGS):
            if copies.hold(values):
                break
            with torch.inference_mode(False):
                values.copy_(copies.matrix.dequantize(dtype=values.dtype))
            copies = self._quantize(name, weight, self._quantizer, scale, weight.dtype, columnwise=True)

    # ---- calls ----------------------------------------------------------------------------------------------------

    @contextmanager
    def used_by(self, module: torch.nn.Module, names: Sequence[str], first: bool | None) -> Iterator[None]:
        """Makes the linears of a module use its copies. `first`: whether this is the first of several micro-batches,
        for which weights are quantized; None: each call quantizes weights that are not quantized Parameters."""
        keys = [(id(module), name) for name in names]
        try:
            for key, name in zip(keys, names, strict=True):
                if (matrix := self._matrix(module, name, first)) is not None:
                    _call.weights[key] = matrix
            yield
        finally:
            for key in keys:
                _call.weights.pop(key, None)

    def _matrix(self, module: torch.nn.Module, name: str, first: bool | None) -> _C.QuantizedMatrix | None:
        """Returns the quantized weight, or None to let the linear quantize it."""
        weight, copies = module._parameters.get(name), self._copies.get(name)
        if not _is_plain(weight):
            return None
        if self.recipe is not None:
            return None if copies is None else copies.matrix
        if getattr(module, "_is_fsdp_managed_module", False):  # FSDP writes the gathered weight, and hides it
            return None
        assert active.quantizers is not None and active.recipe is not None
        quantizer, dtype = active.quantizers.weight, _compute_dtype(weight)
        if copies is not None and (called_in_backward() or not first):
            unchanged = copies.source.is_unchanged(weight)
            complete = copies.matrix.columnwise_data is not None or not torch.is_grad_enabled()
            if unchanged and complete and (copies.quantizer, copies.dtype) == (quantizer, dtype):
                return copies.matrix
        if called_in_backward():  # the scale of delayed scaling may have changed since the first call
            return None
        scaling = None
        if isinstance(active.recipe, DelayedScaling):
            scaling = WeightScaling(module, name, active.recipe.amax_history_len)
        scale = None if scaling is None else scaling.scale()
        copies = self._quantize(name, weight, quantizer, scale, dtype, columnwise=torch.is_grad_enabled())
        if scaling is not None and torch.is_grad_enabled():
            scaling.record(copies.matrix)
        return copies.matrix

    def _quantize(
        self,
        name: str,
        weight: torch.nn.Parameter,
        quantizer: _C.Quantizer,
        scale: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        columnwise: bool,
    ) -> _Copies:
        """Quantizes a weight and keeps its copies, which backward can save wherever they were made."""
        source = _Source(weight)
        with torch.inference_mode(False), torch.no_grad():
            values = weight.detach().to(dtype)
            matrix = quantizer.quantize(values, columnwise=columnwise, scale=scale)
        copies = _Copies(matrix, quantizer, dtype, source)
        self._copies[name] = copies
        return copies


def _is_plain(weight: torch.Tensor | None) -> TypeGuard[torch.nn.Parameter]:
    """Whether a module owns this weight as an ordinary Parameter: not a DTensor, and not a tensor that
    ``functional_call`` or a parametrization put there."""
    return type(weight) is torch.nn.Parameter and not weight.is_meta


def _compute_dtype(weight: torch.Tensor) -> torch.dtype:
    """The dtype in which a linear with this weight computes."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


class _InitialValue:
    """The values of a Parameter before it was quantized."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value: torch.Tensor | None = value

    def attach_to(self, weight: Any) -> None:
        """Sets the attributes by which frameworks read and clear the values."""
        weight.get_high_precision_init_val, weight.clear_high_precision_init_val = self.get, self.clear

    def get(self) -> torch.Tensor | None:
        """Returns the values, or None if they were cleared."""
        return self.value

    def clear(self) -> None:
        """Frees the values."""
        self.value = None
