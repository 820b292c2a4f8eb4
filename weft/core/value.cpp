#include "weft/core/value.h"

#include <c10/util/Exception.h>

#include <array>
#include <cctype>
#include <charconv>
#include <utility>

namespace weft {
namespace {

/// The shortest text that parses back to x, with ".0" if it would otherwise be read as an integer.
std::string format_double(double x) {
  std::array<char, 40> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), x).ptr;
  std::string text(buffer.data(), end);
  const bool only_digits = text.find_first_not_of("-0123456789") == std::string::npos;
  return only_digits ? text + ".0" : text;
}

std::string quote(const std::string& content) {
  std::string text = "\"";
  for (const char c : content) {
    if (c == '"' || c == '\\') text += '\\';
    text += c;
  }
  return text + '"';
}

template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};

}  // namespace

std::string to_text(const Value& value) {
  return std::visit(
      Overloaded{[](std::monostate) { return std::string("none"); },
                 [](bool x) { return std::string(x ? "true" : "false"); }, [](int64_t x) { return std::to_string(x); },
                 [](double x) { return format_double(x); }, [](const std::string& x) { return quote(x); },
                 [](const std::vector<int64_t>& x) { return c10::str(c10::IntArrayRef(x)); }},
      value);
}

std::string_view dtype_name(at::ScalarType dtype) {
  return dtype == at::ScalarType::Undefined ? "undefined" : c10::getDtypeNames(dtype).first;
}

std::optional<at::ScalarType> find_dtype(const std::string& name) {
  const auto& known = c10::getStringToDtypeMap();
  const auto found = known.find(name);
  return found == known.end() ? std::nullopt : std::optional(found->second);
}

at::ScalarType dtype_from_name(const std::string& name) {
  const auto found = find_dtype(name);
  TORCH_CHECK_VALUE(found, "weft: unknown dtype '", name, "'; expected ", kComputeDtypes, ".");
  return *found;
}

bool is_compute_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble;
}

void Parser::skip_space() {
  while (pos_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[pos_]))) ++pos_;
}

bool Parser::at_end() {
  skip_space();
  return pos_ == text_.size();
}

bool Parser::accept(std::string_view token) {
  skip_space();
  if (text_.substr(pos_, token.size()) != token) return false;
  pos_ += token.size();
  return true;
}

void Parser::expect(std::string_view token) {
  if (!accept(token)) fail(token);
}

std::string Parser::identifier() {
  skip_space();
  const auto begin = pos_;
  while (pos_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[pos_])) || text_[pos_] == '_')) ++pos_;
  if (pos_ == begin) fail("a name");
  return std::string(text_.substr(begin, pos_ - begin));
}

/// Parses the text up to the next separator as a number; nullopt if it is not one.
template <class Number>
std::optional<Number> Parser::number() {
  skip_space();
  const auto end = std::min(text_.find_first_of(",)]; \n", pos_), text_.size());
  const char *first = text_.data() + pos_, *last = text_.data() + end;
  Number parsed = 0;
  const auto [stop, error] = std::from_chars(first, last, parsed);
  if (error != std::errc{} || stop != last) return std::nullopt;
  pos_ = end;
  return parsed;
}

int64_t Parser::integer() {
  const auto parsed = number<int64_t>();
  if (!parsed) fail("an integer");
  return *parsed;
}

uint64_t Parser::unsigned_integer() {
  const auto parsed = number<uint64_t>();
  if (!parsed) fail("an unsigned integer");
  return *parsed;
}

std::string Parser::string() {
  std::string content;
  for (expect("\""); pos_ < text_.size() && text_[pos_] != '"'; ++pos_) {
    if (text_[pos_] == '\\') ++pos_;
    if (pos_ < text_.size()) content += text_[pos_];
  }
  expect("\"");
  return content;
}

Value Parser::value() {
  skip_space();
  if (accept("none")) return std::monostate{};
  if (accept("true")) return true;
  if (accept("false")) return false;
  if (pos_ < text_.size() && text_[pos_] == '"') return string();
  if (accept("[")) {
    std::vector<int64_t> items;
    while (!accept("]")) {
      if (!items.empty()) expect(",");
      items.push_back(integer());
    }
    return items;
  }
  if (const auto integral = number<int64_t>()) return *integral;
  if (const auto real = number<double>()) return *real;
  fail("a value");
}

void Parser::fail(std::string_view expected) const {
  TORCH_CHECK_VALUE(false, "Pipeline text: expected ", expected, " at position ", pos_, ", found '",
                    text_.substr(pos_, 20), "'.");
}

}  // namespace weft
