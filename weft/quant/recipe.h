#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "weft/quant/quantizer.h"

namespace weft::quant {

/// What backward multiplies by dy, which it then does not quantize: x and W as they were before quantization, or their
/// dequantized values.
enum class BackwardOverride { high_precision, dequantized };

/// How the tensors of a linear are quantized: x, W and dy. A value: it is part of plan keys and of the text of a call.
struct Recipe {
  Quantizer input, weight, grad_output;
  std::optional<BackwardOverride> backward_override = {};

  bool operator==(const Recipe&) const = default;
  /// Whether calls need the state of delayed scaling (delayed_scaling.h).
  bool is_delayed() const { return weight.scaling == Scaling::delayed; }
  /// Raises ValueError for quantizers that their GEMMs do not take together.
  void check() const;
  /// The fields that differ from their defaults; `parse` is the inverse.
  std::string text() const;
  static Recipe parse(std::string_view text);
};

/// Identifies a recipe within the process: equal recipes have one id, which is never 0.
uint32_t recipe_id(const Recipe& recipe);
/// The recipe of an id; nullptr for 0. Valid until the process exits.
const Recipe* find_recipe(uint32_t id);

/// The id of the recipe that calls of this thread use; 0: they are not quantized.
uint32_t active_recipe();
/// Returns the earlier one.
uint32_t set_active_recipe(uint32_t id);

/// Quantizes the linears of calls in its scope; without a recipe they are not quantized.
class Autocast {
 public:
  explicit Autocast(const std::optional<Recipe>& recipe)
      : before_(set_active_recipe(recipe ? recipe_id(*recipe) : 0)) {}
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast() { set_active_recipe(before_); }

 private:
  uint32_t before_;
};

}  // namespace weft::quant

template <>
struct weft::EnumNames<weft::quant::BackwardOverride> {
  static constexpr std::array<const char*, 2> list = {"high_precision", "dequantized"};
};
