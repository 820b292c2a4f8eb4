"""Quantization recipes and the context managers that use them.

Recipes can be created and read, but weft computes unquantized: entering a quantized region raises, or with the policy
"high_precision" runs it unquantized.
"""

from __future__ import annotations

import enum
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, NoReturn

import torch

UNQUANTIZED_REASON = "weft computes in float64, float32, bfloat16 and float16; quantized tensors are not supported"
_POLICIES = ("raise", "high_precision")
_policy = "raise"
_warned = False


def set_policy(policy: str) -> None:
    """Sets what a quantized region does: "raise", or "high_precision" to run unquantized with one warning."""
    global _policy, _warned
    if policy not in _POLICIES:
        raise ValueError(f"install: recipes is {policy!r}, expected 'raise' or 'high_precision'.")
    _policy, _warned = policy, False


def enter_quantized(what: str) -> None:
    """Raises, or warns once, according to the policy. Called where Transformer Engine would quantize `what`."""
    global _warned
    if _policy == "raise":
        raise NotImplementedError(
            f"{what}: {UNQUANTIZED_REASON}. Disable quantization, or run such regions unquantized: "
            "weft.compat.transformer_engine.install(recipes='high_precision')."
        )
    if not _warned:
        _warned = True
        warnings.warn(f"{what}: runs unquantized; {UNQUANTIZED_REASON}.", UserWarning, stacklevel=4)


# ---- recipes ------------------------------------------------------------------------------------------------------


class _Range(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """Number formats. The value holds the largest finite number of the format in forward and in backward."""

    E2M1 = _Range(6, 6)
    E4M3 = _Range(448, 448)
    E5M2 = _Range(57344, 57344)
    HYBRID = _Range(448, 57344)


@dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


def _is(*class_names: str) -> Callable[[Recipe], bool]:
    """Makes a method that says whether a recipe is an instance of one of these classes, which are defined below."""
    return lambda self: any(base.__name__ in class_names for base in type(self).__mro__)


@dataclass
class Recipe:
    """Base class of recipes."""

    delayed = _is("DelayedScaling")
    float8_current_scaling = _is("Float8CurrentScaling")
    float8_block_scaling = _is("Float8BlockScaling")
    float8_per_tensor_scaling = _is("DelayedScaling", "Float8CurrentScaling")
    mxfp8 = _is("MXFP8BlockScaling")
    nvfp4 = _is("NVFP4BlockScaling")
    custom = _is("CustomRecipe")


def _ignores_unknown_fields(recipe: Any) -> Any:
    """Makes a recipe ignore unknown keyword arguments, as Transformer Engine does: Megatron passes some."""
    init, known = recipe.__init__, {known_field.name for known_field in fields(recipe)}

    @functools.wraps(init)
    def init_known_fields(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{name: value for name, value in kwargs.items() if name in known})

    recipe.__init__ = init_known_fields
    return recipe


@_ignores_unknown_fields
@dataclass
class DelayedScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclass
class Float8CurrentScaling(Recipe):
    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = field(default_factory=lambda: MMParams(False))
    fp8_gemm_dgrad: MMParams = field(default_factory=MMParams)
    fp8_gemm_wgrad: MMParams = field(default_factory=MMParams)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclass
class Float8BlockScaling(Recipe):
    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = field(default_factory=MMParams)
    fp8_gemm_dgrad: MMParams = field(default_factory=MMParams)
    fp8_gemm_wgrad: MMParams = field(default_factory=MMParams)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclass
class MXFP8BlockScaling(Recipe):
    margin: int = 0
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclass
class NVFP4BlockScaling(Recipe):
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclass
class CustomRecipe(Recipe):
    qfactory: Callable[..., Any]
    fp8_format: Format = Format.HYBRID
    quantization_alignment: int = 128
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


def get_default_recipe() -> Recipe:
    """Returns ``DelayedScaling()``."""
    return DelayedScaling()


get_default_fp8_recipe = get_default_recipe


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
    """Context manager of a region that Transformer Engine would compute quantized.

    Args:
        enabled: False: does nothing. True: raises, or with ``install(recipes="high_precision")`` runs unquantized.
        calibrating: same as `enabled`.
        recipe: named in the error or warning.
        amax_reduction_group: ignored.
    """
    return _region(f"autocast with {type(recipe or get_default_recipe()).__name__}", enabled or calibrating)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Any:
    """The older name of :func:`autocast`; `fp8_recipe` is its `recipe`."""
    return _region(f"fp8_autocast with {type(fp8_recipe or get_default_recipe()).__name__}", enabled or calibrating)


def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Any:
    """Context manager of a region in which Transformer Engine would create quantized Parameters.

    Args:
        enabled: False: does nothing. True: raises, or with ``install(recipes="high_precision")`` creates unquantized
            Parameters.
        recipe: ignored.
        preserve_high_precision_init_val: ignored.
    """
    return _region("quantized_model_init", enabled)


def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Any:
    """The older name of :func:`quantized_model_init`."""
    return _region("fp8_model_init", enabled)


# ---- availability -------------------------------------------------------------------------------------------------


def _unavailable(return_reason: bool = False) -> Any:
    """Returns False, or (False, reason)."""
    return (False, UNQUANTIZED_REASON) if return_reason else False


is_fp8_available = is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = _unavailable


def check_fp8_support() -> tuple[bool, str]:
    """Returns (False, reason)."""
    return False, UNQUANTIZED_REASON


check_mxfp8_support = check_fp8_block_scaling_support = check_nvfp4_support = check_fp8_support


def is_bf16_available(return_reason: bool = False) -> Any:
    """Returns True, or (True, "")."""
    return (True, "") if return_reason else True


class FP8GlobalStateManager:
    """State of quantized regions: always disabled."""

    reset = staticmethod(lambda: None)
    is_fp8_enabled = staticmethod(lambda: False)
    is_fp8_calibration = staticmethod(lambda: False)
    with_fp8_parameters = staticmethod(lambda: False)
    is_first_fp8_module = staticmethod(lambda: False)
    fp8_graph_capturing = staticmethod(lambda: False)
    get_fp8_recipe = staticmethod(get_default_recipe)
    get_fp8_group = staticmethod(lambda: None)
    set_skip_fp8_weight_update_tensor = staticmethod(lambda skip: None)
    get_skip_fp8_weight_update_tensor = staticmethod(lambda: None)
    is_fp8_available = staticmethod(check_fp8_support)
    is_mxfp8_available = staticmethod(check_fp8_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_support)
    is_nvfp4_available = staticmethod(check_fp8_support)


class QuantizedTensor(torch.Tensor):
    """For isinstance() only: it cannot be instantiated."""

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
