#include "weft/ops/saved_recipe.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <bit>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "weft/kernels/launch.h"

namespace weft::ops {
namespace {

constexpr int64_t kSeedBytes = 8, kCallBytes = 8;

/// 16 to 255, from the fields of the recipe.
int64_t saved_bytes(const quant::Recipe& recipe) {
  return kSeedBytes + kCallBytes + static_cast<int64_t>((recipe_hash(recipe) >> 32) % 240);
}

std::atomic<int64_t> calls = 0;

}  // namespace

uint64_t recipe_hash(const quant::Recipe& recipe) {
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
  return hash;
}

Spec saved_recipe_spec(const quant::Recipe& recipe) { return {.sizes = {saved_bytes(recipe)}, .dtype = at::kByte}; }

at::Tensor save_recipe(const quant::Recipe& recipe, bool needs_grad) {
  const bool draws = !recipe.backward_override && recipe.grad_output.stochastic_rounding;
  if (!draws && !needs_grad) return {};
  const auto saved = at::zeros({saved_bytes(recipe)}, at::kByte);
  if (draws) kernels::launch([seed = saved.narrow(0, 0, kSeedBytes)] { seed.random_(); });
  if (!needs_grad) return {};
  const int64_t call = ++calls;
  std::memcpy(saved.mutable_data_ptr<uint8_t>() + kSeedBytes, &call, sizeof call);
  return saved;
}

int64_t call_number(const at::Tensor& saved_recipe) {
  int64_t call = 0;
  if (saved_recipe.defined())
    std::memcpy(&call, saved_recipe.contiguous().const_data_ptr<uint8_t>() + kSeedBytes, sizeof call);
  return call;
}

at::Tensor rounding_seed(const at::Tensor& saved_recipe) {
  return saved_recipe.narrow(0, 0, kSeedBytes).clone().view(at::kLong);  // what a hook returned may not be aligned
}

}  // namespace weft::ops
