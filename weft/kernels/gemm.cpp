#include "weft/kernels/gemm.h"

#include "weft/kernels/operand.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {

bool has_tiles(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k) {
  return machine_tier() == Tier::amx && device == c10::DeviceType::CPU && dtype == at::kBFloat16 && n * k >= 256;
}

namespace {

/// Of a machine that has some.
std::string why_no_tiles(c10::DeviceType device, at::ScalarType dtype) {
  if (device != c10::DeviceType::CPU) return "it runs on the CPU only";
  if (dtype != at::kBFloat16) return std::string("no tiles for ") + c10::toString(dtype);
  return "the weight is smaller than a tile";
}

bool interleaved(const std::optional<Act>& act) { return act && act->interleave != 0; }

}  // namespace

Tier gemm_tier(const Matrix& a, const Matrix& b, const Epilogue& e) {
  const auto vector = vector_tier(a.t, b.t, e.bias, e.at, e.add, e.out);
  if (vector == Tier::ref) return vector;
  const bool tiles = a.rows() > 0 && has_tiles(a.t.device().type(), a.t.scalar_type(), b.columns(), b.rows());
  return tiles && !interleaved(e.act) && !interleaved(e.slope) ? Tier::amx : vector;
}

GemmResult gemm(const Matrix& a, const Matrix& b, const Epilogue& epilogue) {
  switch (const auto tier = gemm_tier(a, b, epilogue)) {
    case Tier::amx:
      return amx::gemm(a.tensor(), b.tensor(), epilogue, a.tiles ? *a.tiles : at::Tensor());
    case Tier::ref:
      return ref::gemm(a.tensor(), b.tensor(), epilogue);
    default:
      return gemm_rows(tier, a, b, epilogue);
  }
}

Choice gemm_choice(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k) {
  if (machine_tier() != Tier::amx) return vector_choice(device, dtype);
  if (has_tiles(device, dtype, n, k)) return {Tier::amx};
  auto next = vector_choice(device, dtype);
  next.declined = "amx declined: " + why_no_tiles(device, dtype) + (next.declined.empty() ? "" : "; " + next.declined);
  return next;
}

}  // namespace weft::kernels
