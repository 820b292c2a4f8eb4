#include "weft/core/errors.h"

#include <algorithm>
#include <cctype>
#include <numeric>
#include <typeinfo>

namespace weft {
namespace {

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return std::tolower(c); });
  return out;
}

/// Edit distance with insertions, deletions and replacements (Levenshtein), regardless of case.
size_t distance(std::string_view first, std::string_view second) {
  const auto a = lower(first), b = lower(second);
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const auto replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = std::exchange(row[j + 1], std::min({row[j] + 1, row[j + 1] + 1, replaced}));
    }
  }
  return row.back();
}

template <class... Types>
void throw_same_type(const std::string& message, const c10::Error& error) {
  ((typeid(error) == typeid(Types) ? throw Types(message, error.backtrace()) : void()), ...);
}

}  // namespace

std::string did_you_mean(std::string_view name, const std::vector<std::string>& known) {
  const std::string* nearest = nullptr;
  auto best = std::max<size_t>(name.size() / 2, 1);  // a name that differs more is unrelated
  for (const auto& other : known) {
    const auto there = distance(name, other);
    if (there > best || (nearest && there == best)) continue;
    best = there;
    nearest = &other;
  }
  return nearest ? " Did you mean '" + *nearest + "'?" : std::string();
}

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

void rethrow_with_label(const std::string& label, c10::Error& error) {
  const auto message = label + ": " + error.what_without_backtrace();
  throw_same_type<c10::Error, c10::ValueError, c10::TypeError, c10::IndexError, c10::NotImplementedError>(message,
                                                                                                          error);
  error.add_context(label);
  throw;
}

}  // namespace weft
