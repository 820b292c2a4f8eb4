#pragma once
#include <torch/csrc/utils/pybind.h>

// The parts of the module `transformer_engine_torch`, one file each: adapters without arithmetic of their own from the
// names that Transformer Engine's Python calls to weft's kernels and to ATen.

namespace weft::te {

namespace py = pybind11;

void bind_activation(py::module_& m);
void bind_attention(py::module_& m);
void bind_comm_overlap(py::module_& m);
void bind_constants(py::module_& m);
void bind_context_parallel(py::module_& m);
void bind_dropout(py::module_& m);
void bind_enums(py::module_& m);
void bind_expert_parallel(py::module_& m);
void bind_fused_run(py::module_& m);
void bind_gemm(py::module_& m);
void bind_grouped_tensor(py::module_& m);
void bind_layout(py::module_& m);
void bind_norm(py::module_& m);
void bind_optimizers(py::module_& m);
void bind_padding(py::module_& m);
void bind_partial_cast(py::module_& m);
void bind_permutation(py::module_& m);
void bind_quantize(py::module_& m);
void bind_rotary(py::module_& m);
void bind_router(py::module_& m);
void bind_softmax(py::module_& m);

/// Binds `name` to a function that raises NotImplementedError with `reason`, and what to do instead, when it is called.
void bind_unsupported(py::module_& m, const char* name, const char* reason);

}  // namespace weft::te
