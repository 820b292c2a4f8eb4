#pragma once
#include <string>

#include "weft/kernels/quantize.h"

namespace weft::quant {

/// How scales are chosen. One per tensor: `delayed`, from the maximum magnitudes of earlier tensors, given by the
/// caller, or `current`, from that of this one. One per block: `block`, float32 for 128 values; `mxfp8`, powers of two
/// for 32 values; `nvfp4`, E4M3 for 16 values, on top of one float32 scale per tensor.
enum class Scaling { delayed, current, block, mxfp8, nvfp4 };

/// Which tensors an option applies to is decided by recipes; this is the choice for one tensor. A value: equal
/// quantizers give equal bytes.
struct Quantizer {
  Scaling scaling = Scaling::current;
  Format format = Format::e4m3;
  bool two_dimensional = false;
  bool power_of_2_scales = false;
  double amax_epsilon = 0;
  bool random_hadamard_transform = false;
  bool stochastic_rounding = false;
  bool row_scaled = false;
  kernels::FourOverSix four_over_six = kernels::FourOverSix::none;
  bool four_over_six_e4m3_use_256 = false;

  static constexpr auto fields();
  bool operator==(const Quantizer&) const = default;

  /// Raises ValueError for options that the scaling does not have.
  void check() const;
  kernels::Quantization quantization() const;
};

}  // namespace weft::quant

namespace weft {

template <>
struct EnumNames<quant::Scaling> {
  static constexpr std::array<const char*, 5> list = {"delayed", "current", "block", "mxfp8", "nvfp4"};
};
template <>
struct EnumNames<kernels::FourOverSix> {
  static constexpr std::array<const char*, 3> list = {"none", "MAE", "MSE"};
};

}  // namespace weft

constexpr auto weft::quant::Quantizer::fields() {
  return std::tuple{
      Field{"scaling", &Quantizer::scaling,
            "One scale per tensor: ``\"delayed\"``, given by the caller, or ``\"current\"``, from the values. One per "
            "block: ``\"block\"``, ``\"mxfp8\"`` or ``\"nvfp4\"``.",
            ParamKind::positional},
      Field{"format", &Quantizer::format,
            "Format of the values: ``\"e4m3\"`` or ``\"e5m2\"``; ``\"e2m1\"`` for nvfp4."},
      Field{"two_dimensional", &Quantizer::two_dimensional,
            "Square blocks, so that the rowwise and the columnwise copy have the same values."},
      Field{"power_of_2_scales", &Quantizer::power_of_2_scales, "Rounds float32 scales down to powers of two."},
      Field{"amax_epsilon", &Quantizer::amax_epsilon, "The smallest maximum magnitude for float32 scales."},
      Field{"random_hadamard_transform", &Quantizer::random_hadamard_transform,
            "Transforms 16 values at a time before the columnwise copy is quantized (nvfp4)."},
      Field{"stochastic_rounding", &Quantizer::stochastic_rounding,
            "Rounds up with the probability of the distance to the lower neighbour (nvfp4)."},
      Field{"row_scaled", &Quantizer::row_scaled, "One float32 scale per row instead of one per tensor (nvfp4)."},
      Field{"four_over_six", &Quantizer::four_over_six,
            "Also tries to map the largest value of a block to 4, and keeps the scale with the smaller error: "
            "``\"MAE\"`` (absolute) or ``\"MSE\"`` (squared) (nvfp4)."},
      Field{"four_over_six_e4m3_use_256", &Quantizer::four_over_six_e4m3_use_256,
            "Limits E4M3 scales to 256 instead of 448 (nvfp4)."}};
}
