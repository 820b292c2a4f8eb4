"""Quantization recipes: which tensors of a linear are quantized, and how.

Names, fields and defaults are those of ``transformer_engine.common.recipe``. :func:`torchweft.autocast` runs linears
with one.

Example::

    >>> import torch, torchweft
    >>> linear = torchweft.ops.Linear(64, 32)
    >>> with torchweft.autocast(recipe=torchweft.recipe.MXFP8BlockScaling()):
    ...     y = linear(torch.randn(8, 64))
    >>> torchweft.recipe.MXFP8BlockScaling().quantizers().weight
    Quantizer('mxfp8')
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from . import _C

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "QuantizerRole",
    "Recipe",
    "get_default_recipe",
]


class _Range(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """Number formats. The value holds the largest finite number of the format in forward and in backward."""

    E2M1 = _Range(6, 6)
    E4M3 = _Range(448, 448)
    E5M2 = _Range(57344, 57344)
    HYBRID = _Range(448, 57344)


_OPTIONS = _C.recipe_fields()  # of each supported recipe: name, default and description of the options with an effect
_SUPPORTED = "Use another class of torchweft.recipe, such as CustomRecipe."


def _plain(value: Any) -> Any:
    """Returns the name of a format; other values as they are."""
    return value.name if isinstance(value, Format) else value


@dataclass(frozen=True)
class MMParams:
    """How a GEMM accumulates. Has no effect: sums are float32."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """Options of a quantizer in Transformer Engine. Has no effect: :meth:`Recipe.quantizers` shows what applies."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


def _is(*class_names: str) -> Callable[[Recipe], bool]:
    """Makes a method that says whether a recipe is an instance of one of these classes, which are defined below."""

    def is_instance(self: Recipe) -> bool:
        return any(base.__name__ in class_names for base in type(self).__mro__)

    is_instance.__doc__ = f"Whether this is a recipe of class {' or '.join(class_names)}."
    return is_instance


@dataclass
class Recipe:
    """Base class of recipes."""

    def quantizers(self) -> _C.Recipe:
        """Returns the quantizers of input, weight and grad_output.

        Raises:
            NotImplementedError: for a recipe that is not supported.
            ValueError: for options that exclude each other.
        """
        self._reject_unsupported()
        for base in type(self).__mro__:
            if options := _OPTIONS.get(base.__name__):
                return _C.make_recipe(base.__name__, {name: _plain(getattr(self, name)) for name, *_ in options})
        raise NotImplementedError(f"{type(self).__name__}: operations do not support this recipe. {_SUPPORTED}")

    def _reject_unsupported(self) -> None:
        if getattr(self, "row_scaled_activation", False):
            raise NotImplementedError(
                f"{type(self).__name__}: row_scaled_activation is not supported. Set it to False."
            )
        if getattr(self, "fp8_dpa", False) or getattr(self, "fp8_mha", False):
            raise NotImplementedError(
                f"{type(self).__name__}: quantized attention is not supported. Set fp8_dpa and fp8_mha to False."
            )

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
        if any(kwargs.get("override_linear_precision", ())):
            raise NotImplementedError(
                f"{recipe.__name__}: override_linear_precision is not supported. All GEMMs of a linear are quantized."
            )
        init(self, *args, **{name: value for name, value in kwargs.items() if name in known})

    recipe.__init__ = init_known_fields
    return recipe


@_ignores_unknown_fields
@dataclass
class DelayedScaling(Recipe):
    """FP8 with one float32 scale per tensor, from its maximum magnitudes in earlier steps.

    margin: the scale is divided by 2 to this power. amax_history_len: the number of steps, with the current one.
    amax_compute_algo: ``"max"``, ``"most_recent"``, or a function of the history. scaling_factor_compute_algo: None, or
    a function of amax, scale, the largest value of the format and the recipe. reduce_amax: ranks share the maxima.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def quantizers(self) -> _C.Recipe:
        """Returns the quantizers of input, weight and grad_output. Raises as :meth:`Recipe.quantizers`."""
        algo = self.amax_compute_algo
        if not callable(algo) and algo not in ("max", "most_recent"):
            raise ValueError(
                f"DelayedScaling: amax_compute_algo is {algo!r}, expected 'max', 'most_recent' or a function."
            )
        if self.amax_history_len < 1:
            raise ValueError(f"DelayedScaling: amax_history_len is {self.amax_history_len}, expected 1 or more.")
        return super().quantizers()


@dataclass
class Float8CurrentScaling(Recipe):
    """FP8 with one float32 scale per tensor, from its own maximum magnitude."""

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
    """FP8 with one float32 scale per 128 values, or per 128 x 128 values of the weight."""

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
    """FP8 with one power of two per 32 values."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    enable_2d_quantization: bool = False
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclass
class NVFP4BlockScaling(Recipe):
    """E2M1 values with one E4M3 scale per 16 of them, and one float32 scale per tensor."""

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


@dataclass(frozen=True)
class QuantizerRole:
    """What a quantizer is for, as :class:`CustomRecipe` passes it to its function.

    module_type: ``"linear"``. tensor_type: ``"input"``, ``"weight"`` or ``"grad_output"``. name: empty.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


@dataclass
class CustomRecipe(Recipe):
    """Quantizers made by a function.

    qfactory: takes a :class:`QuantizerRole` and returns a :class:`torchweft.quantization.Quantizer`. It is called once
    per role when a region is entered; to quantize layers differently, open a region for each. fp8_format and
    quantization_alignment have no effect. backward_override: as in the other recipes.

    Example::

        >>> from torchweft.quantization import Quantizer
        >>> def qfactory(role):
        ...     return Quantizer("current", format="e5m2" if role.tensor_type == "grad_output" else "e4m3")
        >>> torchweft.recipe.CustomRecipe(qfactory).quantizers() == torchweft.recipe.Float8CurrentScaling().quantizers()
        True
    """

    qfactory: Callable[..., Any]
    fp8_format: Format = Format.HYBRID
    quantization_alignment: int = 128
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def quantizers(self) -> _C.Recipe:
        """Returns the quantizers of input, weight and grad_output. Raises as :meth:`Recipe.quantizers`, and TypeError
        if the function returns anything but a quantizer."""
        self._reject_unsupported()
        made = {role: self._quantizer(role) for role in ("input", "weight", "grad_output")}
        if any(quantizer.fields()["scaling"] == "delayed" for quantizer in made.values()):
            raise NotImplementedError("CustomRecipe: delayed scaling is not supported. Use DelayedScaling.")
        return _C.Recipe(**made, backward_override=self.backward_override)

    def _quantizer(self, tensor_type: str) -> _C.Quantizer:
        quantizer = self.qfactory(QuantizerRole("linear", tensor_type))
        if not isinstance(quantizer, _C.Quantizer):
            raise TypeError(
                f"CustomRecipe: qfactory returned {quantizer!r} for the {tensor_type} of a linear, expected a "
                "torchweft.quantization.Quantizer."
            )
        return quantizer


def _add_field_docs() -> None:
    """Appends the descriptions of the options that have an effect to the docstrings."""
    for class_name, options in _OPTIONS.items():
        lines = [f"    {name}: {description} Default: ``{default!r}``." for name, default, description in options]
        globals()[class_name].__doc__ += "\n\nArgs:\n" + "\n".join(lines) + "\n"


_add_field_docs()


def get_default_recipe() -> Recipe:
    """Returns ``Float8CurrentScaling()``."""
    return Float8CurrentScaling()
