#include "weft/python/module.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "weft's C++ core.";
  weft::python::bind_ops(m);
  weft::python::bind_custom(m);
  weft::python::bind_explain(m);
  weft::python::bind_runner(m);
  weft::python::bind_functional(m);
  weft::python::bind_wgrad(m);
  weft::python::bind_packing(m);
  weft::python::bind_quantization(m);
  weft::python::bind_recipes(m);
  weft::python::bind_interrupt();
}
