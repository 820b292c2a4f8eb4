#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>

#include <cmath>
#include <optional>
#include <utility>

#include "weft/te/bind.h"
#include "weft/te/generator.h"
#include "weft/te/host.h"
#include "weft/te/quantized_tensor.h"
#include "weft/te/strict.h"

// Dropout with a mask of one bit per element, 1 for kept ones; bit i of a byte is that of its element i. A random byte
// decides about an element, so that the probability is a multiple of 1/256.

namespace weft::te {
namespace {

constexpr int64_t kBitsPerByte = 8;
constexpr int64_t kMultiple = 16;  // of elements

void check_dropout(const char* name, int64_t elements, double probability) {
  TORCH_CHECK_VALUE(probability >= 0 && probability < 1, name, ": dropout_probability is ", probability,
                    ", expected at least 0 and less than 1.");
  TORCH_CHECK_VALUE(elements % kMultiple == 0, name, ": the tensor has ", elements,
                    " elements, expected a multiple of ", kMultiple, ".");
}

at::Tensor bit_values() { return at::arange(kBitsPerByte, at::kByte).exp2().to(at::kByte); }

at::Tensor draw_dropout_mask(int64_t elements, double probability, const at::Generator& generator) {
  const auto bytes = at::empty({elements / kBitsPerByte, kBitsPerByte}, at::kByte).random_(0, 256, generator);
  const auto kept = bytes.ge(std::floor(probability * 256));
  return kept.to(at::kByte).mul_(bit_values()).sum({1}, /*keepdim=*/false, at::kByte);
}

/// Fills `out` with x / (1 - probability) where the mask is 1 and with 0 elsewhere.
void apply_dropout_mask(const at::Tensor& x, const at::Tensor& mask, double probability, const at::Tensor& out) {
  const auto kept = mask.view({-1, 1}).bitwise_and(bit_values()).ne(0).view(x.sizes());
  const auto scale = 1 / (1 - static_cast<float>(probability));
  out.copy_(at::where(kept, x.to(at::kFloat).mul_(scale), 0));
}

std::pair<at::Tensor, at::Tensor> dropout_forward(py::handle input, double probability,
                                                  const std::optional<at::Tensor>& out) {
  const bool quantized = is_quantized(input);
  const auto device = device_of(input);
  const auto x =
      quantized ? dequantized(input, input.attr("dtype").cast<at::ScalarType>()) : host(input.cast<at::Tensor>());
  const py::gil_scoped_release release;
  check_dropout("dropout_fwd", x.numel(), probability);
  require_on_gpu(x.numel() > 0, "dropout_fwd", "GPUs refuse a tensor without elements.");
  const auto y = out ? *out : at::empty(x.sizes(), x.options().device(device));
  TORCH_CHECK_VALUE(y.sizes() == x.sizes(), "dropout_fwd: out has shape ", y.sizes(), ", expected that of input, ",
                    x.sizes(), ".");
  auto mask = draw_dropout_mask(x.numel(), probability, host_generator(device));
  apply_dropout_mask(x, mask, probability, host(y));
  return {y, on_device(std::move(mask), device)};
}

at::Tensor dropout_backward(const at::Tensor& grad_output, const at::Tensor& mask, double probability,
                            const std::optional<at::Tensor>& grad_input) {
  check_dropout("dropout_bwd", grad_output.numel(), probability);
  TORCH_CHECK_VALUE(mask.scalar_type() == at::kByte && mask.numel() * kBitsPerByte == grad_output.numel(),
                    "dropout_bwd: mask has ", mask.numel(), " elements of ", mask.scalar_type(), ", expected ",
                    grad_output.numel() / kBitsPerByte, " bytes, one bit for each element of grad_output.");
  const auto dx = grad_input ? *grad_input : at::empty(grad_output.sizes(), grad_output.options());
  TORCH_CHECK_VALUE(dx.sizes() == grad_output.sizes(), "dropout_bwd: grad_input has shape ", dx.sizes(),
                    ", expected that of grad_output, ", grad_output.sizes(), ".");
  apply_dropout_mask(host(grad_output), host(mask), probability, host(dx));
  return dx;
}

}  // namespace

void bind_dropout(py::module_& m) {
  m.def("dropout_fwd", dropout_forward, py::arg("input"), py::arg("dropout_probability"), py::arg("out") = py::none());
  m.def("dropout_bwd", dropout_backward, py::arg("grad_output"), py::arg("mask"), py::arg("dropout_probability"),
        py::arg("grad_input") = py::none(), py::call_guard<py::gil_scoped_release>());
}

}  // namespace weft::te
