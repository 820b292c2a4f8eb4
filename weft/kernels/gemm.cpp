#include "weft/kernels/gemm.h"

#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

/// Why the AMX tier does not take such a product; empty if it does.
std::string amx_refusal(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k) {
  if (device != c10::DeviceType::CPU) return "it runs on the CPU only";
  if (dtype != at::kBFloat16) return std::string("no tiles for ") + c10::toString(dtype);
  if (n * k < 256) return "the weight is smaller than a tile";
  return {};
}

bool interleaved(const std::optional<Act>& act) { return act && act->interleave != 0; }

Tier choose(const Matrix& a, const Matrix& b, const Epilogue& e) {
  const auto best = machine_tier();
  if (best == Tier::ref) return Tier::ref;
  const auto m = a.rows(), n = b.columns(), k = a.columns();
  const auto device = a.t.device().type();
  const auto dtype = a.t.scalar_type();
  if (best == Tier::amx && dtype == at::kBFloat16 && device == c10::DeviceType::CPU && m > 0 && n > 0 && k > 0 &&
      n * k >= 256 && !interleaved(e.act) && !interleaved(e.slope))
    return Tier::amx;
  return vector_tier(device, dtype);
}

}  // namespace

GemmResult gemm(const Matrix& a, const Matrix& b, const Epilogue& epilogue) {
  switch (const auto tier = choose(a, b, epilogue)) {
    case Tier::amx:
      return amx::gemm(a.tensor(), b.tensor(), epilogue);
    case Tier::ref:
      return ref::gemm(a.tensor(), b.tensor(), epilogue);
    default:
      return gemm_rows(tier, a, b, epilogue);
  }
}

Choice gemm_choice(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k) {
  if (machine_tier() != Tier::amx) return vector_choice(device, dtype);
  const auto refusal = amx_refusal(device, dtype, n, k);
  if (refusal.empty()) return {Tier::amx};
  auto next = vector_choice(device, dtype);
  next.declined = "amx declined: " + refusal + (next.declined.empty() ? "" : "; " + next.declined);
  return next;
}

}  // namespace weft::kernels
