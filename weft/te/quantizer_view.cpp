#include "weft/te/quantizer_view.h"

#include <array>
#include <string>

#include "weft/te/dtype.h"

namespace weft::te {
namespace {

using kernels::FourOverSix;

const std::string kPackage = "transformer_engine.pytorch.";

/// The classes of one kind of quantizer, and of the tensors that it makes.
struct ClassesOfKind {
  QuantizerKind kind;
  Layout layout;
  py::object quantizer, tensor, storage;
};

py::object class_named(const std::string& module, const char* name) {
  return py::module_::import((kPackage + module).c_str()).attr(name);
}

ClassesOfKind load_classes(QuantizerKind kind, Layout layout, const std::string& module, const char* quantizer,
                           const std::string& tensor) {
  return {kind, layout, class_named("tensor." + module, quantizer), class_named("tensor." + module, tensor.c_str()),
          class_named("tensor.storage." + module + "_storage", (tensor + "Storage").c_str())};
}

const std::array<ClassesOfKind, 5>& known_classes() {
  // Never destroyed: Python is gone when static objects are.
  static const auto* const classes = new std::array<ClassesOfKind, 5>{
      load_classes(QuantizerKind::delayed, Layout::per_tensor, "float8_tensor", "Float8Quantizer", "Float8Tensor"),
      load_classes(QuantizerKind::current, Layout::per_tensor, "float8_tensor", "Float8CurrentScalingQuantizer",
                   "Float8Tensor"),
      load_classes(QuantizerKind::block, Layout::block, "float8_blockwise_tensor", "Float8BlockQuantizer",
                   "Float8BlockwiseQTensor"),
      load_classes(QuantizerKind::mxfp8, Layout::mxfp8, "mxfp8_tensor", "MXFP8Quantizer", "MXFP8Tensor"),
      load_classes(QuantizerKind::nvfp4, Layout::nvfp4, "nvfp4_tensor", "NVFP4Quantizer", "NVFP4Tensor")};
  return *classes;
}

/// isinstance, without the hooks of metaclasses.
bool is_instance(py::handle object, const py::object& type) {
  return PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(type.ptr())) != 0;
}

const py::object& quantized_base_class() {
  static const auto* const base = new py::object(class_named("quantized_tensor", "QuantizedTensorStorage"));
  return *base;
}

bool flag(py::handle object, const char* name, bool otherwise = false) {
  const auto value = py::getattr(object, name, py::none());
  return value.is_none() ? otherwise : value.cast<bool>();
}

Format format_of(DType dtype) {
  switch (dtype) {
    case DType::float8_e4m3:
      return Format::e4m3;
    case DType::float8_e5m2:
      return Format::e5m2;
    case DType::float4_e2m1:
      return Format::e2m1;
    default:
      TORCH_CHECK_TYPE(false, "quantizer: expected kFloat8E4M3, kFloat8E5M2 or kFloat4E2M1 as its dtype, got DType ",
                       static_cast<int>(dtype), ".");
  }
}

void read_nvfp4(py::handle quantizer, QuantizerView& view) {
  auto& how = view.how;
  how.block = 16;
  how.scale_format = ScaleFormat::e4m3;
  how.two_dimensional = flag(quantizer, "with_2d_quantization");
  how.hadamard = flag(quantizer, "with_rht");
  how.stochastic_rounding = flag(quantizer, "stochastic_rounding");
  how.row_scaled = flag(quantizer, "row_scaled_nvfp4");
  TORCH_CHECK_NOT_IMPLEMENTED(!how.hadamard || flag(quantizer, "with_post_rht_amax"),
                              "NVFP4Quantizer: with_rht requires with_post_rht_amax=True.");
  view.random_signs = quantizer.attr("rht_matrix_random_sign_mask_t").cast<int64_t>() != 0;
  if (!flag(quantizer, "nvfp4_use_4over6")) return;
  const auto mode = quantizer.attr("nvfp4_4over6_err_mode").cast<std::string>();
  how.four_over_six = mode == "MSE" ? FourOverSix::squared : FourOverSix::absolute;
  how.scale_bound = quantizer.attr("nvfp4_e4m3_max").cast<float>();
}

void read_options(py::handle quantizer, QuantizerView& view) {
  auto& how = view.how;
  how.format = format_of(quantizer.attr("dtype").cast<DType>());
  switch (view.kind) {
    case QuantizerKind::delayed:
      view.scale = quantizer.attr("scale").cast<at::Tensor>();
      view.amax = quantizer.attr("amax").cast<at::Tensor>();
      break;
    case QuantizerKind::current:
      how.power_of_two = flag(quantizer, "force_pow_2_scales");
      how.epsilon = quantizer.attr("amax_epsilon").cast<float>();
      break;
    case QuantizerKind::block:
      how.block = 128;
      how.two_dimensional = quantizer.attr("block_scaling_dim").cast<int>() == 2;
      how.power_of_two = flag(quantizer, "force_pow_2_scales");
      how.epsilon = quantizer.attr("amax_epsilon").cast<float>();
      break;
    case QuantizerKind::mxfp8:
      how.block = 32;
      how.scale_format = ScaleFormat::e8m0;
      how.two_dimensional = flag(quantizer, "with_2d_quantization");
      break;
    default:
      read_nvfp4(quantizer, view);
  }
  if (flag(quantizer, "with_amax_reduction")) view.amax_group = quantizer.attr("_canonicalized_amax_reduction_group")();
}

}  // namespace

