#include "weft/te/python_tensor.h"

#include <torch/csrc/autograd/python_variable.h>

#include <string>

#include "weft/te/dtype.h"
#include "weft/te/host.h"
#include "weft/te/quantized_tensor.h"

namespace weft::te {
namespace {

/// The names of a copy's buffers: keywords of the constructor, and attributes with an underscore before them.
struct Names {
  const char *data, *scales, *amax;
};
Names names_of(Layout layout, bool columnwise) {
  if (layout == Layout::per_tensor) return {columnwise ? "data_transpose" : "data", "fp8_scale_inv", nullptr};
  const char* const amax = columnwise ? "amax_columnwise" : "amax_rowwise";
  return {columnwise ? "columnwise_data" : "rowwise_data", columnwise ? "columnwise_scale_inv" : "rowwise_scale_inv",
          layout == Layout::nvfp4 ? amax : nullptr};
}
std::string attribute(const char* keyword) {
  const std::string name = keyword;
  if (name == "data_transpose") return "_transpose";
  return name == "fp8_scale_inv" ? "_scale_inv" : "_" + name;
}

py::object as_python(const at::Tensor& t) { return t.defined() ? py::cast(t) : py::none(); }

Format format_of_tensor(py::handle tensor, Layout layout) {
  if (layout == Layout::nvfp4) return Format::e2m1;
  return tensor.attr("_fp8_dtype").cast<DType>() == DType::float8_e5m2 ? Format::e5m2 : Format::e4m3;
}

/// How the values of a tensor are scaled; what the buffers do not show is that of its quantizer.
kernels::Quantization quantization_of(py::handle tensor, Layout layout, const py::object& quantizer) {
  kernels::Quantization how{.format = format_of_tensor(tensor, layout)};
  const auto option = [&](const char* name, bool otherwise) {
    return quantizer.is_none() ? otherwise : py::getattr(quantizer, name, py::cast(otherwise)).cast<bool>();
  };
  if (layout == Layout::block) {
    how.block = 128;
    how.two_dimensional = tensor.attr("_is_2D_scaled").cast<bool>();
    how.power_of_two = option("force_pow_2_scales", false);
  } else if (layout == Layout::mxfp8) {
    how.block = 32;
    how.scale_format = ScaleFormat::e8m0;
  } else if (layout == Layout::nvfp4) {
    how.block = 16;
    how.scale_format = ScaleFormat::e4m3;
    how.scale_bound = tensor.attr("_nvfp4_e4m3_max").cast<float>();
    how.row_scaled = tensor.attr("_row_scaled_nvfp4").cast<bool>();
    how.hadamard = option("with_rht", false);
    if (tensor.attr("_nvfp4_use_4over6").cast<bool>()) how.four_over_six = kernels::FourOverSix::absolute;
  }
  return how;
}

CopyBuffers read_copy(py::handle tensor, Layout layout, bool columnwise) {
  const auto names = names_of(layout, columnwise);
  const auto read = [&](const char* keyword) {
    return keyword ? optional_tensor(tensor, attribute(keyword).c_str()) : at::Tensor();
  };
  return {read(names.data), read(names.scales), read(names.amax)};
}

void write_copy(py::handle tensor, Layout layout, bool columnwise, const CopyBuffers& copy) {
  const auto names = names_of(layout, columnwise);
  const auto write = [&](const char* keyword, const at::Tensor& value) {
    const auto name = attribute(keyword);
    if (!optional_tensor(tensor, name.c_str()).is_same(value)) tensor.attr(name.c_str()) = as_python(value);
  };
  write(names.data, copy.data);
  write(names.scales, copy.scales);
  if (names.amax) write(names.amax, copy.amax);
}

/// The logical sizes. Those of a view with other buffers are those of the buffers.
std::vector<int64_t> logical_sizes(py::handle tensor, const QuantizedBuffers& b) {
  const auto& data = b.rowwise.data;
  if (!data.defined()) {
    if (THPVariable_Check(tensor.ptr()) || b.layout != Layout::nvfp4) return sizes_of(tensor);
    return {b.columnwise.data.size(-1) * 2, b.columnwise.data.size(0)};
  }
  auto sizes = data.sizes().vec();
  if (b.layout == Layout::nvfp4 && !sizes.empty()) sizes.back() *= 2;
  return sizes;
}

void check_class(py::handle tensor, const QuantizerView& quantizer) {
  TORCH_CHECK_TYPE(is_quantized(tensor) && layout_of_tensor(tensor) == quantizer.layout,
                   "quantize: ", py::str(py::type::of(quantizer.object).attr("__name__")).cast<std::string>(),
                   " cannot fill a ", py::str(py::type::of(tensor).attr("__name__")).cast<std::string>(),
                   ", expected a ", py::str(tensor_class(quantizer).attr("__name__")).cast<std::string>(), ".");
}

/// Sets what the object says about the values that it is about to get.
void write_options(py::handle tensor, const QuantizerView& quantizer, const QuantizedBuffers& b) {
  if (b.layout == Layout::per_tensor) {
    tensor.attr("_transpose_invalid") = !b.columnwise.data.defined();
    tensor.attr("_fp8_dtype") = quantizer.object.attr("dtype");
  } else if (b.layout == Layout::mxfp8) {
    tensor.attr("_fp8_dtype") = quantizer.object.attr("dtype");
    tensor.attr("_with_gemm_swizzled_scales") = b.swizzled;
  } else if (b.layout == Layout::nvfp4) {
    tensor.attr("_with_gemm_swizzled_scales") = b.swizzled;
    tensor.attr("_row_scaled_nvfp4") = b.how.row_scaled;
    tensor.attr("_nvfp4_use_4over6") = b.how.four_over_six != kernels::FourOverSix::none;
    tensor.attr("_nvfp4_e4m3_max") = static_cast<int>(b.how.scale_bound);
  }
}

void add_options(py::dict& keywords, const QuantizerView& quantizer, const QuantizedBuffers& b) {
  keywords["quantizer"] = quantizer.object;
  keywords[b.layout == Layout::nvfp4 ? "fp4_dtype" : "fp8_dtype"] = quantizer.object.attr("dtype");
  if (b.layout == Layout::block) keywords["is_2D_scaled"] = b.how.two_dimensional;
  if (b.layout == Layout::mxfp8 || b.layout == Layout::nvfp4) keywords["with_gemm_swizzled_scales"] = b.swizzled;
  if (b.layout != Layout::nvfp4) return;
  keywords["row_scaled_nvfp4"] = b.how.row_scaled;
  keywords["nvfp4_use_4over6"] = b.how.four_over_six != kernels::FourOverSix::none;
  keywords["nvfp4_e4m3_max"] = static_cast<int>(b.how.scale_bound);
}

}  // namespace

QuantizedBuffers read_buffers(py::handle tensor) {
  const auto layout = layout_of_tensor(tensor);
  TORCH_INTERNAL_ASSERT(layout != Layout::python);
  const auto quantizer = py::getattr(tensor, "_quantizer", py::none());
  QuantizedBuffers b{.layout = layout,
                     .how = quantization_of(tensor, layout, quantizer),
                     .sizes = {},
                     .rowwise = read_copy(tensor, layout, false),
                     .columnwise = read_copy(tensor, layout, true)};
  if (layout == Layout::per_tensor && tensor.attr("_transpose_invalid").cast<bool>()) b.columnwise.data.reset();
  TORCH_CHECK_VALUE(b.rowwise.data.defined() || b.columnwise.data.defined(), "quantized tensor: a ",
                    py::str(py::type::of(tensor).attr("__name__")).cast<std::string>(),
                    " without data. Its buffers were released.");
  b.sizes = logical_sizes(tensor, b);
  b.swizzled = py::getattr(tensor, "_with_gemm_swizzled_scales", py::cast(false)).cast<bool>();
  if (b.how.hadamard) b.random_signs = quantizer.attr("rht_matrix_random_sign_mask_t").cast<int64_t>() != 0;
  return b;
}

QuantizedBuffers buffers_to_fill(py::handle tensor, const QuantizerView& quantizer) {
  check_class(tensor, quantizer);
  const auto layout = quantizer.layout;
  QuantizedBuffers existing{.layout = layout,
                            .how = quantizer.how,
                            .sizes = {},
                            .rowwise = read_copy(tensor, layout, false),
                            .columnwise = read_copy(tensor, layout, true)};
  auto b = describe_buffers(quantizer, logical_sizes(tensor, existing));
  b.rowwise = existing.rowwise, b.columnwise = existing.columnwise;
  const auto requested = requested_copies(quantizer);
  const auto options = at::TensorOptions().device(device_of(tensor));
  for (const bool columnwise : {false, true}) {
    auto& copy = b.copy(columnwise);
    if (requested[columnwise]) {
      allocate_missing(b, columnwise, options);
    } else if (layout == Layout::per_tensor) {
      copy.data.reset();
    } else {
      copy = {};
    }
    write_copy(tensor, layout, columnwise, copy);
  }
  write_options(tensor, quantizer, b);
  return b;
}

py::object make_tensor(const QuantizerView& quantizer, const QuantizedBuffers& b, at::ScalarType dtype,
                       c10::Device device) {
  py::dict keywords;
  for (const bool columnwise : {false, true}) {
    const auto names = names_of(b.layout, columnwise);
    const auto& copy = b.copy(columnwise);
    keywords[names.data] = as_python(copy.data);
    keywords[names.scales] = as_python(copy.scales);
    if (names.amax) keywords[names.amax] = as_python(copy.amax);
  }
  add_options(keywords, quantizer, b);
  if (quantizer.internal) {
    keywords["fake_dtype"] = py::cast(dtype);
  } else {
    keywords["shape"] = py::cast(b.sizes);
    keywords["dtype"] = py::cast(dtype);
    keywords["device"] = py::cast(device);
  }
  return tensor_class(quantizer)(**keywords);
}

void swizzle_tensor(py::handle tensor, bool rowwise, bool columnwise) {
  const auto layout = layout_of_tensor(tensor);
  if (layout != Layout::mxfp8 && layout != Layout::nvfp4) return;
  const auto b = read_buffers(tensor);
  if (b.swizzled) return;
  for (const bool is_columnwise : {false, true}) {
    const auto& scales = b.copy(is_columnwise).scales;
    if (!(is_columnwise ? columnwise : rowwise) || !scales.defined()) continue;
    const auto name = attribute(names_of(layout, is_columnwise).scales);
    tensor.attr(name.c_str()) =
        py::cast(on_device(swizzled_scales(b, is_columnwise).view(scales.sizes()), scales.device()));
  }
}

void mark_swizzled(py::handle tensor) {
  const auto layout = layout_of_tensor(tensor);
  if (layout == Layout::mxfp8 || layout == Layout::nvfp4) tensor.attr("_with_gemm_swizzled_scales") = true;
}

}  // namespace weft::te
