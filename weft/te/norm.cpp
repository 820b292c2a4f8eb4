#include "weft/kernels/norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/result_type.h>

#include <array>
#include <utility>
#include <vector>

#include "weft/kernels/opmath.h"
#include "weft/te/bind.h"
#include "weft/te/dtype.h"
#include "weft/te/output.h"

namespace weft::te {
namespace {

/// x as rows [-1, N] for a weight of N elements.
at::Tensor norm_rows(const char* name, const at::Tensor& x, const at::Tensor& gamma) {
  TORCH_CHECK_VALUE(x.dim() > 0 && gamma.numel() == x.size(-1), name, ": the input has shape ", x.sizes(),
                    ", expected last dimension ", gamma.numel(), ", the size of the weight.");
  return x.reshape({x.size(-1) == 0 ? 0 : x.numel() / x.size(-1), x.size(-1)});
}

/// The weight, or 1 + weight if `zero_centered`, as a float32 vector.
at::Tensor norm_weight(const at::Tensor& weight, bool zero_centered) {
  const auto gamma = kernels::as_dtype(weight, at::kFloat).reshape({-1});
  return zero_centered ? gamma.add(1) : gamma;
}

/// The tensors of a forward call on the CPU.
struct NormInput {
  at::Tensor x, gamma, beta;
  std::vector<int64_t> sizes;
  at::ScalarType dtype;  // of the output
  c10::Device device;

  NormInput(py::handle input, py::handle weight, const std::optional<at::Tensor>& bias, DType otype)
      : x(read_values(input)),
        gamma(read_values(weight)),
        beta(host(bias)),
        sizes(x.sizes().vec()),
        dtype(scalar_type(otype)),
        device(device_of(input)) {}

  /// Prepares the operands of a kernel; it computes in the dtype of x.
  void prepare(const char* name, bool zero_centered, at::ScalarType computed) {
    gamma = norm_weight(gamma, zero_centered);
    if (beta.defined()) beta = norm_weight(beta, false);
    x = kernels::as_dtype(norm_rows(name, x, gamma), c10::promoteTypes(x.scalar_type(), computed));
  }
  py::object output(const at::Tensor& y, py::handle quantizer, py::handle ln_out) const {
    return make_output(y.view(sizes), dtype, quantizer, device, ln_out);
  }
  at::Tensor statistic(const at::Tensor& t) const { return on_device(t.view({-1}), device); }
};

py::list layernorm_fwd(py::handle input, py::handle weight, const std::optional<at::Tensor>& bias, double eps,
                       py::handle ln_out, py::handle quantizer, DType otype, int /*sm_margin*/,
                       bool zero_centered_gamma) {
  NormInput in(input, weight, bias, otype);
  kernels::LayerNormForward r;
  const auto computed = computed_dtype(quantizer, in.dtype);
  {
    const Computing computing;
    in.prepare("layernorm_fwd", zero_centered_gamma, computed);
    r = kernels::layer_norm_forward(in.x, in.gamma, in.beta, eps);
    r.y = kernels::as_dtype(r.y, computed);
  }
  py::list out;
  out.append(in.output(r.y, quantizer, ln_out));
  out.append(in.statistic(r.mean));
  out.append(in.statistic(r.rstd));
  return out;
}

py::list rmsnorm_fwd(py::handle input, py::handle weight, double eps, py::handle ln_out, py::handle quantizer,
                     DType otype, int /*sm_margin*/, bool zero_centered_gamma) {
  NormInput in(input, weight, std::nullopt, otype);
  kernels::RmsNormForward r;
  const auto computed = computed_dtype(quantizer, in.dtype);
  {
    const Computing computing;
    in.prepare("rmsnorm_fwd", zero_centered_gamma, computed);
    r = kernels::rms_norm_forward(in.x, in.gamma, eps);
    r.y = kernels::as_dtype(r.y, computed);
  }
  py::list out;
  out.append(in.output(r.y, quantizer, ln_out));
  out.append(py::none());
  out.append(in.statistic(r.rstd));
  return out;
}

/// The tensors of a backward call on the CPU, as rows.
struct NormGradInput {
  at::Tensor dz, x, rsigma, weight, gamma;
  std::vector<int64_t> sizes;
  c10::Device device;

