#include "weft/kernels/gemm.h"

#include <c10/util/StringUtil.h>

#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {

bool amx_supports(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k) {
  return machine_tier() == Tier::amx && in_host_memory(device) && dtype == at::kBFloat16 && n * k >= 256;
}

namespace {

bool interleaved(const std::optional<Act>& act) { return act && act->interleave != 0; }

}  // namespace

Tier gemm_tier(const Matrix& a, const Matrix& b, const Epilogue& e) {
  const auto vector = vector_tier(a.t, b.t, e.bias, e.act_input, e.addend, e.out);
  if (vector == Tier::ref) return vector;
  const bool on_amx = a.rows() > 0 && amx_supports(a.t.device().type(), a.t.scalar_type(), b.columns(), b.rows());
  return on_amx && !interleaved(e.act) && !interleaved(e.act_grad) ? Tier::amx : vector;
}

namespace {

/// Raises unless the operands and the tensors of the epilogue fit, and have memory.
void check_sizes(const Matrix& a, const Matrix& b, const Epilogue& e) {
  const auto m = a.rows(), n = b.columns();
  TORCH_CHECK_VALUE(a.columns() == b.rows(), "gemm: the operands have shapes [", m, ", ", a.columns(), "] and [",
                    b.rows(), ", ", n, "], which do not fit.");
  check_elements(a.t, a.t.numel(), "an operand of a GEMM");
  check_elements(b.t, b.t.numel(), "an operand of a GEMM");
  const bool halves = e.act && e.act->gated(), doubles = e.act_grad && e.act_grad->gated();
  const auto result = m * (halves ? n / 2 : doubles ? 2 * n : n);
  if (e.bias.defined()) check_elements(e.bias, n, "the bias of a GEMM");
  if (e.act_grad) check_elements(e.act_input, doubles ? 2 * m * n : m * n, "the input of the activation");
  if (e.addend.defined()) check_elements(e.addend, result, "the addend of a GEMM");
  if (e.out.defined()) check_elements(e.out, result, "the output of a GEMM");
}

}  // namespace

GemmResult gemm(const Matrix& a, const Matrix& b, const Epilogue& epilogue) {
  check_sizes(a, b, epilogue);
  switch (const auto tier = gemm_tier(a, b, epilogue)) {
    case Tier::amx:
      return amx::gemm(a.tensor(), b.tensor(), epilogue, a.packed ? *a.packed : at::Tensor());
    case Tier::ref:
      return ref::gemm(a.tensor(), b.tensor(), epilogue);
    default:
      return vector_gemm(tier, a, b, epilogue);
  }
}

GemmResult apply_epilogue(const at::Tensor& product, const Epilogue& e, at::ScalarType dtype) {
  const auto device = product.device().type();
  const auto tier = vector_tier(product, e.bias, e.act_input, e.addend, e.out);
  const bool known = vector_tier(device, dtype) != Tier::ref && vector_tier(device, e.result_dtype(dtype)) != Tier::ref;
  return tier == Tier::ref || !known ? ref::apply_epilogue(product, e, dtype)
                                     : vector_epilogue(tier, product, e, dtype);
}

TierChoice choose_gemm_tier(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k) {
  if (machine_tier() != Tier::amx) return choose_vector_tier(device, dtype);
  if (amx_supports(device, dtype, n, k)) return {Tier::amx};
  auto reason = amx_rejection(device, dtype);
  if (reason.empty()) reason = c10::str("amx: not used for a weight of ", n * k, " elements (AMX needs at least 256).");
  return after_rejection(reason, choose_vector_tier(device, dtype));
}

}  // namespace weft::kernels
