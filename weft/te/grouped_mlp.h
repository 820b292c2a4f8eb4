#pragma once
#include "weft/te/bind.h"

namespace weft::te {

/// The module `grouped_mlp_experimental`: operands of cuDNN's grouped GEMM kernels.
void bind_grouped_mlp(py::module_& m);

/// The addresses of `tensors` as int64, on `device`.
at::Tensor copy_data_ptrs_to_device(const std::vector<at::Tensor>& tensors, c10::Device device);

}  // namespace weft::te
