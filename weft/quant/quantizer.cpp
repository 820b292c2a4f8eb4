#include "weft/quant/quantizer.h"

#include <c10/util/Exception.h>

namespace weft::quant {

void Quantizer::check() const {
  const auto* const name = EnumNames<Scaling>::list[static_cast<size_t>(scaling)];
  TORCH_CHECK_VALUE((scaling == Scaling::nvfp4) == (format == Format::e2m1), "Quantizer: format \"",
                    EnumNames<Format>::list[static_cast<size_t>(format)], "\" does not fit scaling \"", name,
                    "\". \"nvfp4\" requires format \"e2m1\", the others \"e4m3\" or \"e5m2\".");
  TORCH_CHECK_VALUE(scaling != Scaling::delayed || (!power_of_2_scales && amax_epsilon == 0),
                    "Quantizer: power_of_2_scales and amax_epsilon do not apply to scaling \"delayed\", whose scale is "
                    "given.");
  kernels::check_options(quantization());
}

kernels::Quantization Quantizer::quantization() const {
  kernels::Quantization how{.format = format,
                            .two_dimensional = two_dimensional,
                            .power_of_two = power_of_2_scales,
                            .epsilon = static_cast<float>(amax_epsilon),
                            .scale_bound = four_over_six_e4m3_use_256 ? 256.F : 448.F,
                            .row_scaled = row_scaled,
                            .hadamard = random_hadamard_transform,
                            .stochastic_rounding = stochastic_rounding,
                            .four_over_six = four_over_six};
  if (scaling == Scaling::block) how.block = 128;
  if (scaling == Scaling::mxfp8) how.block = 32, how.scale_format = ScaleFormat::e8m0;
  if (scaling == Scaling::nvfp4) how.block = 16, how.scale_format = ScaleFormat::e4m3;
  return how;
}

}  // namespace weft::quant
