#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/ones.h>

#include <limits>

#include "weft/te/bind.h"
#include "weft/te/host.h"

// Softmax of scaled and masked scores, computed in float32 and rounded once.

namespace weft::te {
namespace {

constexpr double kMaskedScore = -10000;

at::Tensor checked_scores(const at::Tensor& x, const char* name, int64_t dims) {
  TORCH_CHECK_VALUE(x.dim() == dims, name, ": input has shape ", x.sizes(), ", expected ", dims, " dimensions.");
  TORCH_CHECK_TYPE(at::isFloatingType(x.scalar_type()), name, ": input has dtype ", x.scalar_type(),
                   ", expected float16, bfloat16 or float32.");
  return host(x);
}

at::Tensor scaled_scores(const at::Tensor& x, double scale) { return x.to(at::kFloat).mul(scale); }

at::Tensor scaled_softmax_forward(const at::Tensor& x, double scale) {
  const auto scores = checked_scores(x, "scaled_softmax_forward", 4);
  return on_device(at::_softmax(scaled_scores(scores, scale), -1, false).to(x.scalar_type()), x.device());
}

/// A masked score is -10000, not -inf; a row that is masked altogether is 0.
at::Tensor masked_softmax_forward(const at::Tensor& x, const at::Tensor& mask, double scale) {
  constexpr auto kName = "scaled_masked_softmax_forward";
  const auto scores = checked_scores(x, kName, 4);
  const bool fits = mask.dim() == 4 && (mask.size(0) == 1 || mask.size(0) == x.size(0)) && mask.size(1) == 1 &&
                    mask.size(2) == x.size(2) && mask.size(3) == x.size(3);
  TORCH_CHECK_VALUE(fits, kName, ": mask has shape ", mask.sizes(), ", expected [1 or ", x.size(0), ", 1, ", x.size(2),
                    ", ", x.size(3), "] for an input of shape ", x.sizes(), ".");
  const auto hidden = host(mask).to(at::kBool);
  const auto masked = scaled_scores(scores, scale).masked_fill_(hidden, kMaskedScore);
  const auto empty = masked.amax(-1, /*keepdim=*/true).eq(kMaskedScore);
  return on_device(at::_softmax(masked, -1, false).masked_fill_(empty, 0).to(x.scalar_type()), x.device());
}

/// Query i sees the keys up to i + keys - queries, which aligns the last query to the last key; hidden keys are 0.
at::Tensor causal_softmax_forward(const at::Tensor& x, double scale, const char* name, int64_t dims) {
  const auto scores = checked_scores(x, name, dims);
  const auto queries = x.size(-2), keys = x.size(-1);
  const auto hidden = at::ones({queries, keys}, at::kBool).triu(1 + keys - queries);
  const auto masked = scaled_scores(scores, scale).masked_fill_(hidden, -std::numeric_limits<double>::infinity());
  return on_device(at::_softmax(masked, -1, false).masked_fill_(hidden, 0).to(x.scalar_type()), x.device());
}

at::Tensor upper_triangle_softmax_forward(const at::Tensor& x, double scale) {
  constexpr auto kName = "scaled_upper_triang_masked_softmax_forward";
  TORCH_CHECK_VALUE(x.dim() == 3 && x.size(1) == x.size(2), kName, ": input has shape ", x.sizes(),
                    ", expected [batch, rows, rows].");
  return causal_softmax_forward(x, scale, kName, 3);
}

at::Tensor aligned_causal_softmax_forward(const at::Tensor& x, double scale) {
  return causal_softmax_forward(x, scale, "scaled_aligned_causal_masked_softmax_forward", 4);
}

/// dx = scale·y·(dy - Σ dy·y). Hidden scores have y = 0.
at::Tensor scaled_softmax_backward(const at::Tensor& dy, const at::Tensor& y, double scale) {
  TORCH_CHECK_VALUE(dy.sizes() == y.sizes(), "softmax backward: the gradient has shape ", dy.sizes(),
                    ", the result of forward ", y.sizes(), "; expected equal shapes.");
  const auto dx = at::_softmax_backward_data(host(dy).to(at::kFloat), host(y).to(at::kFloat), -1, at::kFloat);
  return on_device(dx.mul(scale).to(dy.scalar_type()), dy.device());
}

}  // namespace

void bind_softmax(py::module_& m) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  const auto input = py::arg("input"), scale = py::arg("scale_factor");
  m.def("scaled_softmax_forward", scaled_softmax_forward, input, scale, release);
  m.def("scaled_masked_softmax_forward", masked_softmax_forward, input, py::arg("mask"), scale, release);
  m.def("scaled_upper_triang_masked_softmax_forward", upper_triangle_softmax_forward, input, scale, release);
  m.def("scaled_aligned_causal_masked_softmax_forward", aligned_causal_softmax_forward, input, scale, release);
  for (const auto* name :
       {"scaled_softmax_backward", "scaled_masked_softmax_backward", "scaled_upper_triang_masked_softmax_backward",
        "scaled_aligned_causal_masked_softmax_backward"})
    m.def(name, scaled_softmax_backward, py::arg("output_grad"), py::arg("softmax_results"), scale, release);
}

}  // namespace weft::te
