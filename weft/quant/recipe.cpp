#include "weft/quant/recipe.h"

#include <deque>
#include <mutex>

namespace weft::quant {
namespace {

struct Role {
  const char* name;
  Quantizer Recipe::* quantizer;
};
constexpr std::array kRoles{Role{"input", &Recipe::input}, Role{"weight", &Recipe::weight},
                            Role{"grad_output", &Recipe::grad_output}};

/// The fields that differ from their defaults: "scaling=\"mxfp8\" format=\"e5m2\"".
std::string fields_text(const Quantizer& quantizer) {
  const auto fields = list_fields(quantizer), defaults = list_fields(Quantizer{});
  std::string text;
  for (size_t i = 0; i < fields.size(); ++i)
    if (fields[i].value != defaults[i].value)
      text.append(text.empty() ? "" : " ").append(fields[i].name).append("=").append(to_text(fields[i].value));
  return text;
}

Quantizer parse_fields(Parser& parser) {
  Quantizer quantizer;
  while (!parser.accept(")")) {
    const auto name = parser.identifier();
    parser.expect("=");
    set_field(quantizer, "Quantizer", name, parser.value());
  }
  return quantizer;
}

struct Table {
  std::mutex mutex;
  std::deque<Recipe> recipes;  // id - 1 is the index; elements do not move
};
Table& table() {
  static auto* instance = new Table;  // plans point into it until the process exits
  return *instance;
}

thread_local uint32_t active = 0;

}  // namespace

void Recipe::check() const {
  for (const auto& role : kRoles) (this->*role.quantizer).check();
  const auto fit = [](const Quantizer& a, const Quantizer& b) {
    const bool free_scales = a.scaling == Scaling::block && !a.power_of_2_scales;
    return a.scaling == b.scaling && free_scales == (b.scaling == Scaling::block && !b.power_of_2_scales);
  };
  TORCH_CHECK_VALUE(fit(input, weight) && fit(grad_output, weight),
                    "Recipe: the quantizers of input, weight and grad_output must have the same scaling and the same "
                    "power_of_2_scales, since their GEMMs combine them.");
  TORCH_CHECK_VALUE(!weight.random_hadamard_transform,
                    "Recipe: the weight has a random_hadamard_transform, which applies to input and grad_output only.");
  TORCH_CHECK_VALUE(input.random_hadamard_transform == grad_output.random_hadamard_transform,
                    "Recipe: random_hadamard_transform applies to both input and grad_output, or to none.");
  TORCH_CHECK_VALUE(!is_delayed() || !backward_override,
                    "Recipe: backward_override is not supported with delayed scaling.");
  TORCH_CHECK_NOT_IMPLEMENTED(!input.row_scaled && !grad_output.row_scaled && !weight.row_scaled,
                              "Recipe: row_scaled quantizers are not supported in operations yet.");
  TORCH_CHECK_VALUE(!input.stochastic_rounding && !weight.stochastic_rounding,
                    "Recipe: stochastic_rounding applies to grad_output only.");
}

std::string Recipe::text() const {
  std::string text;
  for (const auto& role : kRoles) text.append(role.name).append("(").append(fields_text(this->*role.quantizer)) += ") ";
  return text + "backward=" + to_text(detail::to_value(backward_override));
}

Recipe Recipe::parse(std::string_view text) {
  Parser parser(text);
  Recipe recipe;
  for (const auto& role : kRoles) {
    parser.expect(role.name);
    parser.expect("(");
    recipe.*role.quantizer = parse_fields(parser);
  }
  parser.expect("backward=");
  if (!detail::read_value(parser.value(), recipe.backward_override))
    parser.fail(expected_text<std::optional<BackwardOverride>>());
  if (!parser.at_end()) parser.fail("the end of the recipe");
  recipe.check();
  return recipe;
}

uint32_t recipe_id(const Recipe& recipe) {
  recipe.check();
  auto& t = table();
  const std::lock_guard lock(t.mutex);
  const auto found = std::find(t.recipes.begin(), t.recipes.end(), recipe);
  if (found != t.recipes.end()) return static_cast<uint32_t>(found - t.recipes.begin()) + 1;
  t.recipes.push_back(recipe);
  return static_cast<uint32_t>(t.recipes.size());
}

const Recipe* find_recipe(uint32_t id) {
  if (id == 0) return nullptr;
  auto& t = table();
  const std::lock_guard lock(t.mutex);
  TORCH_CHECK_INDEX(id <= t.recipes.size(), "Recipe: there is no recipe with id ", id, ".");
  return &t.recipes[id - 1];
}

uint32_t active_recipe() { return active; }
uint32_t set_active_recipe(uint32_t id) { return std::exchange(active, id); }

}  // namespace weft::quant
