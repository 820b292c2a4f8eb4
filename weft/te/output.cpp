#include "weft/te/output.h"

#include <utility>

#include "weft/kernels/rows.h"
#include "weft/te/quantizer_view.h"

namespace weft::te {

at::Tensor read_values(py::handle tensor) {
  return is_quantized(tensor) ? dequantized(tensor, dtype_of_tensor(tensor)) : host(tensor.cast<at::Tensor>());
}

at::ScalarType computed_dtype(py::handle quantizer, at::ScalarType dtype) {
  return kind_of_quantizer(quantizer) == QuantizerKind::delayed ? at::kFloat : dtype;
}

py::object make_output(at::Tensor values, at::ScalarType dtype, py::handle quantizer, c10::Device device,
                       py::handle out) {
  if (quantizer.is_none()) {
    const BelowAutograd below;
    values = kernels::rounded(values, dtype);
  } else if (values.scalar_type() != dtype && out.is_none()) {
    const py::object made =
        quantizer.attr("make_empty")(values.sizes().vec(), py::arg("dtype") = dtype, py::arg("device") = device);
    return quantize(values, quantizer, device, made);
  }
  if (quantizer.is_none() && out.is_none()) return py::cast(on_device(std::move(values), device));
  return quantize(values, quantizer, device, out);
}

}  // namespace weft::te
