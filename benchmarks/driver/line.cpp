#include "benchmarks/driver/line.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

namespace bench {

Line::Line(const std::string& text) : text_(text) {
  std::istringstream words(text);
  words >> kind_;
  for (std::string word; words >> word;) {
    const auto equals = word.find('=');
    TORCH_CHECK_VALUE(equals != std::string::npos, text, ": '", word, "' is not of the form field=value.");
    fields_[word.substr(0, equals)] = word.substr(equals + 1);
  }
}

const std::string* Line::find(const std::string& field) const {
  read_fields_.insert(field);
  const auto found = fields_.find(field);
  return found == fields_.end() ? nullptr : &found->second;
}

bool Line::has(const std::string& field) const { return find(field) != nullptr; }

std::string Line::word(const std::string& field, const std::string& fallback,
                       const std::vector<std::string>& known) const {
  const auto* found = find(field);
  const auto& value = found ? *found : fallback;
  TORCH_CHECK_VALUE(known.empty() || std::find(known.begin(), known.end(), value) != known.end(), text_, ": ", field,
                    " is ", value, ", which is not a valid value for ", kind_, ".");
  return value;
}

int64_t Line::size(const std::string& field) const {
  const auto* found = find(field);
  TORCH_CHECK_VALUE(found, text_, ": ", field, " is missing.");
  return std::stoll(*found);
}

double Line::number(const std::string& field, double fallback) const {
  const auto* found = find(field);
  return found ? std::stod(*found) : fallback;
}

at::ScalarType Line::dtype(const std::string& field, const std::string& fallback) const {
  const auto name = word(field, fallback, {"bf16", "fp16", "fp32"});
  return name == "bf16" ? at::kBFloat16 : name == "fp16" ? at::kHalf : at::kFloat;
}

void Line::finish() const {
  for (const auto& [field, value] : fields_)
    TORCH_CHECK_VALUE(read_fields_.contains(field), text_, ": ", kind_, " has no field ", field, ".");
}

}  // namespace bench
