#include "weft/python/convert.h"
#include "weft/python/module.h"
#include "weft/quant/delayed_scaling.h"
#include "weft/quant/standard_recipes.h"

namespace weft::python {
namespace {

using quant::Quantizer;
using quant::Recipe;

/// A recipe of the library by name: its field names, and how to make it from values.
struct NamedRecipe {
  const char* name;
  py::list (*fields)();  // name, default and description of each option
  Recipe (*make)(const char* name, const py::dict& options);
};

template <class Options>
NamedRecipe named(const char* name) {
  return {name,
          [] {
            const auto fields = list_fields(Options{});
            const auto docs = list_field_docs<Options>();
            py::list list;
            for (size_t i = 0; i < fields.size(); ++i)
              list.append(py::make_tuple(fields[i].name, to_python(fields[i].value), docs[i].description));
            return list;
          },
          [](const char* owner, const py::dict& options) {
            Options values;
            for (const auto& [key, value] : options) {
              const auto field = key.template cast<std::string>();
              set_field(values, owner, field, to_value(std::string(owner) + ": " + field, value));
            }
            auto recipe = values.recipe();
            recipe.check();
            return recipe;
          }};
}

const std::vector<NamedRecipe>& named_recipes() {
  static const std::vector<NamedRecipe> list{
      named<quant::DelayedScaling>("DelayedScaling"), named<quant::Float8CurrentScaling>("Float8CurrentScaling"),
      named<quant::Float8BlockScaling>("Float8BlockScaling"), named<quant::MXFP8BlockScaling>("MXFP8BlockScaling"),
      named<quant::NVFP4BlockScaling>("NVFP4BlockScaling")};
  return list;
}

Recipe make_recipe(const std::string& name, const py::dict& options) {
  for (const auto& entry : named_recipes())
    if (entry.name == name) return entry.make(entry.name, options);
  TORCH_CHECK_VALUE(false, "Recipe: there is no recipe '", name, "'.");
}

/// A recipe of these quantizers.
Recipe combine_quantizers(const Quantizer& input, const Quantizer& weight, const Quantizer& grad_output,
                          const std::optional<std::string>& backward_override) {
  Recipe recipe{input, weight, grad_output};
  if (backward_override)
    TORCH_CHECK_VALUE(detail::read_value(Value(*backward_override), recipe.backward_override),
                      "CustomRecipe: backward_override is '", *backward_override, "', expected ",
                      expected_text<quant::BackwardOverride>(), ".");
  recipe.check();
  return recipe;
}

uint32_t set_active_recipe(uint32_t id) {
  quant::find_recipe(id);  // raises for an unknown one
  return quant::set_active_recipe(id);
}

}  // namespace

void bind_recipes(py::module_& m) {
  py::class_<Recipe>(m, "Recipe", "The quantizers of a linear's tensors.")
      .def(py::init(&combine_quantizers), py::kw_only(), py::arg("input"), py::arg("weight"), py::arg("grad_output"),
           py::arg("backward_override") = py::none())
      .def_readonly("input", &Recipe::input, "The quantizer of the input.")
      .def_readonly("weight", &Recipe::weight, "The quantizer of the weight.")
      .def_readonly("grad_output", &Recipe::grad_output, "The quantizer of the gradient of the output.")
      .def_property_readonly(
          "backward_override",
          [](const Recipe& r) -> std::optional<std::string> {
            const auto value = detail::to_value(r.backward_override);
            const auto* name = std::get_if<std::string>(&value);
            return name ? std::optional(*name) : std::nullopt;
          },
          "What backward multiplies by the gradient, which it then does not quantize; None: quantized tensors.")
      .def_property_readonly("id", &quant::recipe_id, "Identifies the recipe within the process.")
      .def_property_readonly(
          "quoted", [](const Recipe& r) { return to_text(r.text()); }, "As in the text of a call.")
      .def(
          "__eq__", [](const Recipe& a, const Recipe& b) { return a == b; }, py::is_operator())
      .def("__hash__", [](const Recipe& r) { return py::hash(py::str(r.text())); })
      .def("__repr__", [](const Recipe& r) { return "Recipe(" + r.text() + ")"; });
  m.def(
      "recipe_fields",
      [] {
        py::dict fields;
        for (const auto& entry : named_recipes()) fields[entry.name] = entry.fields();
        return fields;
      },
      "Name, default and description of the options of each recipe.");
  m.def("make_recipe", &make_recipe, py::arg("name"), py::arg("options"), "The recipe with this name and options.");
  m.def("make_delayed_state", &quant::make_delayed_state, py::arg("length"), py::arg("tensors"),
        "The state of delayed scaling: float32 [1 + length, tensors], scales of 1, then an empty history.");
  m.def(
      "update_delayed_state",
      [](const at::Tensor& state, const std::optional<at::Tensor>& reduced, float max, double margin,
         const std::string& amax_compute_algo) {
        quant::DelayedScalingUpdate options{.margin = margin};
        TORCH_CHECK_VALUE(detail::read_value(Value(amax_compute_algo), options.amax_compute_algo),
                          "DelayedScaling: amax_compute_algo is '", amax_compute_algo, "', expected ",
                          expected_text<quant::AmaxAlgo>(), ".");
        quant::update_delayed_state(state, reduced.value_or(at::Tensor()), max, options);
      },
      py::arg("state"), py::arg("reduced"), py::arg("max"), py::arg("margin") = 0, py::arg("amax_compute_algo") = "max",
      "Ends a step: moves the maxima to the history and computes new scales.");
  m.def("set_active_recipe", &set_active_recipe, py::arg("id"),
        "Sets the recipe of this thread's calls, 0 for none; returns the earlier one.");
}

}  // namespace weft::python
