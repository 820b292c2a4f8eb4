#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace bench {

/// A problem as a line of text: a kind and fields, `gemm m=512 k=1024 n=4096 form=dgrad`. A field that is never read is
/// an error, so that misspelled fields are not ignored.
class Line {
 public:
  explicit Line(const std::string& text);

  const std::string& text() const { return text_; }
  const std::string& kind() const { return kind_; }
  bool has(const std::string& field) const;
  /// A word; must be one of `known`, if given.
  std::string word(const std::string& field, const std::string& fallback,
                   const std::vector<std::string>& known = {}) const;
  int64_t size(const std::string& field) const;
  double number(const std::string& field, double fallback) const;
  at::ScalarType dtype(const std::string& field = "dtype", const std::string& fallback = "bf16") const;
  /// Raises if a field was never read.
  void finish() const;

 private:
  const std::string* find(const std::string& field) const;

  std::string text_, kind_;
  std::map<std::string, std::string> fields_;
  mutable std::set<std::string> read_fields_;
};

}  // namespace bench
