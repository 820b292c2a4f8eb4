#include "weft/te/quantized_tensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <tuple>

#include "weft/te/dtype.h"
#include "weft/te/host.h"
#include "weft/te/python_tensor.h"

namespace weft::te {
namespace {

bool is_tensor(py::handle object) { return THPVariable_Check(object.ptr()); }
const at::Tensor& plain_tensor(py::handle object) { return THPVariable_Unpack(object.ptr()); }

/// `x` as a tensor on `device` that shares its memory.
at::Tensor shared_on(const at::Tensor& x, c10::Device device) {
  return x.device() == device ? x : on_device(x.detach(), device);
}

/// Without a quantizer: x itself, or copied into `out`.
py::object keep_precision(const at::Tensor& x, c10::Device device, py::handle out) {
  if (out.is_none()) return py::cast(shared_on(x, device));
  const at::NoGradGuard no_grad;
  host(plain_tensor(out)).copy_(x.view(plain_tensor(out).sizes()));
  return py::reinterpret_borrow<py::object>(out);
}

/// By a quantizer that is written in Python.
py::object quantize_in_python(const at::Tensor& x, py::handle quantizer, c10::Device device, py::handle out) {
  using namespace py::literals;
  return quantizer.attr("quantize")(shared_on(x, device), "out"_a = out);
}

bool is_noop(const at::Tensor& noop) { return noop.defined() && host(noop).item<float>() == 1; }

at::Tensor dequantized_in_python(py::handle tensor, at::ScalarType dtype) {
  using namespace py::literals;
  return host(tensor.attr("dequantize")("dtype"_a = py::cast(dtype)).cast<at::Tensor>()).to(dtype);
}

/// The codes of the other copy of a tensor with one scale: the transposed ones.
void add_transposed(QuantizedBuffers& b, bool columnwise) {
  const auto& from = b.copy(!columnwise);
  const auto codes = host(from.data).view(at::kByte);
  b.copy(columnwise) = {.data = (columnwise ? codes.movedim(-1, 0) : codes.movedim(0, -1)).contiguous(),
                        .scales = from.scales,
                        .amax = {}};
}

/// Whether a matrix of the one kind can be read as one of the other.
bool same_codes(const kernels::Quantization& a, const kernels::Quantization& b) {
  const auto key = [](const kernels::Quantization& q) {
    return std::tuple(q.format, q.block, q.scale_format, q.scale_bound, q.row_scaled, q.hadamard);
  };
  return key(a) == key(b);
}

/// Copies scales, whose rows or columns may be repeated `step` times in `from`. Returns false if they are not.
bool copy_scales(const at::Tensor& from, const at::Tensor& to, int64_t step) {
  auto kept = from, repeated = to;
  for (int64_t dim = 0; dim < from.dim(); ++dim)
    if (from.size(dim) != to.size(dim)) kept = kept.slice(dim, std::nullopt, std::nullopt, step);
  if (kept.sizes() != to.sizes()) return false;
  to.copy_(kept);
  for (int64_t dim = 0; dim < from.dim(); ++dim)
    if (from.size(dim) != to.size(dim)) repeated = repeated.repeat_interleave(step, dim).narrow(dim, 0, from.size(dim));
  return repeated.equal(from);
}

at::Tensor as_matrix(const at::Tensor& t) {
  if (t.dim() == 2) return t;
  return t.dim() < 2 ? t.reshape({1, -1}) : t.flatten(0, -2);
}

}  // namespace

bool is_quantized(py::handle tensor) {
  if (tensor.is_none() || THPVariable_CheckExact(tensor.ptr())) return false;
  return is_quantized_instance(tensor);
}

c10::Device device_of(py::handle tensor) {
  return is_tensor(tensor) ? plain_tensor(tensor).device() : tensor.attr("device").cast<c10::Device>();
}

std::vector<int64_t> sizes_of(py::handle tensor) {
  return is_tensor(tensor) ? plain_tensor(tensor).sizes().vec() : tensor.attr("size")().cast<std::vector<int64_t>>();
}

at::ScalarType dtype_of_tensor(py::handle tensor) {
  if (is_tensor(tensor)) return plain_tensor(tensor).scalar_type();
  return tensor.attr("_dtype").cast<at::ScalarType>();
}

py::object quantize(const at::Tensor& x, py::handle quantizer, c10::Device device, py::handle out,
                    const at::Tensor& noop) {
  const auto view = view_quantizer(quantizer);
  if (view.kind == QuantizerKind::none) return keep_precision(x, device, out);
  if (view.kind == QuantizerKind::python) return quantize_in_python(x, quantizer, device, out);
  auto buffers = out.is_none() ? describe_buffers(view, x.sizes()) : buffers_to_fill(out, view);
  if (out.is_none()) allocate_missing(buffers, view, at::TensorOptions().device(device));
  if (!is_noop(noop)) fill_buffers(host(x), view, buffers, device);
  return out.is_none() ? make_tensor(view, buffers, x.scalar_type(), device) : py::reinterpret_borrow<py::object>(out);
}

Operand read_operand(py::handle tensor, Copy copy) {
  if (!is_quantized(tensor)) return {.plain = as_matrix(host(plain_tensor(tensor))), .quantized = {}, .copy = copy};
  const auto dtype = dtype_of_tensor(tensor);
  if (layout_of_tensor(tensor) == Layout::python)
    return {.plain = as_matrix(dequantized_in_python(tensor, dtype)), .quantized = {}, .copy = copy};
  auto buffers = read_buffers(tensor);
  const bool columnwise = copy == Copy::columnwise;
  if (buffers.layout == Layout::per_tensor) {
    if (!buffers.rowwise.data.defined() && !columnwise) add_transposed(buffers, false);
    const bool reads_rows = !columnwise || !buffers.columnwise.data.defined();
    return {.plain = {}, .quantized = readable_matrix(buffers, dtype, reads_rows, !reads_rows), .copy = copy};
  }
  const auto* const name = columnwise ? "columnwise" : "rowwise";
  TORCH_CHECK_VALUE(buffers.copy(columnwise).data.defined(), "gemm: the ",
                    py::str(py::type::of(tensor).attr("__name__")).cast<std::string>(), " has no ", name,
                    " copy. Call update_usage(", name, "_usage=True), or quantize it with ", name, "=True.");
  return {.plain = {}, .quantized = readable_matrix(buffers, dtype, !columnwise, columnwise), .copy = copy};
}

kernels::QuantizedMatrix own_matrix(py::handle tensor, const kernels::Quantization& how) {
  const at::NoGradGuard no_grad;
  auto buffers = read_buffers(tensor);
  const auto dtype = dtype_of_tensor(tensor);
  const auto options = at::TensorOptions().dtype(at::kByte).device(device_of(tensor));
  for (const bool columnwise : {false, true})
    if (buffers.layout == Layout::per_tensor && !buffers.copy(columnwise).data.defined())
      add_transposed(buffers, columnwise);
  bool fits = same_codes(buffers.how, how);
  const auto given = readable_matrix(buffers, dtype, true, true);
  kernels::QuantizedMatrix own{.quantization = how, .dtype = dtype, .rows = given.rows, .columns = given.columns};
  for (const bool columnwise : {false, true}) {
    const auto& from = columnwise ? given.columnwise : given.rowwise;
    if (!fits || !from.defined()) continue;
    const kernels::CopySizes<int64_t> sizes(how, own.rows, own.columns, columnwise);
    const auto bytes = at::zeros({sizes.bytes()}, options);
    const auto made = kernels::matrix_of_copy(how, dtype, own.rows, own.columns, columnwise, bytes);
    auto& to = columnwise ? own.columnwise : own.rowwise;
    to = columnwise ? made.columnwise : made.rowwise;
    host(to.data).copy_(from.data);
    fits = copy_scales(from.scales.view(to.scales.scalar_type()), host(to.scales), how.block);
    if (to.amax.defined() && from.amax.defined()) host(to.amax).copy_(from.amax);
  }
  TORCH_CHECK_VALUE(fits, "a weight, ", py::str(py::type::of(tensor).attr("__name__")).cast<std::string>(),
                    ", was quantized with another recipe than that of this call.");
  return own;
}

at::Tensor dequantized(py::handle tensor, at::ScalarType dtype) {
  if (!is_quantized(tensor)) return host(plain_tensor(tensor)).to(dtype);
  if (layout_of_tensor(tensor) == Layout::python) return dequantized_in_python(tensor, dtype);
  return decode_buffers(read_buffers(tensor), dtype);
}

}  // namespace weft::te
