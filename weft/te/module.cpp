#include <string>

#include "weft/te/bind.h"

namespace weft::te {

void bind_unsupported(py::module_& m, const char* name, const char* reason) {
  m.def(name, [message = "transformer_engine_torch." + std::string(name) + " is not supported on the CPU: " + reason](
                  const py::args&, const py::kwargs&) { TORCH_CHECK_NOT_IMPLEMENTED(false, message); });
}

PYBIND11_MODULE(transformer_engine_torch, m) {
  m.doc() = "What Transformer Engine's Python calls, computed on the CPU by weft.";
  bind_enums(m);  // first: types of the arguments of the others
  bind_constants(m);
  bind_quantize(m);
  bind_grouped_tensor(m);
  bind_partial_cast(m);
  bind_gemm(m);
  bind_norm(m);
  bind_activation(m);
  bind_softmax(m);
  bind_rotary(m);
  bind_attention(m);
  bind_context_parallel(m);
  bind_layout(m);
  bind_dropout(m);
  bind_permutation(m);
  bind_padding(m);
  bind_router(m);
  bind_optimizers(m);
  bind_expert_parallel(m);
  bind_comm_overlap(m);
  bind_fused_run(m);
}

}  // namespace weft::te
