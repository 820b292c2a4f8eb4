#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "benchmarks/driver/line.h"
#include "benchmarks/driver/measure.h"

namespace bench {

/// What a line asks for, set up: tensors made, ready to run.
struct Case {
  std::vector<Side> sides;  // weft first, then the peers
  std::vector<std::string> results;
  std::function<std::vector<at::Tensor>()> ours;                 // the named results, by weft
  std::function<std::vector<at::Tensor>(at::ScalarType)> plain;  // … by plain ATen, computed in a dtype
  at::ScalarType dtype;                                          // of the problem
  double flop;                                                   // of its products
};

/// A kind of problem: its name in a line, its fields for the reader, and how a line becomes a case.
struct Kind {
  std::string name, fields;
  std::function<Case(const Line&)> make;
};

/// linear_gelu, gemm, wgrad.
std::vector<Kind> gemm_kinds();
/// block.
std::vector<Kind> block_kinds();
/// grouped.
std::vector<Kind> grouped_kinds();

Case make_case(const Line& line);
std::string known_kinds();

/// Relative Frobenius error of one result against float64 (float32 if the problem is large): weft's and eager's.
struct Error {
  std::string what;
  double ours, eager;
};
std::vector<Error> errors(const Case& problem);
/// Whether each is as small as its dtype allows.
bool within_tolerance(const Case& problem, const std::vector<Error>& errors);

}  // namespace bench
