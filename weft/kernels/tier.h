#pragma once
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>

namespace weft::kernels {

/// Who computes: our own AMX tiles, vector code for AVX-512 or AVX2 around the engine's GEMM, or plain ATen calls.
enum class Tier { amx, avx512, avx2, ref };

/// The best tier of this machine: what the CPU has, or less if the environment variable WEFT_TIER names one
/// (amx, avx512, avx2, ref). Read once per process; an unknown word raises.
Tier machine_tier();
std::string_view tier_name(Tier tier);

/// The tier that serves a problem, and, one clause per tier, why each better one of this machine does not.
struct TierChoice {
  Tier tier = Tier::ref;
  std::string rejection_reason = {};
};

/// Element-wise and row-wise kernels: vector tiers take float32, bfloat16 and float16 on the CPU.
TierChoice choose_vector_tier(c10::DeviceType device, at::ScalarType dtype);
/// Only the tier, for the call path.
Tier vector_tier(c10::DeviceType device, at::ScalarType dtype);

}  // namespace weft::kernels
