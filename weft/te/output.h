#pragma once
#include <ATen/core/Tensor.h>

#include "weft/core/dispatch_keys.h"
#include "weft/te/host.h"
#include "weft/te/quantized_tensor.h"

// What adapters that compute on plain values do before and after: values of any tensor class in, any tensor class out.

namespace weft::te {

/// In its scope other Python threads run, and autograd records nothing.
struct __attribute__((visibility("hidden"))) Computing {
  BelowAutograd below;
  py::gil_scoped_release released;
};

/// The values of a torch.Tensor or of a quantized tensor as a tensor of the CPU with their nominal dtype.
at::Tensor read_values(py::handle tensor);

/// The dtype to compute an output of `dtype` in. Values that a quantizer for delayed scaling receives from the kernel
/// that computes them are not rounded to `dtype` first; other quantizers receive rounded values.
at::ScalarType computed_dtype(py::handle quantizer, at::ScalarType dtype);

/// `values`, a tensor of the CPU with `computed_dtype`, as an output of `dtype`: quantized, copied into `out`, or both.
py::object make_output(at::Tensor values, at::ScalarType dtype, py::handle quantizer, c10::Device device,
                       py::handle out = py::none());

}  // namespace weft::te
