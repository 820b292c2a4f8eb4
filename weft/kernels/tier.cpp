#include "weft/kernels/tier.h"

#include <ATen/core/ivalue.h>
#include <ATen/cpu/Utils.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include "weft/core/errors.h"
#include "weft/core/host_memory.h"
#include "weft/core/value.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

constexpr std::array<std::string_view, 5> kTierNames{"amx", "avx512", "avx2", "neon", "ref"};

#ifdef __x86_64__
constexpr std::array kBuiltTiers{Tier::amx, Tier::avx512, Tier::avx2, Tier::ref};

Tier detect_tier() {
  const bool avx2 = cpu_has("avx2") && cpu_has("fma3") && cpu_has("f16c");
  const bool avx512 =
      avx2 && cpu_has("avx512_f") && cpu_has("avx512_bw") && cpu_has("avx512_vl") && cpu_has("avx512_dq");
#ifdef WEFT_EMULATE_AMX
  const bool amx = avx512;
#else
  const bool amx =
      avx512 && cpu_has("avx512_bf16") && cpu_has("amx_tile") && cpu_has("amx_bf16") && at::cpu::init_amx();
#endif
  if (amx) return Tier::amx;
  if (avx512) return Tier::avx512;
  return avx2 ? Tier::avx2 : Tier::ref;
}
#else
constexpr std::array kBuiltTiers{Tier::neon, Tier::ref};

Tier detect_tier() { return Tier::neon; }  // a part of AArch64
#endif

Tier tier_from_environment() {
  const auto best = detect_tier();
  const char* name = std::getenv("WEFT_TIER");
  if (!name || !*name) return best;
  std::vector<std::string> names;
  for (const auto tier : kBuiltTiers) {
    names.emplace_back(tier_name(tier));
    if (names.back() != name) continue;
    TORCH_CHECK_VALUE(tier >= best, "WEFT_TIER: got ", name, ", but the best this CPU has is ", tier_name(best),
                      ". Set it to that tier or a lower one, or unset it.");
    return tier;
  }
  TORCH_CHECK_VALUE(false, "WEFT_TIER: got '", name, "', expected ", c10::Join(", ", names), ".",
                    did_you_mean(name, names));
}

}  // namespace

bool cpu_has(const char* feature) {
  static const auto features = at::cpu::get_cpu_capabilities();
  const auto found = features.find(feature);
  return found != features.end() && found->second.isBool() && found->second.toBool();
}

Tier machine_tier() {
  static const Tier tier = tier_from_environment();
  return tier;
}

std::string_view tier_name(Tier tier) { return kTierNames[static_cast<size_t>(tier)]; }

Tier vector_tier(c10::DeviceType device, at::ScalarType dtype) {
  const bool known = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  if (!in_host_memory(device) || !known) return Tier::ref;
  return machine_tier() == Tier::amx ? Tier::avx512 : machine_tier();
}

std::string amx_rejection(c10::DeviceType device, at::ScalarType dtype) {
  if (!in_host_memory(device))
    return c10::str("amx: not used on ", c10::DeviceTypeName(device, /*lower_case=*/true), " (AMX runs on the CPU).");
  if (dtype == at::kBFloat16) return {};
  return c10::str("amx: not used for ", dtype_name(dtype),
                  " (AMX tiles take bfloat16). Convert the block with .to(torch.bfloat16) to use it.");
}

TierChoice after_rejection(const std::string& reason, TierChoice next) {
  next.rejection_reason = reason + (next.rejection_reason.empty() ? "" : " " + next.rejection_reason);
  return next;
}

TierChoice choose_vector_tier(c10::DeviceType device, at::ScalarType dtype) {
  TierChoice out{vector_tier(device, dtype)};
  if (machine_tier() == Tier::ref || out.tier != Tier::ref) return out;
  const auto best = tier_name(vector_tier(c10::DeviceType::CPU, at::kFloat));
  if (!in_host_memory(device))
    out.rejection_reason = c10::str(best, ": not used on ", c10::DeviceTypeName(device, /*lower_case=*/true),
                                    " (vector kernels run on the CPU).");
  else
    out.rejection_reason =
        c10::str(best, ": not used for ", dtype_name(dtype),
                 " (vector kernels take float32, bfloat16 and float16). Convert the block to one of them to use it.");
  return out;
}

}  // namespace weft::kernels
