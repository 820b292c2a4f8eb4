#include "weft/kernels/activation.h"

#include <array>
#include <string>
#include <utility>

#include "weft/kernels/opmath.h"
#include "weft/te/bind.h"
#include "weft/te/output.h"
#include "weft/te/strict.h"

namespace weft::te {
namespace {

using kernels::Act;
using kernels::ActKind;

/// The values of the input of `act`.
at::Tensor read_input(const Act& act, py::handle input) {
  auto x = read_values(input);
  const auto half = x.dim() > 0 ? x.size(-1) / 2 : 0;
  TORCH_CHECK_VALUE(x.dim() > 0 && (!act.gated() || x.size(-1) % 2 == 0),
                    "transformer_engine_torch: the input of an activation has shape ", x.sizes(),
                    act.gated() ? ", expected an even last dimension, of which each half is one input of the gate."
                                : ", expected at least one dimension.");
  TORCH_CHECK_VALUE(act.interleave >= 0 && (act.interleave == 0 || half % act.interleave == 0),
                    "transformer_engine_torch: half of the input of a gated activation has ", half,
                    " columns, expected a multiple of glu_interleave_size ", act.interleave, ".");
  return x;
}

// ---- Activations ---------------------------------------------------------------------------------------------------

py::object activation_fwd(const Act& act, py::handle input, py::handle quantizer) {
  auto x = read_input(act, input);
  const auto dtype = x.scalar_type(), computed = computed_dtype(quantizer, dtype);
  {
    const Computing computing;
    x = kernels::activation_forward(act, kernels::as_dtype(x, computed));
  }
  return make_output(x, dtype, quantizer, device_of(input));
}

py::object activation_bwd(const Act& act, py::handle grad, py::handle fwd_input, py::handle quantizer) {
  const auto dy = read_values(grad);
  auto x = read_input(act, fwd_input);
  const auto dtype = x.scalar_type(), computed = computed_dtype(quantizer, dtype);
  {
    const Computing computing;
    x = kernels::activation_backward(act, dy, kernels::as_dtype(x, computed));
  }
  return make_output(x, dtype, quantizer, device_of(fwd_input));
}

/// The gradient of the bias that was added before the activation, and the quantized gradient, in the dtype of `grad`.
py::list activation_bias_bwd(const Act& act, py::handle grad, py::handle fwd_input, py::handle quantizer) {
  const auto dy = read_values(grad), x = read_input(act, fwd_input);
  const auto dtype = dy.scalar_type(), computed = computed_dtype(quantizer, dtype);
  const auto device = device_of(grad);
  kernels::ActivationColumnSums r;
  {
    const Computing computing;
    r = kernels::activation_backward_column_sums(act, dy,
                                                 kernels::as_dtype(x, c10::promoteTypes(x.scalar_type(), computed)));
    r = {kernels::as_dtype(r.dx, computed), kernels::as_dtype(r.column_sums, dtype)};
  }
  py::list out;
  out.append(on_device(r.column_sums, device));
  out.append(make_output(r.dx, dtype, quantizer, device));
  return out;
}

// ---- Activations times one scale per row ---------------------------------------------------------------------------

void check_scaled(const Act& act) {
  require_on_gpu(act.interleave % 32 == 0, "activation times a scale per row",
                 "GPUs require glu_interleave_size to be a multiple of 32, got ", act.interleave, ".");
}

py::object scaled_fwd(const Act& act, py::handle input, const at::Tensor& act_scales, py::handle quantizer) {
  check_scaled(act);
  auto x = read_input(act, input);
  {
    const Computing computing;
    x = kernels::scaled_activation_forward(act, x, host(act_scales));
  }
  return make_output(x, x.scalar_type(), quantizer, device_of(input));
}

/// The gradients of the input, quantized, and of the scales, or None unless `compute_scale_grad`.
py::tuple scaled_bwd(const Act& act, py::handle grad, py::handle fwd_input, const at::Tensor& act_scales,
                     py::handle quantizer, bool compute_scale_grad) {
  check_scaled(act);
  const auto dy = read_values(grad), x = read_input(act, fwd_input);
  const auto device = device_of(fwd_input);
  std::pair<at::Tensor, at::Tensor> r;
  {
    const Computing computing;
    r = kernels::scaled_activation_backward(act, dy, x, host(act_scales), true, compute_scale_grad);
  }
  const auto& [dx, ds] = r;
  return py::make_tuple(make_output(dx, dx.scalar_type(), quantizer, device),
                        ds.defined() ? py::cast(on_device(ds, device)) : py::none());
}

// ---- Names ---------------------------------------------------------------------------------------------------------

Act situglu(double beta1, double beta2, int64_t interleave = 0) {
  return {.kind = ActKind::situglu, .beta1 = beta1, .beta2 = beta2, .interleave = interleave};
}
Act clamped_swiglu(double limit, double alpha, double offset, int64_t interleave = 0) {
  return {.kind = ActKind::clamped_swiglu, .limit = limit, .alpha = alpha, .offset = offset, .interleave = interleave};
}

struct NamedActivation {
  const char* name;
  ActKind kind;
  bool has_bias_grad;
};
constexpr std::array kActivations{
    NamedActivation{"gelu", ActKind::gelu, true},      NamedActivation{"qgelu", ActKind::qgelu, true},
    NamedActivation{"relu", ActKind::relu, true},      NamedActivation{"srelu", ActKind::srelu, true},
    NamedActivation{"silu", ActKind::silu, true},      NamedActivation{"glu", ActKind::glu, false},
    NamedActivation{"geglu", ActKind::geglu, false},   NamedActivation{"qgeglu", ActKind::qgeglu, false},
    NamedActivation{"reglu", ActKind::reglu, false},   NamedActivation{"sreglu", ActKind::sreglu, false},
    NamedActivation{"swiglu", ActKind::swiglu, false},
};

/// f, df and, for unary activations, dbias_df.
void bind_plain_activations(py::module_& m) {
  for (const auto& [name, kind, has_bias_grad] : kActivations) {
    const Act act{.kind = kind};
    m.def(
        name, [act](py::handle input, py::handle quantizer) { return activation_fwd(act, input, quantizer); },
        py::arg("input"), py::arg("quantizer"));
    m.def(("d" + std::string(name)).c_str(),
          [act](py::handle grad, py::handle fwd_input, py::handle quantizer) {
            return activation_bwd(act, grad, fwd_input, quantizer);
          },
          py::arg("grad"), py::arg("fwd_input"), py::arg("quantizer"));
    if (!has_bias_grad) continue;
    m.def(("dbias_d" + std::string(name)).c_str(),
          [act](py::handle grad, py::handle fwd_input, py::handle quantizer) {
            return activation_bias_bwd(act, grad, fwd_input, quantizer);
          },
          py::arg("grad"), py::arg("fwd_input"), py::arg("quantizer"));
  }
}

void bind_parametric_activations(py::module_& m) {
  m.def(
      "situglu",
      [](py::handle input, py::handle quantizer, double beta1, double beta2) {
        return activation_fwd(situglu(beta1, beta2), input, quantizer);
      },
      py::arg("input"), py::arg("quantizer"), py::arg("beta1") = 4.0, py::arg("beta2") = 25.0);
  m.def(
      "dsituglu",
      [](py::handle grad, py::handle fwd_input, py::handle quantizer, double beta1, double beta2) {
        return activation_bwd(situglu(beta1, beta2), grad, fwd_input, quantizer);
      },
      py::arg("grad"), py::arg("fwd_input"), py::arg("quantizer"), py::arg("beta1") = 4.0, py::arg("beta2") = 25.0);
  m.def(
      "clamped_swiglu",
      [](py::handle input, py::handle quantizer, double limit, double alpha, double offset) {
        return activation_fwd(clamped_swiglu(limit, alpha, offset), input, quantizer);
      },
      py::arg("input"), py::arg("quantizer"), py::arg("limit") = 7.0, py::arg("alpha") = 1.702,
      py::arg("glu_linear_offset") = 1.0);
  m.def(
      "clamped_dswiglu",
      [](py::handle grad, py::handle fwd_input, py::handle quantizer, double limit, double alpha, double offset) {
        return activation_bwd(clamped_swiglu(limit, alpha, offset), grad, fwd_input, quantizer);
      },
      py::arg("grad"), py::arg("fwd_input"), py::arg("quantizer"), py::arg("limit") = 7.0, py::arg("alpha") = 1.702,
      py::arg("glu_linear_offset") = 1.0);
}

void bind_scaled_forward(py::module_& m) {
  m.def(
      "scaled_srelu",
      [](py::handle input, const at::Tensor& act_scales, py::handle quantizer) {
        return scaled_fwd({.kind = ActKind::srelu}, input, act_scales, quantizer);
      },
      py::arg("input"), py::arg("act_scales"), py::arg("quantizer"));
  m.def(
      "scaled_swiglu",
      [](py::handle input, const at::Tensor& act_scales, py::handle quantizer, int64_t interleave) {
        return scaled_fwd({.kind = ActKind::swiglu, .interleave = interleave}, input, act_scales, quantizer);
      },
      py::arg("input"), py::arg("act_scales"), py::arg("quantizer"), py::arg("glu_interleave_size") = 0);
  m.def(
      "scaled_situglu",
      [](py::handle input, const at::Tensor& act_scales, py::handle quantizer, double beta1, double beta2,
         int64_t interleave) { return scaled_fwd(situglu(beta1, beta2, interleave), input, act_scales, quantizer); },
      py::arg("input"), py::arg("act_scales"), py::arg("quantizer"), py::arg("beta1") = 4.0, py::arg("beta2") = 25.0,
      py::arg("glu_interleave_size") = 0);
  m.def(
      "scaled_clamped_swiglu",
      [](py::handle input, const at::Tensor& act_scales, py::handle quantizer, double limit, double alpha,
         double offset, int64_t interleave) {
        return scaled_fwd(clamped_swiglu(limit, alpha, offset, interleave), input, act_scales, quantizer);
      },
      py::arg("input"), py::arg("act_scales"), py::arg("quantizer"), py::arg("limit") = 7.0, py::arg("alpha") = 1.702,
      py::arg("glu_linear_offset") = 1.0, py::arg("glu_interleave_size") = 0);
}

void bind_scaled_backward(py::module_& m) {
  m.def(
      "scaled_dsrelu",
      [](py::handle grad, py::handle fwd_input, const at::Tensor& act_scales, py::handle quantizer, bool scale_grad) {
        return scaled_bwd({.kind = ActKind::srelu}, grad, fwd_input, act_scales, quantizer, scale_grad);
      },
      py::arg("grad"), py::arg("fwd_input"), py::arg("act_scales"), py::arg("quantizer"),
      py::arg("compute_scale_grad") = true);
  m.def(
      "scaled_dswiglu",
      [](py::handle grad, py::handle fwd_input, const at::Tensor& act_scales, py::handle quantizer, int64_t interleave,
         bool scale_grad) {
        const Act act{.kind = ActKind::swiglu, .interleave = interleave};
        return scaled_bwd(act, grad, fwd_input, act_scales, quantizer, scale_grad);
      },
      py::arg("grad"), py::arg("fwd_input"), py::arg("act_scales"), py::arg("quantizer"),
      py::arg("glu_interleave_size") = 0, py::arg("compute_scale_grad") = true);
  m.def(
      "scaled_dsituglu",
      [](py::handle grad, py::handle fwd_input, const at::Tensor& act_scales, py::handle quantizer, double beta1,
         double beta2, int64_t interleave, bool scale_grad) {
        return scaled_bwd(situglu(beta1, beta2, interleave), grad, fwd_input, act_scales, quantizer, scale_grad);
      },
      py::arg("grad"), py::arg("fwd_input"), py::arg("act_scales"), py::arg("quantizer"), py::arg("beta1") = 4.0,
      py::arg("beta2") = 25.0, py::arg("glu_interleave_size") = 0, py::arg("compute_scale_grad") = true);
  m.def(
      "scaled_clamped_dswiglu",
      [](py::handle grad, py::handle fwd_input, const at::Tensor& act_scales, py::handle quantizer, double limit,
         double alpha, double offset, int64_t interleave, bool scale_grad) {
        const auto act = clamped_swiglu(limit, alpha, offset, interleave);
        return scaled_bwd(act, grad, fwd_input, act_scales, quantizer, scale_grad);
      },
      py::arg("grad"), py::arg("fwd_input"), py::arg("act_scales"), py::arg("quantizer"), py::arg("limit") = 7.0,
      py::arg("alpha") = 1.702, py::arg("glu_linear_offset") = 1.0, py::arg("glu_interleave_size") = 0,
      py::arg("compute_scale_grad") = true);
}

}  // namespace

void bind_activation(py::module_& m) {
  bind_plain_activations(m);
  bind_parametric_activations(m);
  bind_scaled_forward(m);
  bind_scaled_backward(m);
}

}  // namespace weft::te
