#include "weft/quant/recipe.h"

#include <gtest/gtest.h>

#include <thread>

#include "weft/quant/standard_recipes.h"

namespace weft::quant {
namespace {

std::vector<Recipe> standard_recipes() {
  return {
      Float8CurrentScaling{}.recipe(),
      Float8CurrentScaling{.fp8_format = Fp8Format::E4M3, .use_power_2_scales = true}.recipe(),
      Float8BlockScaling{}.recipe(),
      Float8BlockScaling{.use_f32_scales = true, .w_block_scaling_dim = 1}.recipe(),
      MXFP8BlockScaling{.enable_2d_quantization = true, .backward_override = BackwardOverride::dequantized}.recipe(),
      NVFP4BlockScaling{}.recipe(),
      NVFP4BlockScaling{.disable_rht = true,
                        .disable_stochastic_rounding = true,
                        .nvfp4_4over6 = TensorScope::weights,
                        .backward_override = BackwardOverride::high_precision}
          .recipe()};
}

TEST(Recipe, TextDescribesIt) {
  for (const auto& recipe : standard_recipes()) {
    EXPECT_NO_THROW(recipe.check());
    EXPECT_EQ(Recipe::parse(recipe.text()), recipe) << recipe.text();
  }
  EXPECT_EQ(MXFP8BlockScaling{.fp8_format = Fp8Format::HYBRID}.recipe().text(),
            "input(scaling=\"mxfp8\") weight(scaling=\"mxfp8\") grad_output(scaling=\"mxfp8\" format=\"e5m2\") "
            "backward=none");
}

TEST(Recipe, InvalidTextRaises) {
  const auto valid = MXFP8BlockScaling{}.recipe().text();
  for (size_t length = 0; length < valid.size(); ++length)
    EXPECT_THROW(Recipe::parse(valid.substr(0, length)), c10::ValueError) << length;
  EXPECT_THROW(Recipe::parse(valid + " more"), c10::ValueError);
  EXPECT_THROW(Recipe::parse("input(scaling=\"mxfp8\") weight() grad_output() backward=none"), c10::ValueError);
  EXPECT_THROW(Recipe::parse("input(format=\"e2m1\") weight() grad_output() backward=none"), c10::ValueError);
}

TEST(Recipe, EqualRecipesHaveOneId) {
  const auto a = recipe_id(MXFP8BlockScaling{}.recipe()), b = recipe_id(Float8BlockScaling{}.recipe());
  EXPECT_NE(a, b);
  EXPECT_NE(a, 0);
  EXPECT_EQ(recipe_id(MXFP8BlockScaling{}.recipe()), a);
  EXPECT_EQ(*find_recipe(a), MXFP8BlockScaling{}.recipe());
  EXPECT_EQ(find_recipe(0), nullptr);
}

TEST(Recipe, RegionsNestAndBelongToThreads) {
  const auto outer = MXFP8BlockScaling{}.recipe(), inner = Float8CurrentScaling{}.recipe();
  EXPECT_EQ(active_recipe(), 0);
  {
    const Autocast region(outer);
    EXPECT_EQ(active_recipe(), recipe_id(outer));
    {
      const Autocast nested(inner);
      EXPECT_EQ(active_recipe(), recipe_id(inner));
      const Autocast off(std::nullopt);
      EXPECT_EQ(active_recipe(), 0);
    }
    EXPECT_EQ(active_recipe(), recipe_id(outer));
    uint32_t elsewhere = 1;
    std::thread([&] { elsewhere = active_recipe(); }).join();
    EXPECT_EQ(elsewhere, 0);
  }
  EXPECT_EQ(active_recipe(), 0);
}

TEST(Recipe, QuantizersThatDoNotFitRaise) {
  auto recipe = MXFP8BlockScaling{}.recipe();
  recipe.weight = Float8CurrentScaling{}.recipe().weight;
  EXPECT_THROW(recipe.check(), c10::ValueError);
  recipe = NVFP4BlockScaling{}.recipe();
  recipe.grad_output.random_hadamard_transform = false;
  EXPECT_THROW(recipe_id(recipe), c10::ValueError);
  EXPECT_THROW((Float8BlockScaling{.x_block_scaling_dim = 2}.recipe()), c10::ValueError);
}

}  // namespace
}  // namespace weft::quant
