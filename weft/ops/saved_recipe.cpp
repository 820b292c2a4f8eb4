#include "weft/ops/saved_recipe.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <bit>
#include <tuple>
#include <type_traits>

#include "weft/kernels/launch.h"

namespace weft::ops {
namespace {

/// 8 to 255, from the fields of the recipe; the same in every process.
int64_t saved_bytes(const quant::Recipe& recipe) {
  uint64_t hash = 14695981039346656037U;  // FNV-1a, by words
  const auto add = [&hash](auto value) {
    if constexpr (std::is_same_v<decltype(value), double>) {
      hash ^= std::bit_cast<uint64_t>(value);
    } else {
      hash ^= static_cast<uint64_t>(value);
    }
    hash *= 1099511628211U;
  };
  for (const auto* quantizer : {&recipe.input, &recipe.weight, &recipe.grad_output})
    std::apply([&](const auto&... field) { (add(quantizer->*field.member), ...); }, quant::Quantizer::fields());
  add(recipe.backward_override ? 1 + static_cast<int>(*recipe.backward_override) : 0);
  return 8 + static_cast<int64_t>((hash >> 32) % 248);
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
