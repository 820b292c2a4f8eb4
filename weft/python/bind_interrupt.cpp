#include "weft/comm/interrupt.h"
#include "weft/python/module.h"

namespace weft::python {
namespace {

unsigned long main_thread = 0;

/// Runs pending signal handlers, as Python does between bytecodes; they may raise KeyboardInterrupt. Python runs
/// handlers on its main thread only, so other threads return without the GIL.
void run_signal_handlers() {
  if (PyThread_get_thread_ident() != main_thread || !Py_IsInitialized()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

void bind_interrupt() {
  main_thread = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  comm::set_interrupt_check(run_signal_handlers);
}

}  // namespace weft::python
