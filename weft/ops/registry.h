#pragma once
#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "weft/ops/operation.h"

namespace weft::ops {

using Keywords = std::vector<std::pair<std::string, Value>>;

/// Documentation of an operation, for Python docstrings and docs/reference.md. `parameters` and `shape` have one line
/// per tensor.
struct OpDoc {
  std::string summary;                               // one sentence with the formula, on one line
  std::string details = {};                          // further sentences
  std::string parameters = {};                       // "weight: ``(size)``, initially ones."
  std::string shape;                                 // "Input: ``(*, size)``."
  std::string example_inputs = "torch.randn(2, 8)";  // of an instance with the required fields of the sample
  std::string example_shape = "[2, 8]";              // of its output
};
/// `OpDoc::shape` of an elementwise operation.
inline constexpr const char* kSameShape = "Input: ``(*)``, any shape.\nOutput: same as the input.";

/// A registered operation: its signature, documentation and factory.
struct OpType {
  std::string name;
  OpDoc doc;
  std::vector<FieldValue> fields;  // with defaults; a `ParamKind::required` field has none
  std::vector<FieldDoc> field_docs;
  std::function<OpPtr(const Keywords&)> make;
  OpPtr sample;  // the instance used by the generic tests
};

/// All registered operations by name.
const std::map<std::string, OpType>& op_types();
/// Raises ValueError with the registered names if `name` is unknown.
const OpType& op_type(const std::string& name);
void register_op_type(OpType type);

/// Registers `Type` under `name`. `base` sets options that are not fields (e.g. the activation kind); `sample` are the
/// options of the instance used by the generic tests.
template <class Type>
struct Register {
  using Options = typename Type::Options;

  Register(const std::string& name, OpDoc doc, Options sample, const Options& base = Options{}) {
    const auto make = [name, base](const Keywords& keywords) -> OpPtr {
      Options options = base;
      for (const auto& [key, value] : keywords) set_field(options, name, key, value);
      for (const auto& field : list_fields(options)) {
        if (field.kind != ParamKind::required) continue;
        const bool found =
            std::any_of(keywords.begin(), keywords.end(), [&](const auto& k) { return k.first == field.name; });
        TORCH_CHECK_TYPE(found, name, ": missing required argument '", field.name, "'.");
      }
      return std::make_shared<Type>(std::move(options));
    };
    register_op_type({name, std::move(doc), list_fields(base), list_field_docs<Options>(), make,
                      std::make_shared<Type>(std::move(sample))});
  }
};

}  // namespace weft::ops