bool is_quantized_instance(py::handle object) { return is_instance(object, quantized_base_class()); }

QuantizerKind kind_of_quantizer(py::handle quantizer) {
  if (quantizer.is_none()) return QuantizerKind::none;
  for (const auto& classes : known_classes())
    if (is_instance(quantizer, classes.quantizer)) return classes.kind;
  return QuantizerKind::python;
}

Layout layout_of_tensor(py::handle tensor) {
  for (const auto& classes : known_classes())
    if (is_instance(tensor, classes.storage)) return classes.layout;
  TORCH_CHECK_TYPE(is_instance(tensor, quantized_base_class()), "expected a quantized tensor, got ",
                   py::str(py::type::of(tensor)).cast<std::string>(), ".");
  return Layout::python;
}

QuantizerView view_quantizer(py::handle quantizer) {
  QuantizerView view;
  view.object = py::reinterpret_borrow<py::object>(quantizer);
  view.kind = kind_of_quantizer(quantizer);
  if (view.kind == QuantizerKind::none || view.kind == QuantizerKind::python) return view;
  for (const auto& classes : known_classes())
    if (classes.kind == view.kind) view.layout = classes.layout;
  view.rowwise = flag(quantizer, "rowwise_usage");
  view.columnwise = flag(quantizer, "columnwise_usage");
  view.internal = flag(quantizer, "internal");
  view.optimize_for_gemm = flag(quantizer, "optimize_for_gemm");
  read_options(quantizer, view);
  return view;
}

bool gpu_needs_no_transpose() {
  static const auto* const function = new py::object(class_named("utils", "is_non_tn_fp8_gemm_supported"));
  return (*function)().cast<bool>();
}

py::handle tensor_class(const QuantizerView& quantizer) {
  for (const auto& classes : known_classes())
    if (classes.kind == quantizer.kind) return quantizer.internal ? classes.storage : classes.tensor;
  TORCH_INTERNAL_ASSERT(false);
}

py::object grouped_tensor_class(bool internal) {
  return internal ? class_named("tensor.storage.grouped_tensor_storage", "GroupedTensorStorage")
                  : class_named("tensor.grouped_tensor", "GroupedTensor");
}

at::Tensor optional_tensor(py::handle object, const char* attribute) {
  const auto value = py::getattr(object, attribute, py::none());
  return value.is_none() ? at::Tensor() : value.cast<at::Tensor>();
}

}  // namespace weft::te
