#pragma once
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/driver/problem.h"

namespace bench {

/// The bound in a line: `at_most=0.8`, weft's time over that of a peer, or `at_least=1.6`, the inverse. The peer is the
/// first, or the one given by `against=`.
class Target {
 public:
  explicit Target(const Line& line);

  /// Whether the lower end of the interval exceeds the bound.
  bool missed(const Measured& measured) const;
  const Ratio& ratio(const Measured& measured) const;
  const std::optional<double>& at_most() const { return at_most_; }
  bool inverse() const { return inverse_; }

 private:
  std::optional<double> at_most_;
  bool inverse_ = false;
  std::string against_;
};

void print_errors(const Line& line, const std::vector<Error>& errors, bool correct);

/// Prints each row when it is added and keeps it for a file.
class Report {
 public:
  explicit Report(const Method& method) : method_(method) {}
  void add(const Line& line, const Target& target, const Measured& measured, const std::vector<Error>& errors);
  /// Writes the machine, the method and the rows as JSON.
  void write(const std::string& file) const;

 private:
  std::string json(const Line& line, const Target& target, const Measured& measured,
                   const std::vector<Error>& errors) const;

  Method method_;
  std::vector<std::string> rows_;
};

}  // namespace bench
