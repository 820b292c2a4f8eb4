#include "weft/kernels/cpu/gemm_grid.h"
#include "weft/kernels/packing.h"
#include "weft/python/module.h"

namespace weft::python {

/// These calls release the GIL, because they may wait for a thread inside a kernel.
void bind_packing(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def("freeze", &kernels::freeze, py::arg("weight"), py::arg("name") = "weight", NoGil(),
        "Freezes a weight: the caller guarantees that its values do not change, and GEMMs reuse its packed copy.");
  m.def("unfreeze", &kernels::unfreeze, py::arg("weight"), NoGil(), "Unfreezes a weight.");
  m.def("packed_bytes", &kernels::packed_bytes, NoGil(), "Bytes of packed weights in the cache.");
  m.def("packing_limit", &kernels::packing_limit, NoGil(), "Maximum bytes of packed weights in the cache.");
  m.def("set_packing_limit", &kernels::set_packing_limit, py::arg("bytes"), NoGil(),
        "Sets the maximum bytes of packed weights in the cache; 0 disables it.");
  m.def(
      "packing_counts",
      [] {
        const auto c = kernels::packing_counts();
        return py::dict(py::arg("packed") = c.packed, py::arg("reused") = c.reused);
      },
      "How often a packed copy was cached, and a cached one reused.");
  m.def("gemm_packed_bytes", &kernels::gemm_packed_bytes,
        "Bytes packed by AMX kernels since the start of the process.");
  m.def(
      "gemm_grid",
      [](int64_t m, int64_t n, int64_t k, int threads, bool weight_gradient) {
        const auto work = kernels::dense_gemm_work(m, n, k, weight_gradient);
        const auto grid = kernels::choose_grid(work, threads);
        const auto share = kernels::largest_share(work, grid);
        return py::dict(py::arg("grid") = py::make_tuple(grid.resident, grid.streamed, grid.k),
                        py::arg("imbalance") = kernels::imbalance(work, grid, threads),
                        py::arg("packed_bytes") = share.packed_bytes, py::arg("moved_bytes") = share.moved_bytes,
                        py::arg("cycles") = share.cycles());
      },
      py::arg("m"), py::arg("n"), py::arg("k"), py::arg("threads"), py::arg("weight_gradient") = false,
      "How the AMX kernel splits a GEMM [m, k] x [k, n] over threads, and the model's work of the largest share.");
}

}  // namespace weft::python
