#pragma once
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>

namespace weft::kernels {

/// The implementation: weft's AMX kernels; vector code in AVX-512, AVX2 or NEON around the GEMM of MKL, oneDNN or
/// another library that torch contains; or ATen calls. On x86-64 all but neon, on AArch64 neon and ref.
enum class Tier { amx, avx512, avx2, neon, ref };

/// The best tier that the CPU supports, or the lower one that the environment variable WEFT_TIER names. Read once per
/// process. Raises ValueError for an unknown name or a tier that the CPU does not support.
Tier machine_tier();
std::string_view tier_name(Tier tier);

/// The tier that runs a call, and why each better tier of this machine does not (one or two sentences per tier).
struct TierChoice {
  Tier tier = Tier::ref;
  std::string rejection_reason = {};
};

/// The tier of element-wise and row-wise kernels. The vector tiers take float32, bfloat16 and float16 on the CPU.
TierChoice choose_vector_tier(c10::DeviceType device, at::ScalarType dtype);
/// The same without the reason: it allocates nothing, so kernels may call it each time.
Tier vector_tier(c10::DeviceType device, at::ScalarType dtype);

}  // namespace weft::kernels
