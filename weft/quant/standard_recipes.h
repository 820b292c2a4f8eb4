#pragma once
#include <tuple>

#include "weft/quant/recipe.h"

// Transformer Engine's recipes, by their names and options.

namespace weft::quant {

/// Formats of FP8 values: E4M3, or with HYBRID E4M3 in forward and E5M2 for gradients.
enum class Fp8Format { E4M3, HYBRID };
/// The formats of NVFP4: of its values and of their scales.
enum class Fp4Format { E2M1 };
enum class Nvfp4ScaleFormat { E4M3 };

/// Which tensors an option of NVFP4 applies to; gradients are never among them.
enum class TensorScope { none, weights, activations, all };

/// One float32 scale per tensor, from its maximum magnitudes in earlier steps (delayed_scaling.h).
struct DelayedScaling {
  Fp8Format fp8_format = Fp8Format::HYBRID;
  std::optional<BackwardOverride> backward_override = {};
  static constexpr auto fields();
  Recipe recipe() const;
};

/// One float32 scale per tensor, from its own maximum magnitude.
struct Float8CurrentScaling {
  Fp8Format fp8_format = Fp8Format::HYBRID;
  bool use_power_2_scales = false;
  std::optional<BackwardOverride> backward_override = {};
  static constexpr auto fields();
  Recipe recipe() const;
};

/// One float32 scale per 128 values, or per 128 x 128 values of the weight.
struct Float8BlockScaling {
  Fp8Format fp8_format = Fp8Format::E4M3;
  bool use_f32_scales = false;
  int64_t x_block_scaling_dim = 1, w_block_scaling_dim = 2, grad_block_scaling_dim = 1;
  std::optional<BackwardOverride> backward_override = {};
  static constexpr auto fields();
  Recipe recipe() const;
};

/// One power of two per 32 values.
struct MXFP8BlockScaling {
  Fp8Format fp8_format = Fp8Format::E4M3;
  bool enable_2d_quantization = false;
  std::optional<BackwardOverride> backward_override = {};
  static constexpr auto fields();
  Recipe recipe() const;
};

/// E2M1 values with one E4M3 scale per 16 of them, or per 16 x 16 of the weight, and one float32 scale per tensor.
struct NVFP4BlockScaling {
  bool disable_rht = false;
  bool disable_stochastic_rounding = false;
  bool disable_2d_quantization = false;
  bool row_scaled_activation = false;
  TensorScope nvfp4_4over6 = TensorScope::none;
  TensorScope nvfp4_4over6_e4m3_use_256 = TensorScope::all;
  kernels::FourOverSix nvfp4_4over6_err_mode = kernels::FourOverSix::absolute;
  Fp4Format fp4_format = Fp4Format::E2M1;
  Nvfp4ScaleFormat fp8_format = Nvfp4ScaleFormat::E4M3;
  std::optional<BackwardOverride> backward_override = {};
  static constexpr auto fields();
  Recipe recipe() const;
};

}  // namespace weft::quant

namespace weft {

template <>
struct EnumNames<quant::Fp8Format> {
  static constexpr std::array<const char*, 2> list = {"E4M3", "HYBRID"};
};
template <>
struct EnumNames<quant::Fp4Format> {
  static constexpr std::array<const char*, 1> list = {"E2M1"};
};
template <>
struct EnumNames<quant::Nvfp4ScaleFormat> {
  static constexpr std::array<const char*, 1> list = {"E4M3"};
};
template <>
struct EnumNames<quant::TensorScope> {
  static constexpr std::array<const char*, 4> list = {"none", "weights", "activations", "all"};
};

}  // namespace weft

namespace weft::quant {

inline constexpr const char* kFp8FormatDoc = "``\"E4M3\"``, or ``\"HYBRID\"`` for E5M2 gradients.";
inline constexpr const char* kBackwardOverrideDoc =
    "What backward multiplies by the unquantized gradient: ``\"high_precision\"`` tensors, or ``\"dequantized\"`` "
    "ones; None quantizes the gradient.";

constexpr auto DelayedScaling::fields() {
  using S = DelayedScaling;
  return std::tuple{Field{"fp8_format", &S::fp8_format, kFp8FormatDoc},
                    Field{"backward_override", &S::backward_override, "None: delayed scaling has no other choice."}};
}

constexpr auto Float8CurrentScaling::fields() {
  using S = Float8CurrentScaling;
  return std::tuple{Field{"fp8_format", &S::fp8_format, kFp8FormatDoc},
                    Field{"use_power_2_scales", &S::use_power_2_scales, "Rounds scales down to powers of two."},
                    Field{"backward_override", &S::backward_override, kBackwardOverrideDoc}};
}

constexpr auto Float8BlockScaling::fields() {
  using S = Float8BlockScaling;
  constexpr const char* kDim = "1: blocks of 128 values; 2: of 128 x 128. At most one tensor may have 2.";
  return std::tuple{Field{"fp8_format", &S::fp8_format, kFp8FormatDoc},
                    Field{"use_f32_scales", &S::use_f32_scales, "Keeps scales that are not powers of two."},
                    Field{"x_block_scaling_dim", &S::x_block_scaling_dim, kDim},
                    Field{"w_block_scaling_dim", &S::w_block_scaling_dim, kDim},
                    Field{"grad_block_scaling_dim", &S::grad_block_scaling_dim, kDim},
                    Field{"backward_override", &S::backward_override, kBackwardOverrideDoc}};
}

constexpr auto MXFP8BlockScaling::fields() {
  using S = MXFP8BlockScaling;
  return std::tuple{Field{"fp8_format", &S::fp8_format, kFp8FormatDoc},
                    Field{"enable_2d_quantization", &S::enable_2d_quantization, "Blocks of 32 x 32 for the weight."},
                    Field{"backward_override", &S::backward_override, kBackwardOverrideDoc}};
}

constexpr auto NVFP4BlockScaling::fields() {
  using S = NVFP4BlockScaling;
  return std::tuple{
      Field{"disable_rht", &S::disable_rht, "No random Hadamard transform for the weight gradient."},
      Field{"disable_stochastic_rounding", &S::disable_stochastic_rounding, "Rounds gradients to nearest."},
      Field{"disable_2d_quantization", &S::disable_2d_quantization, "Blocks of 16 values for the weight, too."},
      Field{"row_scaled_activation", &S::row_scaled_activation, "One float32 scale per row of the input."},
      Field{"nvfp4_4over6", &S::nvfp4_4over6,
            "Tensors whose blocks map their largest value to 4 if that is better than 6."},
      Field{"nvfp4_4over6_e4m3_use_256", &S::nvfp4_4over6_e4m3_use_256,
            "Those of them whose E4M3 scales are at most 256."},
      Field{"nvfp4_4over6_err_mode", &S::nvfp4_4over6_err_mode, "What is better: ``\"MAE\"`` or ``\"MSE\"``."},
      Field{"fp4_format", &S::fp4_format, "Of the values."},
      Field{"fp8_format", &S::fp8_format, "Of the scales."},
      Field{"backward_override", &S::backward_override, kBackwardOverrideDoc}};
}

}  // namespace weft::quant
