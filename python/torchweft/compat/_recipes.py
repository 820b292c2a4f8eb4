"""Quantized regions as Transformer Engine names them: autocast, availability, classes of quantized tensors.

Regions that weft cannot quantize raise, or with the policy "high_precision" run unquantized.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from .. import _autocast
from ..recipe import Recipe, get_default_recipe

UNQUANTIZED_REASON = "weft quantizes linears within autocast(), and no other tensors"
_EMULATED = "emulated: FP8 and FP4 values are exact operands of bfloat16 or float32 GEMMs"
_POLICIES = ("quantize", "high_precision")
_policy = "quantize"
_warned = False


def set_policy(policy: str) -> None:
    """Sets what a quantized region does: "quantize", or "high_precision" to run unquantized with one warning."""
    global _policy, _warned
    if policy not in _POLICIES:
        raise ValueError(f"install: recipes is {policy!r}, expected 'quantize' or 'high_precision'.")
    _policy, _warned = policy, False


def enter_quantized(what: str) -> None:
    """Raises, or warns once, according to the policy. Called where Transformer Engine would quantize `what`."""
    global _warned
    if _policy == "quantize":
        raise NotImplementedError(
            f"{what}: {UNQUANTIZED_REASON}. Disable quantization, or run such regions unquantized: "
            "torchweft.compat.transformer_engine.install(recipes='high_precision')."
        )
    if not _warned:
        _warned = True
        warnings.warn(
            f"{what}: runs unquantized because of install(recipes='high_precision').", UserWarning, stacklevel=4
        )


# ---- contexts -----------------------------------------------------------------------------------------------------


@contextmanager
def _region(what: str, quantized: bool) -> Iterator[None]:
    """A region that Transformer Engine would compute quantized if `quantized`."""
    if quantized:
        enter_quantized(what)
    yield


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    _graph: bool = False,
) -> Any:
    """:func:`torchweft.autocast`; without a recipe it uses :func:`get_default_recipe`. With
    ``install(recipes="high_precision")`` it runs unquantized."""
    _autocast.check_enabled("autocast", enabled)
    if recipe is None:
        recipe = get_default_recipe()
    if enabled and _policy == "high_precision":
        return _region(f"autocast with {type(recipe).__name__}", True)
    return _autocast.autocast(enabled, calibrating, recipe, amax_reduction_group)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Any:
    """The older name of :func:`autocast`; `fp8_recipe` is its `recipe`."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


get_default_fp8_recipe = get_default_recipe


def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Any:
    """Context manager of a region in which modules create quantized weights.

    Such a weight is an ordinary Parameter of the module's dtype with the values of its quantized form. After a change,
    by an optimizer for instance, the next call quantizes it and writes the rounded values back. It does not use less
    memory. With ``install(recipes="high_precision")`` the weights are not quantized.

    Args:
        enabled: False: the weights of modules in this region are not quantized, also within another region.
        recipe: None: :func:`get_default_recipe`.
        preserve_high_precision_init_val: keep the initial values before quantization, as
            ``weight.get_high_precision_init_val()``; ``weight.clear_high_precision_init_val()`` frees them.
    """
    _autocast.check_enabled("quantized_model_init", enabled)
    if enabled and _policy == "high_precision":
        return _region("quantized_model_init", True)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"quantized_model_init: recipe is {recipe!r}, expected a recipe of torchweft.recipe or None.")
    return _model_init((recipe or get_default_recipe(), preserve_high_precision_init_val) if enabled else None)


@contextmanager
def _model_init(how: tuple[Recipe, bool] | None) -> Iterator[None]:
    if how is not None:
        how[0].quantizers()  # raises for a recipe that is not supported
    before, _autocast.active.model_init = _autocast.active.model_init, how
    try:
        yield
    finally:
        _autocast.active.model_init = before


def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Any:
    """The older name of :func:`quantized_model_init`."""
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


# ---- availability -------------------------------------------------------------------------------------------------


def _available(return_reason: bool = False) -> Any:
    """Returns True, or (True, "emulated: ...")."""
    return (True, _EMULATED) if return_reason else True


is_fp8_available = is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = _available


def check_fp8_support() -> tuple[bool, str]:
    """Returns (True, "emulated: ...")."""
    return True, _EMULATED


check_mxfp8_support = check_fp8_block_scaling_support = check_nvfp4_support = check_fp8_support


def is_bf16_available(return_reason: bool = False) -> Any:
    """Returns True, or (True, "")."""
    return (True, "") if return_reason else True


class FP8GlobalStateManager:
    """State of the quantized region of this thread."""

    reset = staticmethod(lambda: None)
    is_fp8_enabled = staticmethod(lambda: _autocast.active.recipe is not None)
    is_fp8_calibration = staticmethod(lambda: False)
    with_fp8_parameters = staticmethod(lambda: _autocast.active.model_init is not None)
    is_first_fp8_module = staticmethod(lambda: False)
    fp8_graph_capturing = staticmethod(lambda: False)
    get_fp8_recipe = staticmethod(lambda: _autocast.active.recipe or get_default_recipe())
    get_fp8_group = staticmethod(lambda: None)
    set_skip_fp8_weight_update_tensor = staticmethod(lambda skip: None)
    get_skip_fp8_weight_update_tensor = staticmethod(lambda: None)
    is_fp8_available = staticmethod(check_fp8_support)
    is_mxfp8_available = staticmethod(check_fp8_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_support)
    is_nvfp4_available = staticmethod(check_fp8_support)


class QuantizedTensor(torch.Tensor):
    """For isinstance() only: it cannot be instantiated. Quantized weights are ordinary Parameters."""

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{cls.__name__}: {UNQUANTIZED_REASON}.")


class Float8Tensor(QuantizedTensor):
    pass


class MXFP8Tensor(QuantizedTensor):
    pass


class Float8BlockwiseQTensor(QuantizedTensor):
    pass


class NVFP4Tensor(QuantizedTensor):
    pass
