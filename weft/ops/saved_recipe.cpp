#include "weft/ops/saved_recipe.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "weft/kernels/launch.h"

namespace weft::ops {
namespace {

/// 8 to 255, the same in every process.
int64_t saved_bytes(const quant::Recipe& recipe) {
  uint32_t hash = 2166136261U;  // FNV-1a
  for (const char c : recipe.text()) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  return 8 + hash % 248;
}

}  // namespace

Spec saved_recipe_spec(const quant::Recipe& recipe) { return {.sizes = {saved_bytes(recipe)}, .dtype = at::kByte}; }

at::Tensor save_recipe(const quant::Recipe& recipe) {
  const auto saved = at::zeros({saved_bytes(recipe)}, at::kByte);
  if (!recipe.backward_override && recipe.grad_output.stochastic_rounding)
    kernels::launch([saved] { saved.random_(); });
  return saved;
}

at::Tensor rounding_seed(const at::Tensor& saved_recipe) {
  return saved_recipe.narrow(0, 0, 8).clone().view(at::kLong);  // what a hook returned may not be aligned
}

}  // namespace weft::ops
