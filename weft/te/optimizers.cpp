#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>

#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "weft/kernels/optimizer.h"
#include "weft/te/bind.h"
#include "weft/te/dtype.h"
#include "weft/te/host.h"
#include "weft/te/strict.h"

// The optimizers and functions of lists of tensors: `lists[k][i]` is tensor k of parameter i. GPUs divide the work into
// chunks of `chunk_size` elements; weft has no use for it.

namespace weft::te {
namespace {

using TensorLists = std::vector<std::vector<at::Tensor>>;
using Row = std::vector<at::Tensor>;  // the tensors of one parameter, contiguous on the CPU

bool is_step_dtype(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf; }

/// What a function expects of one of its lists.
struct ListSpec {
  const char* name;
  std::optional<at::ScalarType> dtype = {};  // none: float32, bfloat16 or float16
  bool written = true;
  bool scalar = false;  // one element per tensor instead of as many as the first list has
};

void check_tensor_lists(const char* who, const TensorLists& lists, const std::vector<ListSpec>& specs) {
  TORCH_CHECK_VALUE(lists.size() == specs.size(), who, ": got ", lists.size(), " lists of tensors, expected ",
                    specs.size(), ".");
  for (size_t k = 0; k < lists.size(); ++k) {
    const auto& spec = specs[k];
    TORCH_CHECK_VALUE(lists[k].size() == lists[0].size(), who, ": the list of ", spec.name, " has ", lists[k].size(),
                      " tensors, expected ", lists[0].size(), ", as many as that of ", specs[0].name, ".");
    for (size_t i = 0; i < lists[k].size(); ++i) {
      const auto& t = lists[k][i];
      TORCH_CHECK_VALUE(t.defined() && t.layout() == c10::kStrided, who, ": ", spec.name, " ", i,
                        " is not a dense tensor.");
      const auto dtype = t.scalar_type();
      TORCH_CHECK_TYPE(spec.dtype ? dtype == *spec.dtype : is_step_dtype(dtype), who, ": ", spec.name, " ", i, " is ",
                       dtype, ", expected ", spec.dtype ? c10::toString(*spec.dtype) : "float32, bfloat16 or float16",
                       ".");
      const auto expected = spec.scalar ? 1 : lists[0][i].numel();
      TORCH_CHECK_VALUE(t.numel() == expected, who, ": ", spec.name, " ", i, " has shape ", t.sizes(), ", expected ",
                        expected, expected == 1 ? " element." : " elements.");
    }
  }
}

/// Calls step(tensors, i) for each parameter i that has elements, and copies what it wrote to the caller's tensors.
template <class F>
void for_each_parameter(const char* who, const TensorLists& lists, const std::vector<ListSpec>& specs, const F& step) {
  const at::NoGradGuard no_grad;
  check_tensor_lists(who, lists, specs);
  for (size_t i = 0; i < lists[0].size(); ++i) {
    if (lists[0][i].numel() == 0) continue;
    Row hosts, dense;
    for (const auto& list : lists) {
      hosts.push_back(host(list[i]));
      dense.push_back(hosts.back().contiguous());
    }
    step(dense, i);
    for (size_t k = 0; k < lists.size(); ++k)
      if (specs[k].written && !dense[k].is_same(hosts[k])) hosts[k].copy_(dense[k]);
  }
}

/// The value of a tensor with one element.
double value_of(const char* who, const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.defined() && t.numel() == 1, who, ": ", name, " must be a tensor with one element.");
  return host(t).item().toDouble();
}

void set_flag(const at::Tensor& flag) {
  const at::NoGradGuard no_grad;
  if (flag.defined() && flag.numel() > 0) host(flag).flatten()[0].fill_(1);
}

// ---- Adam --------------------------------------------------------------------------------------------------------

/// What the Adam of a GPU requires of the tensors of a call.
void check_adam_limits(const char* who, const TensorLists& lists) {
  for (const auto& gradient : lists.at(0))
    require_on_gpu(gradient.scalar_type() == lists[0][0].scalar_type(), who,
                   "GPUs require gradients of one dtype in a call, got ", lists[0][0].scalar_type(), " and ",
                   gradient.scalar_type(), ".");
}

/// The arguments that all variants of Adam share.
struct AdamArgs {
  double lr, beta1, beta2, epsilon;
  double step;
  int mode, bias_correction;  // mode 0: Adam, 1: AdamW
  double weight_decay;
  double inv_scale = 1;

