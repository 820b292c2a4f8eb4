#include "weft/fuser/pipeline.h"
#include "weft/python/module.h"

namespace weft::python {

void bind_functional(py::module_& m) {
  m.def(
      "normalize_text", [](const std::string& text) { return fuser::Pipeline::parse(text).text(); },
      "The text of a pipeline, read and written again.");
}

}  // namespace weft::python
