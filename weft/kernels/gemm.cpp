#include "weft/kernels/gemm.h"

#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {

bool amx_supports(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k) {
  return machine_tier() == Tier::amx && device == c10::DeviceType::CPU && dtype == at::kBFloat16 && n * k >= 256;
}

namespace {

/// Of a machine that has some.
std::string amx_rejection(c10::DeviceType device, at::ScalarType dtype) {
  if (device != c10::DeviceType::CPU) return "it runs on the CPU only";
  if (dtype != at::kBFloat16) return std::string("no tiles for ") + c10::toString(dtype);
  return "the weight is smaller than a tile";
}

bool interleaved(const std::optional<Act>& act) { return act && act->interleave != 0; }

}  // namespace

Tier gemm_tier(const Matrix& a, const Matrix& b, const Epilogue& e) {
  const auto vector = vector_tier(a.t, b.t, e.bias, e.act_input, e.addend, e.out);
  if (vector == Tier::ref) return vector;
  const bool on_amx = a.rows() > 0 && amx_supports(a.t.device().type(), a.t.scalar_type(), b.columns(), b.rows());
  return on_amx && !interleaved(e.act) && !interleaved(e.act_grad) ? Tier::amx : vector;
}

GemmResult gemm(const Matrix& a, const Matrix& b, const Epilogue& epilogue) {
  switch (const auto tier = gemm_tier(a, b, epilogue)) {
    case Tier::amx:
      return amx::gemm(a.tensor(), b.tensor(), epilogue, a.packed ? *a.packed : at::Tensor());
    case Tier::ref:
      return ref::gemm(a.tensor(), b.tensor(), epilogue);
    default:
      return vector_gemm(tier, a, b, epilogue);
  }
}

TierChoice choose_gemm_tier(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k) {
  if (machine_tier() != Tier::amx) return choose_vector_tier(device, dtype);
  if (amx_supports(device, dtype, n, k)) return {Tier::amx};
  auto next = choose_vector_tier(device, dtype);
  next.rejection_reason = "amx declined: " + amx_rejection(device, dtype) +
                          (next.rejection_reason.empty() ? "" : "; " + next.rejection_reason);
  return next;
}

}  // namespace weft::kernels
