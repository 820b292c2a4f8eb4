#pragma once
#include "weft/ops/spec.h"
#include "weft/quant/recipe.h"

namespace weft::ops {

// What forward saves of the recipe of a call: the seed of stochastic rounding, the number of the call, then so many
// bytes that their number depends on the recipe. Gradient checkpointing compares the sizes of what a repeated forward
// saves, so it notices one that runs with another recipe, or with none.

inline constexpr const char* kSavedRecipeName = "recipe";
Spec saved_recipe_spec(const quant::Recipe& recipe);
/// What backward reads; undefined if the call needs no gradient. Under a recipe that rounds gradients stochastically
/// every call draws a seed from torch's generator, so that later draws do not depend on grad mode: reentrant
/// checkpointing repeats in grad mode what it first ran without.
at::Tensor save_recipe(const quant::Recipe& recipe, bool needs_grad);
/// The seed, int64.
at::Tensor rounding_seed(const at::Tensor& saved_recipe);
/// Identifies the call within the process; 0 if nothing was saved.
int64_t call_number(const at::Tensor& saved_recipe);
/// Of the fields of a recipe; the same in every process.
uint64_t recipe_hash(const quant::Recipe& recipe);

}  // namespace weft::ops
