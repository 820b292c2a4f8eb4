#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace weft {

/// A field value as it appears in text, Python keywords and checkpoints. Dtypes and enums are strings, e.g. "bfloat16".
using Value = std::variant<std::monostate, bool, int64_t, double, std::string, std::vector<int64_t>>;

/// The text of a value: none | true | false | 12 | 0.5 | "string" | [1, 2]. `Parser::value` is the inverse.
std::string to_text(const Value& value);

/// The name of a dtype in torch, such as "float32", and its inverse.
std::string_view dtype_name(at::ScalarType dtype);
std::optional<at::ScalarType> find_dtype(const std::string& name);
at::ScalarType dtype_from_name(const std::string& name);

/// The dtypes that operations compute in.
inline constexpr const char* kComputeDtypes = "float32, float64, float16 or bfloat16";
bool is_compute_dtype(at::ScalarType dtype);

/// Parses pipeline text. Syntax errors raise ValueError with the position.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}
  explicit Parser(std::string&&) = delete;  // Parser does not own the text

  bool at_end();
  bool accept(std::string_view token);  // consumes `token` if it comes next
  void expect(std::string_view token);  // raises unless `token` comes next
  std::string identifier();
  int64_t integer();
  uint64_t unsigned_integer();
  std::string string();  // in double quotes
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
