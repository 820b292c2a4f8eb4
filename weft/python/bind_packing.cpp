#include "weft/kernels/packing.h"
#include "weft/python/module.h"

namespace weft::python {

/// The GIL is released: who holds it should not wait for a thread in a kernel.
void bind_packing(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def("freeze", &kernels::freeze, py::arg("weight"), NoGil(), "Promises that a weight's values stay as they are.");
  m.def("thaw", &kernels::thaw, py::arg("weight"), NoGil(), "Takes the promise back.");
  m.def("packed_bytes", &kernels::packed_bytes, NoGil(), "Bytes of packed weights kept now.");
  m.def("packing_limit", &kernels::packing_limit, NoGil(), "Most bytes of packed weights to keep.");
  m.def("set_packing_limit", &kernels::set_packing_limit, py::arg("bytes"), NoGil(), "Sets it; 0 keeps none.");
  m.def(
      "packing_counts",
      [] {
        const auto c = kernels::packing_counts();
        return py::dict(py::arg("packed") = c.packed, py::arg("verified") = c.verified, py::arg("stale") = c.stale,
                        py::arg("frozen") = c.frozen);
      },
      "How often a weight was packed, found unchanged, found changed, and used frozen.");
}

}  // namespace weft::python
