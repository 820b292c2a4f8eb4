#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "weft/kernels/quantize_math.h"
#include "weft/quant/delayed_scaling.h"
#include "weft/te/dtype.h"
#include "weft/te/host.h"
#include "weft/te/python_tensor.h"
#include "weft/te/quantized_tensor.h"
#include "weft/te/strict.h"

namespace weft::te {
namespace {

using Tensors = std::vector<at::Tensor>;

/// A tensor that is about to be quantized, on the CPU.
at::Tensor to_quantize(py::handle tensor) {
  return is_quantized(tensor) ? dequantized(tensor, dtype_of_tensor(tensor)) : host(tensor.cast<at::Tensor>());
}

py::object quantize_tensor(py::handle tensor, py::handle quantizer, py::handle output,
                           const std::optional<at::Tensor>& noop) {
  return quantize(to_quantize(tensor), quantizer, device_of(tensor), output, noop.value_or(at::Tensor()));
}

at::Tensor dequantize_tensor(py::handle input, DType otype) {
  return on_device(dequantized(input, scalar_type(otype)), device_of(input));
}

py::object create_empty(py::handle quantizer, const std::vector<int64_t>& shape, at::ScalarType dtype,
                        c10::Device device, bool pin_memory) {
  const auto options = at::TensorOptions().device(device).pinned_memory(pin_memory);
  const auto view = view_quantizer(quantizer);
  if (view.kind == QuantizerKind::none) return py::cast(at::empty(shape, options.dtype(dtype)));
  TORCH_CHECK_NOT_IMPLEMENTED(view.kind != QuantizerKind::python,
                              "create_empty_quantized_tensor: ", py::str(py::type::of(quantizer)).cast<std::string>(),
                              " makes its tensors in Python. Use its make_empty.");
  auto buffers = describe_buffers(view, shape);
  buffers.swizzled = swizzles_while_quantizing(buffers);
  allocate_missing(buffers, view, options);
  return make_tensor(view, buffers, dtype, device);
}

std::vector<py::object> quantize_with_bias_gradient(py::handle input, py::handle quantizer) {
  const auto x = to_quantize(input);
  at::Tensor bias;
  {
    const at::NoGradGuard no_grad;
    bias = x.reshape({-1, x.size(-1)}).sum(at::IntArrayRef{0}, /*keepdim=*/false, at::kFloat).to(x.scalar_type());
  }
  return {py::cast(on_device(bias, device_of(input))),
          quantizer.is_none() ? py::reinterpret_borrow<py::object>(input) : quantize(x, quantizer, device_of(input))};
}

std::vector<py::object> quantize_tensors(const std::vector<py::object>& tensors,
                                         const std::vector<py::object>& quantizers) {
  TORCH_CHECK_VALUE(tensors.size() == quantizers.size(), "multi_tensor_quantize: got ", tensors.size(), " tensors and ",
                    quantizers.size(), " quantizers.");
  std::vector<py::object> results;
  for (size_t i = 0; i < tensors.size(); ++i)
    results.push_back(quantize(to_quantize(tensors[i]), quantizers[i], device_of(tensors[i])));
  return results;
}

/// What the kernels of a GPU that quantize all parts at once require; without aligned columns it has none.
void check_split_limits(int64_t columns, const std::vector<int64_t>& rows, const std::vector<py::object>& quantizers) {
  if (!strict() || quantizers.empty() || kind_of_quantizer(quantizers.front()) != QuantizerKind::nvfp4) return;
  const auto quantizer = view_quantizer(quantizers.front());
  if (!quantizer.how.hadamard || columns % 128 != 0) return;
  constexpr const char* kWho = "split_quantize with NVFP4 and RHT";
  for (const auto count : rows)
    require_on_gpu(count % 64 == 0, kWho, "GPUs require parts whose rows are multiples of 64, got ", count, ".");
  require_on_gpu(rows.size() <= 64, kWho, "GPUs quantize at most 64 parts, got ", rows.size(), ".");
  require_on_gpu(quantizer.amax_group.is_none(), kWho, "GPUs share no maxima over ranks.");
}

std::vector<py::object> quantize_parts(py::handle tensor, const std::vector<int64_t>& split_sections,
                                       const std::vector<py::object>& quantizers, bool) {
  const auto x = to_quantize(tensor);
  const auto device = device_of(tensor);
  TORCH_CHECK_VALUE(quantizers.size() == split_sections.size(), "split_quantize: got ", split_sections.size(),
                    " sections and ", quantizers.size(), " quantizers.");
  TORCH_CHECK_VALUE(x.dim() > 0, "split_quantize: the tensor has no dimensions.");
  if (x.numel() > 0) check_split_limits(x.size(-1), split_sections, quantizers);
  std::vector<py::object> results;
  int64_t row = 0;
  for (size_t i = 0; i < quantizers.size(); ++i) {
    TORCH_CHECK_VALUE(split_sections[i] >= 0 && row + split_sections[i] <= x.size(0), "split_quantize: sections ",
                      split_sections, " do not fit in shape ", x.sizes(), ".");
    results.push_back(quantize(x.narrow(0, row, split_sections[i]), quantizers[i], device));
    row += split_sections[i];
  }
  return results;
}

py::object quantize_nvfp4_with_amax(const at::Tensor& tensor, py::handle quantizer, const at::Tensor& rowwise_amax,
                                    const at::Tensor& columnwise_amax) {
  const auto view = view_quantizer(quantizer);
  TORCH_CHECK_TYPE(view.kind == QuantizerKind::nvfp4 && !view.how.row_scaled,
                   "nvfp4_quantize_with_amax: expected an NVFP4Quantizer with one amax per tensor.");
  for (const auto* amax : {&rowwise_amax, &columnwise_amax})
    TORCH_CHECK_VALUE(amax->scalar_type() == at::kFloat && amax->numel() == 1,
                      "nvfp4_quantize_with_amax: expected float32 maxima of one element, got ", amax->scalar_type(),
                      " of shape ", amax->sizes(), ".");
  auto buffers = describe_buffers(view, tensor.sizes());
  buffers.rowwise.amax = rowwise_amax, buffers.columnwise.amax = columnwise_amax;
  allocate_missing(buffers, view, at::TensorOptions().device(tensor.device()));
  if (!view.rowwise) buffers.rowwise = {};
  if (!view.columnwise) buffers.columnwise = {};
  fill_buffers(host(tensor), view, buffers, tensor.device(), {rowwise_amax, columnwise_amax});
  return make_tensor(view, buffers, tensor.scalar_type(), tensor.device());
}

// ---- Scales
// ----------------------------------------------------------------------------------------------------------

void compute_amax(const at::Tensor& input, const at::Tensor& amax) {
  TORCH_CHECK_VALUE(amax.scalar_type() == at::kFloat && amax.numel() == 1, "compute_amax: amax is ", amax.scalar_type(),
                    " of shape ", amax.sizes(), ", expected float32 of one element.");
  const at::NoGradGuard no_grad;
  const auto x = host(input).detach().reshape({1, -1});
  host(amax).copy_(kernels::quantization_amax(x, {}, /*transformed=*/false).view(amax.sizes()));
}

/// Ends a step of delayed scaling: histories [L, n] and scales [n] of several groups of tensors.
void update_delayed_scales(const at::Tensor& reduced_amax, const Tensors& histories, const Tensors& scales,
                           const std::string& algorithm, DType fp8_dtype, double margin) {
  TORCH_CHECK_VALUE(histories.size() == scales.size(), "fused_amax_and_scale_update_after_reduction: got ",
                    histories.size(), " histories and ", scales.size(), " scales.");
  TORCH_CHECK_VALUE(algorithm == "max" || algorithm == "most_recent",
                    "fused_amax_and_scale_update_after_reduction: amax_compute_algo is \"", algorithm,
                    "\", expected \"max\" or \"most_recent\".");
  const quant::DelayedScalingUpdate options{
      .margin = margin, .amax_compute_algo = algorithm == "max" ? quant::AmaxAlgo::max : quant::AmaxAlgo::most_recent};
  const float max = traits_of(fp8_dtype == DType::float8_e5m2 ? Format::e5m2 : Format::e4m3).max;
  const auto reduced = host(reduced_amax).view(-1);
  int64_t first = 0;
  for (size_t i = 0; i < scales.size(); ++i) {
    const auto n = scales[i].numel();
    const auto scale = host(scales[i]).view({1, n}), history = host(histories[i]).view({-1, n});
    TORCH_CHECK_VALUE(first + n <= reduced.numel(), "fused_amax_and_scale_update_after_reduction: got ",
                      reduced.numel(), " maxima for more scales.");
    const auto state = at::cat({scale, history});
    quant::update_delayed_state(state, reduced.narrow(0, first, n).contiguous(), max, options);
    scale.copy_(state.narrow(0, 0, 1));
    history.copy_(state.narrow(0, 1, history.size(0)));
    first += n;
  }
}

void check_lists(const char* who, const std::vector<Tensors>& lists, size_t expected) {
  bool same_sizes = lists.size() == expected;
  for (const auto& list : lists) {
    same_sizes &= list.size() == lists[0].size();
    for (size_t i = 0; i < list.size() && same_sizes; ++i)
      same_sizes = list[i].numel() == lists[0][i].numel() && list[i].is_contiguous();
  }
  TORCH_CHECK_VALUE(same_sizes, who, ": expected ", expected, " lists of contiguous tensors with the same sizes.");
}

/// Lists: maxima, scales, inverse scales.
void compute_scales(int64_t, const at::Tensor&, const std::vector<Tensors>& lists, float max_fp8,
                    bool force_pow_2_scales, float epsilon) {
  check_lists("multi_tensor_compute_scale_and_scale_inv", lists, 3);
  for (size_t i = 0; i < lists[0].size(); ++i) {
    const auto* const amax = host(lists[0][i]).const_data_ptr<float>();
    auto* const scale = host(lists[1][i]).mutable_data_ptr<float>();
    auto* const inverse = host(lists[2][i]).mutable_data_ptr<float>();
    for (int64_t j = 0; j < lists[0][i].numel(); ++j) {
      scale[j] = kernels::float32_scale(amax[j], max_fp8, epsilon, FLT_MAX, force_pow_2_scales);
      inverse[j] = 1 / scale[j];
    }
  }
}

/// Lists: maxima, E8M0 codes of scales for E4M3 values.
void compute_e8m0_scales(int64_t, const py::object&, const std::vector<Tensors>& lists) {
  check_lists("multi_tensor_compute_scale_inv_e8m0", lists, 2);
  for (size_t i = 0; i < lists[0].size(); ++i) {
    const auto amaxes = host(lists[0][i]).to(at::kFloat);
    const auto* const amax = amaxes.const_data_ptr<float>();
    auto* const code = static_cast<uint8_t*>(host(lists[1][i]).mutable_data_ptr());
    for (int64_t j = 0; j < amaxes.numel(); ++j)
      code[j] = static_cast<uint8_t>(kernels::e8m0_scale(amax[j], 1.F / traits_of(Format::e4m3).max));
  }
}

// ---- Layouts
// ---------------------------------------------------------------------------------------------------------

/// FP8 codes as [last dimension, other dimensions].
at::Tensor transpose_fp8(const at::Tensor& input, DType, const std::optional<at::Tensor>& out) {
  const at::NoGradGuard no_grad;
  const auto codes = host(input).view(at::kByte);
  const auto transposed = codes.dim() == 0 ? codes : codes.movedim(-1, 0);
  if (!out) return on_device(transposed.clone(at::MemoryFormat::Contiguous), input.device());
  TORCH_CHECK_VALUE(out->numel() == input.numel(), "fp8_transpose: out has shape ", out->sizes(), ", expected ",
                    transposed.sizes(), ".");
  host(*out).view(at::kByte).view(transposed.sizes()).copy_(transposed);
  return *out;
}

void swizzle_scales(py::handle tensor) {
  swizzle_tensor(tensor, true, true);
  mark_swizzled(tensor);
}

void swizzle_scales_of_tensors(const std::vector<py::object>& tensors, bool rowwise_usage, bool columnwise_usage) {
  TORCH_CHECK_VALUE(rowwise_usage != columnwise_usage,
                    "multi_tensor_swizzle_scales_for_gemm: set one of rowwise_usage and columnwise_usage.");
  for (const auto& tensor : tensors) swizzle_tensor(tensor, rowwise_usage, columnwise_usage);
}

void bind_scales(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def("compute_amax", compute_amax, py::arg("input"), py::arg("amax"), no_gil);
  m.def("fused_amax_and_scale_update_after_reduction", update_delayed_scales, py::arg("amax_reduction_buffer"),
        py::arg("amax_histories"), py::arg("scales"), py::arg("amax_compute_algo"), py::arg("fp8_dtype"),
        py::arg("margin"), no_gil);
  m.def("multi_tensor_compute_scale_and_scale_inv", compute_scales, py::arg("chunk_size"), py::arg("noop_flag"),
        py::arg("tensor_lists"), py::arg("max_fp8"), py::arg("force_pow_2_scales"), py::arg("epsilon"), no_gil);
  m.def("multi_tensor_compute_scale_inv_e8m0", compute_e8m0_scales, py::arg("chunk_size"), py::arg("dummy"),
        py::arg("tensor_lists"));
}

}  // namespace

void bind_quantize(py::module_& m) {
  m.def("quantize", quantize_tensor, py::arg("tensor"), py::arg("quantizer"), py::arg("output") = py::none(),
        py::arg("noop") = py::none());
  m.def("dequantize", dequantize_tensor, py::arg("input"), py::arg("otype"));
  m.def("create_empty_quantized_tensor", create_empty, py::arg("quantizer"), py::arg("shape"), py::arg("dtype"),
        py::arg("device"), py::arg("pin_memory"));
  m.def("bgrad_quantize", quantize_with_bias_gradient, py::arg("input"), py::arg("quantizer"));
  m.def("multi_tensor_quantize", quantize_tensors, py::arg("tensor_list"), py::arg("quantizer_list"));
  m.def("split_quantize", quantize_parts, py::arg("tensor"), py::arg("split_sections"), py::arg("quantizer_list"),
        py::arg("disable_bulk_allocation") = false);
  m.def("nvfp4_quantize_with_amax", quantize_nvfp4_with_amax, py::arg("tensor"), py::arg("quantizer"),
        py::arg("rowwise_amax"), py::arg("columnwise_amax"));
  bind_scales(m);
  m.def("fp8_transpose", transpose_fp8, py::arg("input"), py::arg("dtype"), py::kw_only(), py::arg("out") = py::none(),
        py::call_guard<py::gil_scoped_release>());
  m.def("swizzle_scales_for_gemm_", swizzle_scales, py::arg("tensor"));
  for (const auto* name : {"multi_tensor_swizzle_scales_for_gemm_", "multi_tensor_swizzle_scales_for_gemm_unchecked_"})
    m.def(name, swizzle_scales_of_tensors, py::arg("tensors"), py::arg("rowwise_usage"), py::arg("columnwise_usage"));
  m.def("_set_strict", set_strict, py::arg("strict"));
}

}  // namespace weft::te
