#include "weft/quant/delayed_scaling.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cfloat>
#include <cmath>

#include "weft/core/host_memory.h"

namespace weft::quant {
namespace {

void check_state(const at::Tensor& state) {
  TORCH_CHECK_VALUE(state.defined() && state.scalar_type() == at::kFloat && state.dim() == 2 && state.size(0) >= 2 &&
                        state.is_contiguous() && in_host_memory(state.device()),
                    "delayed scaling: expected a state of contiguous float32 [1 + history, tensors] in host memory.");
}

}  // namespace

at::Tensor make_delayed_state(int64_t length, int64_t tensors) {
  TORCH_CHECK_VALUE(length >= 1, "DelayedScaling: amax_history_len is ", length, ", expected 1 or more.");
  auto state = at::zeros({1 + length, tensors}, at::kFloat);
  state.select(0, 0).fill_(1);
  return state;
}

at::Tensor delayed_scale(const at::Tensor& state, int64_t i) {
  check_state(state);
  return state.select(0, 0).narrow(0, i, 1);
}

void record_amax(const at::Tensor& state, int64_t i, const at::Tensor& amax) {
  check_state(state);
  const std::atomic_ref<float> recorded(state.mutable_data_ptr<float>()[state.size(1) + i]);
  const float found = amax.item<float>();
  for (float before = recorded.load(); found > before && !recorded.compare_exchange_weak(before, found);) {
  }
}

void update_delayed_state(const at::Tensor& state, const at::Tensor& reduced, float max,
                          const DelayedScalingUpdate& options) {
  check_state(state);
  const auto n = state.size(1), length = state.size(0) - 1;
  TORCH_CHECK_VALUE(!reduced.defined() || (reduced.numel() == n && reduced.scalar_type() == at::kFloat &&
                                           reduced.is_contiguous() && in_host_memory(reduced.device())),
                    "delayed scaling: expected ", n, " reduced maxima, contiguous float32 in host memory.");
  auto* const scales = state.mutable_data_ptr<float>();
  auto* const history = scales + n;  // [length][n]
  const float scaled_max = max * static_cast<float>(std::exp2(-options.margin));
  for (int64_t i = 0; i < n; ++i) {
    const float collected = reduced.defined() ? reduced.const_data_ptr<float>()[i] : 0;
    const float last = collected != 0 ? collected : history[i];
    if (last == 0) continue;  // it was not quantized in this step
    float amax = last;
    for (int64_t row = 1; row < length && options.amax_compute_algo == AmaxAlgo::max; ++row)
      amax = std::fmax(amax, history[row * n + i]);
    for (int64_t row = 1; row + 1 < length; ++row) history[row * n + i] = history[(row + 1) * n + i];
    if (length > 1) history[(length - 1) * n + i] = last;
    history[i] = 0;
    if (std::isfinite(amax) && amax > 0) scales[i] = std::fmin(scaled_max / amax, FLT_MAX);
  }
}

}  // namespace weft::quant
