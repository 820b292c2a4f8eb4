#pragma once
#include <c10/util/Exception.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace weft {

/// " Did you mean 'bias'?" with the name in `known` that is nearest to `name`; empty if none is near.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& known);

/// "a, b, c"
std::string join(const std::vector<std::string>& names);

/// Throws an error of the type of `error` whose message is "label: message". An error of another type than those of the
/// TORCH_CHECK macros keeps its type and gets the label as context.
[[noreturn]] void rethrow_with_label(const std::string& label, c10::Error& error);

/// Calls `body`; errors that it raises begin with `label`.
template <class Body>
decltype(auto) with_label(const std::string& label, Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (c10::Error& error) {
    rethrow_with_label(label, error);
  }
}

}  // namespace weft
