#include "weft/quant/standard_recipes.h"

namespace weft::quant {
namespace {

/// The same quantizer for x, W and dy, with the format of gradients.
Recipe fp8_recipe(const Quantizer& quantizer, Fp8Format format, std::optional<BackwardOverride> backward_override) {
  Recipe recipe{quantizer, quantizer, quantizer, backward_override};
  if (format == Fp8Format::HYBRID) recipe.grad_output.format = Format::e5m2;
  return recipe;
}

}  // namespace

Recipe DelayedScaling::recipe() const {
  return fp8_recipe({.scaling = Scaling::delayed}, fp8_format, backward_override);
}

Recipe Float8CurrentScaling::recipe() const {
  return fp8_recipe({.scaling = Scaling::current, .power_of_2_scales = use_power_2_scales}, fp8_format,
                    backward_override);
}

Recipe Float8BlockScaling::recipe() const {
  const int64_t dims[] = {x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim};
  for (int i = 0; i < 3; ++i)
    TORCH_CHECK_VALUE(dims[i] == 1 || dims[i] == 2, "Float8BlockScaling: ", std::array{"x", "w", "grad"}[i],
                      "_block_scaling_dim is ", dims[i], ", expected 1 or 2.");
  TORCH_CHECK_VALUE(std::count(std::begin(dims), std::end(dims), 2) <= 1, "Float8BlockScaling: x_block_scaling_dim is ",
                    dims[0], ", w_block_scaling_dim ", dims[1], ", grad_block_scaling_dim ", dims[2],
                    "; at most one of them may be 2.");
  auto recipe =
      fp8_recipe({.scaling = Scaling::block, .power_of_2_scales = !use_f32_scales}, fp8_format, backward_override);
  recipe.input.two_dimensional = x_block_scaling_dim == 2;
  recipe.weight.two_dimensional = w_block_scaling_dim == 2;
  recipe.grad_output.two_dimensional = grad_block_scaling_dim == 2;
  return recipe;
}

Recipe MXFP8BlockScaling::recipe() const {
  auto recipe = fp8_recipe({.scaling = Scaling::mxfp8}, fp8_format, backward_override);
  recipe.weight.two_dimensional = enable_2d_quantization;
  return recipe;
}

Recipe NVFP4BlockScaling::recipe() const {
  TORCH_CHECK_NOT_IMPLEMENTED(!row_scaled_activation,
                              "NVFP4BlockScaling: row_scaled_activation is not supported. Leave it false.");
  const Quantizer plain{.scaling = Scaling::nvfp4, .format = Format::e2m1};
  Recipe recipe{plain, plain, plain, backward_override};
  recipe.input.random_hadamard_transform = recipe.grad_output.random_hadamard_transform = !disable_rht;
  recipe.weight.two_dimensional = !disable_2d_quantization;
  recipe.grad_output.stochastic_rounding = !disable_stochastic_rounding;
  const auto in_scope = [](TensorScope scope, TensorScope tensors) {
    return scope == TensorScope::all || scope == tensors;
  };
  for (const auto& [quantizer, tensors] :
       {std::pair{&recipe.input, TensorScope::activations}, std::pair{&recipe.weight, TensorScope::weights}}) {
    if (!in_scope(nvfp4_4over6, tensors)) continue;
    quantizer->four_over_six = nvfp4_4over6_err_mode;
    quantizer->four_over_six_e4m3_use_256 = in_scope(nvfp4_4over6_e4m3_use_256, tensors);
  }
  return recipe;
}

}  // namespace weft::quant
