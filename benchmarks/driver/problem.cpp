#include "benchmarks/driver/problem.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/sub.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace bench {
namespace {

constexpr double kLargeFlop = 30e9;

std::vector<Kind> kinds() {
  auto all = gemm_kinds();
  for (auto& kind : block_kinds()) all.push_back(std::move(kind));
  for (auto& kind : grouped_kinds()) all.push_back(std::move(kind));
  return all;
}

double norm(const at::Tensor& t) { return at::linalg_vector_norm(t.to(at::kDouble)).item<double>(); }

double distance(const at::Tensor& got, const at::Tensor& exact) {
  TORCH_CHECK(got.sizes() == exact.sizes(), "a result has shape ", got.sizes(), ", expected ", exact.sizes());
  return norm(at::sub(got.detach().to(at::kDouble), exact.detach())) / norm(exact.detach());
}

double tolerance(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return 1e-2;
  return dtype == at::kHalf ? 1.5e-3 : 1e-5;
}

}  // namespace

std::string known_kinds() {
  std::string text;
  for (const auto& kind : kinds()) text += "  " + kind.name + " " + kind.fields + "\n";
  return text;
}

Case make_case(const Line& line) {
  for (const auto& kind : kinds()) {
    if (kind.name != line.kind()) continue;
    auto made = kind.make(line);
    line.finish();
    return made;
  }
  TORCH_CHECK_VALUE(false, line.text(), ": unknown problem kind ", line.kind(), ". Known kinds:\n", known_kinds());
}

std::vector<Error> errors(const Case& problem) {
  const auto exact = problem.plain(problem.flop > kLargeFlop ? at::kFloat : at::kDouble);
  const auto eager = problem.plain(problem.dtype), ours = problem.ours();
  std::vector<Error> out;
  for (size_t i = 0; i < exact.size(); ++i)
    out.push_back({problem.results[i], distance(ours[i], exact[i]), distance(eager[i], exact[i])});
  return out;
}

bool within_tolerance(const Case& problem, const std::vector<Error>& errors) {
  return std::all_of(errors.begin(), errors.end(), [&](const auto& error) {
    return error.ours <= std::max(tolerance(problem.dtype), 1.1 * error.eager);  // false for NaN
  });
}

}  // namespace bench
