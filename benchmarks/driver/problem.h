#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "benchmarks/driver/line.h"
#include "benchmarks/driver/measure.h"

namespace bench {

/// A problem with its tensors allocated, ready to run.
struct Case {
  std::vector<Side> sides;  // weft first, then the peers
  std::vector<std::string> results;
  std::function<std::vector<at::Tensor>()> ours;                 // the named results, by weft
  std::function<std::vector<at::Tensor>(at::ScalarType)> plain;  // … by ATen, computed in a dtype
  at::ScalarType dtype;                                          // of the problem
  double flop;                                                   // of its GEMMs
};

/// A kind of problem: its name in a line, its fields for the usage text, and the function that makes a case of a line.
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

/// Relative Frobenius errors of one result by weft and by eager torch, relative to float64 (float32 for large
/// problems).
struct Error {
  std::string what;
  double ours, eager;
};
std::vector<Error> errors(const Case& problem);
/// Whether each error of weft is within the tolerance of the dtype.
bool within_tolerance(const Case& problem, const std::vector<Error>& errors);

}  // namespace bench
