#include <pybind11/stl.h>

#include <utility>

#include "weft/te/bind.h"
#include "weft/te/grouped_mlp.h"

// Versions and properties of CUDA libraries and devices that decide which paths Transformer Engine's Python takes.

namespace weft::te {
namespace {

// Major·10000 + minor·100 + patch: new enough for all features that Python makes depend on them.
constexpr int kCudnnVersion = 92200;
constexpr int kCublasLtVersion = 130600;

}  // namespace

void bind_constants(py::module_& m) {
  m.def("get_cudnn_version", [] { return kCudnnVersion; });
  m.def("get_cublasLt_version", [] { return kCublasLtVersion; });
  m.def("get_num_cublas_streams", [] { return 1; });
  m.def("get_stream_priority_range", [](int) { return std::pair(0, -3); }, py::arg("device_id") = -1);
  m.def("device_supports_multicast", [](int) { return false; }, py::arg("device_id") = -1);
  m.def("ubuf_built_with_mpi", [] { return false; });
  m.def("nvte_built_with_cublasmp", [] { return false; });
  m.def("get_grouped_gemm_setup_workspace_size", [](int64_t) { return 1; }, py::arg("num_tensors"));
  m.def("copy_data_ptrs_to_device", &copy_data_ptrs_to_device, py::arg("tensors"), py::arg("device"));
  bind_grouped_mlp(m);
}

}  // namespace weft::te
