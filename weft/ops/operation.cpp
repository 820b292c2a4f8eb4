#include "weft/ops/operation.h"

#include <cmath>

#include "weft/ops/registry.h"

namespace weft::ops {

Spec Spec::of(const at::Tensor& t) {
  const auto sizes = t.sym_sizes();
  return {{sizes.begin(), sizes.end()}, t.scalar_type()};
}

Spec Spec::with_last(c10::SymInt size) const {
  TORCH_CHECK_VALUE(!sizes.empty(), "input is a scalar, expected at least 1 dimension.");
  Spec other = *this;
  other.sizes.back() = std::move(size);
  return other;
}

static c10::SymInt product(c10::SymIntArrayRef sizes) {
  c10::SymInt product = 1;
  for (const auto& size : sizes) product = product * size;
  return product;
}

c10::SymInt Spec::numel() const { return product(sizes); }
c10::SymInt Spec::rows() const {
  return product(c10::SymIntArrayRef(sizes).slice(0, sizes.empty() ? 0 : sizes.size() - 1));
}

SavedSpec saved_input(const Spec& x, at::ScalarType dtype) {
  return {x.as(dtype), x.dtype == dtype ? SavedFrom::input : SavedFrom::own_memory};
}

bool same_size(const c10::SymInt& a, const c10::SymInt& b) { return a.sym_eq(b).expect_true(__FILE__, __LINE__); }

bool same_sizes(c10::SymIntArrayRef a, c10::SymIntArrayRef b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), same_size);
}

void check_param_dtype(std::string_view op, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(is_compute_dtype(dtype), op, ": dtype is ", dtype_name(dtype), ", expected ", kComputeDtypes, ".");
}

void check_eps(std::string_view op, double eps) {
  TORCH_CHECK_VALUE(std::isfinite(eps) && eps >= 0, op, ": eps is ", eps, ", expected a finite number, 0 or more.");
}

namespace {

template <class Keep>
std::string print(const BasicOp& op, Keep&& keep) {
  std::string arguments;
  for (const auto& field : op.fields())
    if (keep(field)) arguments += (arguments.empty() ? "" : ", ") + field.name + "=" + to_text(field.value);
  return std::string(op.name()) + "(" + arguments + ")";
}

}  // namespace

std::string BasicOp::text() const {
  return print(*this, [](const FieldValue&) { return true; });
}

std::string BasicOp::brief() const {
  const auto type = op_types().find(std::string(name()));
  return print(*this, [&](const FieldValue& field) {
    if (type == op_types().end() || field.kind == ParamKind::required) return true;
    const auto& defaults = type->second.fields;
    return std::none_of(defaults.begin(), defaults.end(), [&](const FieldValue& other) {
      return other.name == field.name && other.value == field.value;
    });
  });
}

static std::map<std::string, OpType>& mutable_types() {
  static std::map<std::string, OpType> types;
  return types;
}

const std::map<std::string, OpType>& op_types() { return mutable_types(); }

void register_op_type(OpType type) {
  auto name = type.name;
  TORCH_CHECK_VALUE(mutable_types().emplace(name, std::move(type)).second, "Operation '", name,
                    "' is already registered.");
}

const OpType& op_type(const std::string& name) {
  const auto found = op_types().find(name);
  if (found != op_types().end()) return found->second;
  std::vector<std::string> known;
  for (const auto& [other, type] : op_types()) known.push_back(other);
  TORCH_CHECK_VALUE(false, "Unknown operation '", name, "'.", did_you_mean(name, known), " Registered: ", join(known),
                    ".");
}

}  // namespace weft::ops
