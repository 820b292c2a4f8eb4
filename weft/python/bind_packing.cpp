#include "weft/kernels/packing.h"
#include "weft/python/module.h"

namespace weft::python {

/// The GIL is released: who holds it should not wait for a thread in a kernel.
void bind_packing(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  m.def("freeze", &kernels::freeze, py::arg("weight"), py::arg("name") = "weight", NoGil(),
        "Freezes a weight: the caller guarantees that its values do not change.");
  m.def("unfreeze", &kernels::unfreeze, py::arg("weight"), NoGil(), "Ends that.");
  m.def("packed_bytes", &kernels::packed_bytes, NoGil(), "Bytes of packed weights kept now.");
  m.def("packing_limit", &kernels::packing_limit, NoGil(), "Most bytes of packed weights to keep.");
  m.def("set_packing_limit", &kernels::set_packing_limit, py::arg("bytes"), NoGil(), "Sets it; 0 keeps none.");
  m.def(
      "packing_counts",
      [] {
        const auto c = kernels::packing_counts();
        return py::dict(py::arg("packed") = c.packed, py::arg("reused") = c.reused);
      },
      "How often a copy was made and kept, and a kept one used again.");
}

}  // namespace weft::python
