#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace weft {

/// One value of a description as text, Python keywords and checkpoints see it. Dtypes and enums are words, e.g.
/// "bfloat16".
using Value = std::variant<std::monostate, bool, int64_t, double, std::string, std::vector<int64_t>>;

/// The text of a value; `Parser::value` reads it back to an equal value.
/// none | true | false | 12 | 0.5 | "words" | [1, 2]
std::string to_text(const Value& value);

std::string_view dtype_name(at::ScalarType dtype);
at::ScalarType dtype_from_name(std::string_view name);

/// Reads descriptions from text. Every mistake raises ValueError with the position.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}
  explicit Parser(std::string&&) = delete;  // it does not keep the text

  bool at_end();
  bool accept(std::string_view token);
  void expect(std::string_view token);
  std::string identifier();
  int64_t integer();
  uint64_t unsigned_integer();  // an integer without a sign
  std::string string();         // "in quotes"
  Value value();
  [[noreturn]] void fail(std::string_view expected) const;

 private:
  void skip_space();
  template <class Number>
  std::optional<Number> number();

  std::string_view text_;
  size_t pos_ = 0;
};

}  // namespace weft
