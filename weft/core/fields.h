#pragma once
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "weft/core/errors.h"
#include "weft/core/value.h"

namespace weft {

/// How a field is passed: keyword-only with a default, positional with a default, or required (also positional).
enum class ParamKind { keyword, positional, required };

/// One row of an options struct's field list. The list is the single source of field names: equality, printing, Python
/// keywords, their documentation and the pipeline text are derived from it. The description is one sentence: what the
/// field means, its unit, and what the default does.
template <class Options, class T>
struct Field {
  constexpr Field(const char* name, T Options::* member, const char* description, ParamKind kind = ParamKind::keyword)
      : name(name), member(member), description(description), kind(kind) {}

  const char* name;
  T Options::* member;
  const char* description;
  ParamKind kind;
};

/// A field with its type erased: name, value (or default), kind.
struct FieldValue {
  std::string name;
  Value value;
  ParamKind kind = ParamKind::keyword;
};

/// Type (as a Python annotation) and description of a field. Not in FieldValue, which is copied more often.
struct FieldDoc {
  std::string type;
  std::string description;
};

/// Names of an enum's values, in order. A specialization defines `static constexpr std::array<const char*, N> list`.
template <class E>
struct EnumNames;

namespace detail {

template <class T>
Value to_value(const T& x) {
  if constexpr (std::is_same_v<T, at::ScalarType>) {
    return std::string(dtype_name(x));
  } else if constexpr (std::is_enum_v<T>) {
    return std::string(EnumNames<T>::list[static_cast<size_t>(x)]);
  } else {
    return Value(x);
  }
}
template <class T>
Value to_value(const std::optional<T>& x) {
  return x ? to_value(*x) : Value{};
}

template <class T>
std::string annotation(std::type_identity<T>) {
  if constexpr (std::is_same_v<T, bool>) return "bool";
  if constexpr (std::is_same_v<T, int64_t>) return "int";
  if constexpr (std::is_same_v<T, double>) return "float";
  if constexpr (std::is_same_v<T, std::vector<int64_t>>) return "int | Sequence[int]";
  return "str";  // also dtypes and enums
}
template <class T>
std::string annotation(std::type_identity<std::optional<T>>) {
  return annotation(std::type_identity<T>{}) + " | None";
}

/// Reads a value of the type of `out`; false if it has another type.
template <class T>
  requires(!std::is_enum_v<T>)
bool read_value(const Value& value, T& out) {
  if (const auto* exact = std::get_if<T>(&value)) {
    out = *exact;
    return true;
  }
  if constexpr (std::is_same_v<T, double>) {
    if (const auto* integral = std::get_if<int64_t>(&value)) {
      out = static_cast<double>(*integral);
      return true;
    }
  }
  if constexpr (std::is_same_v<T, std::vector<int64_t>>) {  // an integer is a one-dimensional shape
    if (const auto* one = std::get_if<int64_t>(&value)) {
      out = {*one};
      return true;
    }
  }
  return false;
}
inline bool read_value(const Value& value, at::ScalarType& out) {
  const auto* name = std::get_if<std::string>(&value);
  const auto found = name ? find_dtype(*name) : std::nullopt;
  if (found) out = *found;
  return found.has_value();
}
template <class E>
  requires std::is_enum_v<E>
bool read_value(const Value& value, E& out) {
  const auto& names = EnumNames<E>::list;
  const auto* name = std::get_if<std::string>(&value);
  const auto found = name ? std::find(names.begin(), names.end(), *name) : names.end();
  if (found == names.end()) return false;
  out = static_cast<E>(found - names.begin());
  return true;
}
template <class T>
bool read_value(const Value& value, std::optional<T>& out) {
  if (!std::holds_alternative<std::monostate>(value)) return read_value(value, out.emplace());
  out.reset();
  return true;
}

/// Whether T takes one of a list of names: an enum or a dtype.
template <class T>
inline constexpr bool is_choice = std::is_enum_v<T>;
template <class T>
inline constexpr bool is_choice<std::optional<T>> = is_choice<T>;

template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;

}  // namespace detail

/// What a field of type T takes, for error messages: "an int or None".
template <class T>
std::string expected_text() {
  if constexpr (std::is_same_v<T, bool>) {
    return "True or False";
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return "an int";
  } else if constexpr (std::is_same_v<T, double>) {
    return "a number";
  } else if constexpr (std::is_same_v<T, std::string>) {
    return "a string";
  } else if constexpr (std::is_same_v<T, std::vector<int64_t>>) {
    return "an int or a sequence of ints";
  } else if constexpr (std::is_same_v<T, at::ScalarType>) {
    return kComputeDtypes;
  } else if constexpr (requires { EnumNames<T>::list; }) {
    const auto& names = EnumNames<T>::list;
    return "one of " + join({names.begin(), names.end()});
  } else {
    static_assert(detail::is_optional<T>,
                  "a field is a bool, int64_t, double, std::string, std::vector<int64_t>, at::ScalarType, an enum "
                  "with EnumNames, or a std::optional of one of these");
    return expected_text<typename T::value_type>() + " or None";
  }
}

/// All fields of `options`, in order.
template <class Options>
std::vector<FieldValue> list_fields(const Options& options) {
  std::vector<FieldValue> list;
  std::apply(
      [&](const auto&... field) {
        (list.push_back({field.name, detail::to_value(options.*field.member), field.kind}), ...);
      },
      Options::fields());
  return list;
}

/// Documentation of all fields of `Options`, in order.
template <class Options>
std::vector<FieldDoc> list_field_docs() {
  return std::apply(
      []<class... T>(const Field<Options, T>&... field) {
        return std::vector<FieldDoc>{FieldDoc{detail::annotation(std::type_identity<T>{}), field.description}...};
      },
      Options::fields());
}

/// Sets one field by name. `owner` prefixes error messages.
template <class Options>
void set_field(Options& options, const std::string& owner, const std::string& name, const Value& value) {
  bool known = false;
  const auto one = [&](const auto& field) {
    if (name != field.name) return;
    known = true;
    using T = std::decay_t<decltype(options.*field.member)>;
    if (detail::read_value(value, options.*field.member)) return;
    const auto message = c10::str(owner, ": ", name, " is ", to_text(value), ", expected ", expected_text<T>(), ".");
    TORCH_CHECK_VALUE(!detail::is_choice<T> || !std::holds_alternative<std::string>(value), message);
    TORCH_CHECK_TYPE(false, message);
  };
  std::apply([&](const auto&... field) { (one(field), ...); }, Options::fields());
  if (known) return;
  std::vector<std::string> names;
  for (const auto& field : list_fields(options)) names.push_back(field.name);
  TORCH_CHECK_TYPE(false, owner, " got an unexpected keyword argument '", name, "'.", did_you_mean(name, names),
                   " Arguments: ", join(names), ".");
}

}  // namespace weft