  kernels::AdamOptions options() const {
    const auto correction = [this](double beta) {
      return bias_correction ? static_cast<float>(1 - std::pow(static_cast<float>(beta), step)) : 1.F;
    };
    return {.lr = static_cast<float>(lr),
            .beta1 = static_cast<float>(beta1),
            .beta2 = static_cast<float>(beta2),
            .eps = static_cast<float>(epsilon),
            .weight_decay = static_cast<float>(weight_decay),
            .correction1 = correction(beta1),
            .correction2 = correction(beta2),
            .decoupled = mode == 1,
            .grad_scale = static_cast<float>(inv_scale)};
  }
};

const ListSpec kGrad{.name = "gradient", .written = false}, kScaledGrad{.name = "gradient"},
    kParam{.name = "parameter"}, kExpAvg{.name = "exp_avg"}, kExpAvgSq{.name = "exp_avg_sq"},
    kMaster{.name = "master weight", .dtype = at::kFloat};

kernels::AdamTensors adam_tensors(const Row& t) { return {t[0], t[1], t[2], t[3]}; }

/// `lists`: gradients, parameters, exp_avg, exp_avg_sq, and with `master` the float32 weights.
void adam(const char* who, const TensorLists& lists, const AdamArgs& args, bool master, bool scales_grad) {
  std::vector<ListSpec> specs{scales_grad ? kScaledGrad : kGrad, kParam, kExpAvg, kExpAvgSq};
  if (master) specs.push_back(kMaster);
  check_adam_limits(who, lists);
  const auto options = args.options();
  for_each_parameter(who, lists, specs, [&](const Row& t, size_t) {
    kernels::adam_step(adam_tensors(t), options, master ? t[4] : at::Tensor());
  });
}

void adam_split(const TensorLists& lists, const AdamArgs& args) {
  const ListSpec param{.name = "parameter", .dtype = at::kBFloat16}, rest{.name = "remainder", .dtype = at::kShort};
  const auto options = args.options();
  for_each_parameter("multi_tensor_adam_param_remainder", lists, {kGrad, param, kExpAvg, kExpAvgSq, rest},
                     [&](const Row& t, size_t) { kernels::adam_step_split(adam_tensors(t), options, t[4]); });
}

/// The codes of a quantized parameter, which has a dtype of float8 or of bytes, as bytes.
TensorLists with_bytes(TensorLists lists) {
  if (lists.size() > 1)
    for (auto& t : lists[1])
      if (at::isFloat8Type(t.scalar_type())) t = t.view(at::kByte);
  return lists;
}

void adam_quantized(const TensorLists& lists, const AdamArgs& args, DType fp8_dtype) {
  const char* who = "multi_tensor_adam_fp8";
  TORCH_CHECK_VALUE(fp8_dtype == DType::float8_e4m3 || fp8_dtype == DType::float8_e5m2, who, ": fp8_dtype is ",
                    static_cast<int>(fp8_dtype), ", expected DType.kFloat8E4M3 or DType.kFloat8E5M2.");
  const auto format = fp8_dtype == DType::float8_e4m3 ? Format::e4m3 : Format::e5m2;
  const auto scalar = [](const char* name, bool written) {
    return ListSpec{.name = name, .dtype = at::kFloat, .written = written, .scalar = true};
  };
  check_adam_limits(who, lists);
  for (size_t i = 2; i < std::min<size_t>(lists.size(), 4); ++i)
    for (const auto& moment : lists[i])
      require_on_gpu(moment.scalar_type() == at::kFloat, who, "GPUs require moments in float32, got ",
                     moment.scalar_type(), ".");
  const auto options = args.options();
  for_each_parameter(who, with_bytes(lists),
                     {kGrad,
                      {.name = "parameter", .dtype = at::kByte},
                      kExpAvg,
                      kExpAvgSq,
                      kMaster,
                      scalar("scale", false),
                      scalar("amax", true),
                      scalar("scale_inv", true)},
                     [&](const Row& t, size_t) {
                       const auto scale = *t[5].const_data_ptr<float>();
                       const auto amax = kernels::adam_step_quantized(adam_tensors(t), options, t[4], scale, format);
                       auto& seen = *t[6].data_ptr<float>();
                       seen = std::fmax(seen, amax);
                       *t[7].data_ptr<float>() = 1 / scale;
                     });
}

/// Binds run(lists, args).
template <class F>
void bind_adam(py::module_& m, const char* name, const F& run) {
  m.def(
      name,
      [run](int64_t, const at::Tensor&, const TensorLists& lists, double lr, double beta1, double beta2, double epsilon,
            int64_t step, int mode, int bias_correction, double weight_decay) {
        run(lists, {lr, beta1, beta2, epsilon, static_cast<double>(step), mode, bias_correction, weight_decay});
      },
      py::arg("chunk_size"), py::arg("noop_flag"), py::arg("tensor_lists"), py::arg("lr"), py::arg("beta1"),
      py::arg("beta2"), py::arg("epsilon"), py::arg("step"), py::arg("mode"), py::arg("bias_correction"),
      py::arg("weight_decay"), py::call_guard<py::gil_scoped_release>());
}

void bind_quantized_adam(py::module_& m) {
  m.def(
      "multi_tensor_adam_fp8",
      [](int64_t, const at::Tensor&, const TensorLists& lists, double lr, double beta1, double beta2, double epsilon,
         int64_t step, int mode, int bias_correction, double weight_decay, DType fp8_dtype) {
        adam_quantized(lists,
                       {lr, beta1, beta2, epsilon, static_cast<double>(step), mode, bias_correction, weight_decay},
                       fp8_dtype);
      },
      py::arg("chunk_size"), py::arg("noop_flag"), py::arg("tensor_lists"), py::arg("lr"), py::arg("beta1"),
      py::arg("beta2"), py::arg("epsilon"), py::arg("step"), py::arg("mode"), py::arg("bias_correction"),
      py::arg("weight_decay"), py::arg("fp8_dtype"), py::call_guard<py::gil_scoped_release>());
}

/// The variants whose learning rate, step and scale are tensors, and which do nothing if `noop_flag` is 1.
void bind_capturable_adam(py::module_& m, const char* name, bool master) {
  m.def(
      name,
      [name, master](int64_t, const at::Tensor& noop_flag, const TensorLists& lists, const at::Tensor& lr, double beta1,
                     double beta2, double epsilon, const at::Tensor& step, int mode, int bias_correction,
                     double weight_decay, const at::Tensor& inv_scale) {
        if (value_of(name, "noop_flag", noop_flag) == 1) return;
        adam(name, lists,
             {value_of(name, "lr", lr), beta1, beta2, epsilon, value_of(name, "step", step), mode, bias_correction,
              weight_decay, value_of(name, "inv_scale", inv_scale)},
             master, true);
      },
      py::arg("chunk_size"), py::arg("noop_flag"), py::arg("tensor_lists"), py::arg("lr"), py::arg("beta1"),
      py::arg("beta2"), py::arg("epsilon"), py::arg("step"), py::arg("mode"), py::arg("bias_correction"),
      py::arg("weight_decay"), py::arg("inv_scale"), py::call_guard<py::gil_scoped_release>());
}

// ---- SGD ---------------------------------------------------------------------------------------------------------

/// `lists`: gradients, weights, momenta, and optionally float16 copies of the weights.
void sgd(const at::Tensor& noop_flag, const TensorLists& lists, const kernels::SgdOptions& options) {
  const char* who = "multi_tensor_sgd";
  if (value_of(who, "noop_flag", noop_flag) != 0) return;
  std::vector<ListSpec> specs{kGrad, kParam, {.name = "momentum"}};
  if (lists.size() == 4) specs.push_back({.name = "copy of a parameter", .dtype = at::kHalf});
  for_each_parameter(who, lists, specs, [&](const Row& t, size_t) {
    kernels::sgd_step({t[0], t[1], t[2]}, options, t.size() == 4 ? t[3] : at::Tensor());
  });
}

void bind_sgd(py::module_& m) {
  m.def(
      "multi_tensor_sgd",
      [](int64_t, const at::Tensor& noop_flag, const TensorLists& lists, float wd, float momentum, float dampening,
         float lr, bool nesterov, bool first_run, bool wd_after_momentum, float scale) {
        sgd(noop_flag, lists,
            {.lr = lr,
             .momentum = momentum,
             .dampening = dampening,
             .weight_decay = wd,
             .grad_scale = scale,
             .nesterov = nesterov,
             .first_step = first_run,
             .decay_after_momentum = wd_after_momentum});
      },
      py::arg("chunk_size"), py::arg("noop_flag"), py::arg("tensor_lists"), py::arg("wd"), py::arg("momentum"),
      py::arg("dampening"), py::arg("lr"), py::arg("nesterov"), py::arg("first_run"), py::arg("wd_after_momentum"),
      py::arg("scale"), py::call_guard<py::gil_scoped_release>());
}

// ---- Norms and scaling ---------------------------------------------------------------------------------------------

/// The norm of all tensors together, [1], and with `per_tensor` that of each, [tensors]; sets the flag if the first is
/// not finite.
std::tuple<at::Tensor, at::Tensor> l2norm(const char* who, const at::Tensor& flag, const TensorLists& lists,
                                          float scale, bool per_tensor) {
  TORCH_CHECK_VALUE(lists.size() == 1 && !lists[0].empty(), who, ": expected one list of one or more tensors.");
  std::vector<float> norms(lists[0].size(), 0.F);
  double sum = 0;
  for_each_parameter(who, lists, {{.name = "tensor", .written = false}}, [&](const Row& t, size_t i) {
    const auto squares = kernels::sum_of_squares(t[0], scale);
    norms[i] = static_cast<float>(std::sqrt(squares));
    sum += squares;
  });
  if (!std::isfinite(sum)) set_flag(flag);
  const auto device = lists[0][0].device();
  auto each = per_tensor ? at::tensor(norms) : at::empty({0}, at::kFloat);
  return {on_device(at::full({1}, std::sqrt(sum), at::kFloat), device), on_device(std::move(each), device)};
}

void scale(const char* who, const at::Tensor& is_infinite, const TensorLists& lists, float factor) {
  bool finite = true;
  for_each_parameter(who, lists, {{.name = "input", .written = false}, {.name = "output"}},
                     [&](const Row& t, size_t) { finite = kernels::scale_into(t[1], t[0], factor) && finite; });
  if (!finite) set_flag(is_infinite);
}

void bind_norms(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def(
      "multi_tensor_l2norm",
      [](int64_t, const at::Tensor& noop_flag, const TensorLists& lists, std::optional<bool> per_tensor) {
        return l2norm("multi_tensor_l2norm", noop_flag, lists, 1, per_tensor.value_or(false));
      },
      py::arg("chunk_size"), py::arg("noop_flag"), py::arg("tensor_lists"), py::arg("per_tensor") = py::none(), no_gil);
  m.def(
      "multi_tensor_unscale_l2norm",
      [](int64_t, const at::Tensor& noop_flag, const TensorLists& lists, const at::Tensor& inv_scale,
         std::optional<bool> per_tensor) {
        const char* who = "multi_tensor_unscale_l2norm";
        return l2norm(who, noop_flag, lists, static_cast<float>(value_of(who, "inv_scale", inv_scale)),
                      per_tensor.value_or(false));
      },
      py::arg("chunk_size"), py::arg("noop_flag"), py::arg("tensor_lists"), py::arg("inv_scale"),
      py::arg("per_tensor") = py::none(), no_gil);
  m.def(
      "multi_tensor_scale",
      [](int64_t, const at::Tensor& is_infinite, const TensorLists& lists, float factor) {
        scale("multi_tensor_scale", is_infinite, lists, factor);
      },
      py::arg("chunk_size"), py::arg("is_infinite"), py::arg("tensor_lists"), py::arg("scale"), no_gil);
  m.def(
      "multi_tensor_scale_tensor",
      [](int64_t, const at::Tensor& is_infinite, const TensorLists& lists, const at::Tensor& factor) {
        const char* who = "multi_tensor_scale_tensor";
        scale(who, is_infinite, lists, static_cast<float>(value_of(who, "scale", factor)));
      },
      py::arg("chunk_size"), py::arg("is_infinite"), py::arg("tensor_lists"), py::arg("scale"), no_gil);
}

}  // namespace

void bind_optimizers(py::module_& m) {
  bind_adam(m, "multi_tensor_adam", [](const TensorLists& lists, const AdamArgs& args) {
    adam("multi_tensor_adam", lists, args, lists.size() == 5, false);
  });
  bind_adam(m, "multi_tensor_adam_param_remainder", adam_split);
  bind_quantized_adam(m);
  bind_capturable_adam(m, "multi_tensor_adam_capturable", /*master=*/false);
  bind_capturable_adam(m, "multi_tensor_adam_capturable_master", /*master=*/true);
  bind_sgd(m);
  bind_norms(m);
  for (const auto* name : {"cusolvermp_ctx_create", "cusolvermp_ctx_destroy", "newton_schulz"})
    bind_unsupported(
        m, name,
        "cuSOLVERMp distributes the matrix over GPUs by NCCL. Gather the matrix and run the iteration with "
        "torch.linalg and torch.matmul.");
}

}  // namespace weft::te