  NormGradInput(const char* name, const at::Tensor& given_dz, const at::Tensor& given_x, const at::Tensor& given_rsigma,
                const at::Tensor& given_gamma, bool zero_centered)
      : weight(host(given_gamma)), sizes(given_x.sizes().vec()), device(given_x.device()) {
    x = norm_rows(name, host(given_x), weight);
    dz = rows_like_x(name, "the gradient", given_dz);
    rsigma = statistic(name, given_rsigma);
    gamma = norm_weight(weight, zero_centered);
  }
  at::Tensor rows_like_x(const char* name, const char* what, const at::Tensor& t) const {
    TORCH_CHECK_VALUE(t.numel() == x.numel(), name, ": ", what, " has shape ", t.sizes(), ", expected ", sizes,
                      ", the shape of the input.");
    return host(t).reshape(x.sizes());
  }
  at::Tensor statistic(const char* name, const at::Tensor& t) const {
    TORCH_CHECK_VALUE(t.numel() == x.size(0) && t.scalar_type() == at::kFloat, name, ": a statistic is ",
                      t.scalar_type(), " with ", t.numel(), " elements, expected float32 with ", x.size(0),
                      ", one for each row of the input.");
    return host(t).reshape({-1, 1});
  }
  std::vector<at::Tensor> outputs(const kernels::NormGrads& grads) const {
    std::vector<at::Tensor> out{on_device(grads.dx.view(sizes), device)};
    for (const auto& grad : {grads.dgamma, grads.dbeta})
      if (grad.defined())
        out.push_back(on_device(kernels::as_dtype(grad, weight.scalar_type()).view(weight.sizes()), device));
    return out;
  }
};

std::vector<at::Tensor> layernorm_bwd(const at::Tensor& dz, const at::Tensor& x, const at::Tensor& mu,
                                      const at::Tensor& rsigma, const at::Tensor& gamma, int /*sm_margin*/,
                                      bool zero_centered_gamma) {
  const Computing computing;
  const NormGradInput in("layernorm_bwd", dz, x, rsigma, gamma, zero_centered_gamma);
  const auto mean = in.statistic("layernorm_bwd", mu);
  return in.outputs(kernels::layer_norm_backward(in.dz, in.x, mean, in.rsigma, in.gamma, {true, true, true}));
}

std::vector<at::Tensor> rmsnorm_bwd(const at::Tensor& dz, const at::Tensor& x, const at::Tensor& rsigma,
                                    const at::Tensor& gamma, int /*sm_margin*/, bool zero_centered_gamma) {
  const Computing computing;
  const NormGradInput in("rmsnorm_bwd", dz, x, rsigma, gamma, zero_centered_gamma);
  return in.outputs(kernels::rms_norm_backward(in.dz, in.x, in.rsigma, in.gamma, {true, true}));
}

std::vector<at::Tensor> rmsnorm_bwd_add(const at::Tensor& dz, const at::Tensor& x, const at::Tensor& add,
                                        const at::Tensor& rsigma, const at::Tensor& gamma, int /*sm_margin*/,
                                        bool zero_centered_gamma) {
  const Computing computing;
  const NormGradInput in("rmsnorm_bwd_add", dz, x, rsigma, gamma, zero_centered_gamma);
  const auto addend = in.rows_like_x("rmsnorm_bwd_add", "the gradient to add", add);
  return in.outputs(kernels::rms_norm_backward(in.dz, in.x, in.rsigma, in.gamma, {true, true}, addend));
}

}  // namespace

void bind_norm(py::module_& m) {
  m.def("layernorm_fwd", &layernorm_fwd, py::arg("input"), py::arg("weight"), py::arg("bias"), py::arg("eps"),
        py::arg("ln_out"), py::arg("quantizer"), py::arg("otype"), py::arg("sm_margin"),
        py::arg("zero_centered_gamma"));
  m.def("rmsnorm_fwd", &rmsnorm_fwd, py::arg("input"), py::arg("weight"), py::arg("eps"), py::arg("ln_out"),
        py::arg("quantizer"), py::arg("otype"), py::arg("sm_margin"), py::arg("zero_centered_gamma"));
  m.def("layernorm_bwd", &layernorm_bwd, py::arg("dz"), py::arg("x"), py::arg("mu"), py::arg("rsigma"),
        py::arg("gamma"), py::arg("sm_margin"), py::arg("zero_centered_gamma"));
  m.def("rmsnorm_bwd", &rmsnorm_bwd, py::arg("dz"), py::arg("x"), py::arg("rsigma"), py::arg("gamma"),
        py::arg("sm_margin"), py::arg("zero_centered_gamma"));
  m.def("rmsnorm_bwd_add", &rmsnorm_bwd_add, py::arg("dz"), py::arg("x"), py::arg("add"), py::arg("rsigma"),
        py::arg("gamma"), py::arg("sm_margin"), py::arg("zero_centered_gamma"));
}

}  // namespace weft::te
