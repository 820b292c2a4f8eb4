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

Tier choose(const at::Tensor& a, const at::Tensor& b, const Epilogue& e) {
  const auto best = machine_tier();
  if (best == Tier::ref) return Tier::ref;
  const auto m = a.size(0), n = b.size(1), k = a.size(1);
  if (best == Tier::amx && a.scalar_type() == at::kBFloat16 && a.device().is_cpu() && m > 0 && n > 0 && k > 0 &&
      n * k >= 256 && !interleaved(e.act) && !interleaved(e.slope))
    return Tier::amx;
  return vector_tier(a.device().type(), a.scalar_type());
}

}  // namespace

GemmResult gemm(const at::Tensor& a, const at::Tensor& b, Epilogue epilogue) {
  switch (const auto tier = choose(a, b, epilogue)) {
    case Tier::amx:
      return amx::gemm(a, b, std::move(epilogue));
    case Tier::ref:
      return ref::gemm(a, b, std::move(epilogue));
    default:
      return gemm_rows(tier, a, b, std::move(epilogue));
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
