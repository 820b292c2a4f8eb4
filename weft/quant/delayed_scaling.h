#pragma once
#include <ATen/core/Tensor.h>

#include "weft/quant/quantizer.h"

namespace weft::quant {

// Delayed scaling: the scale of a tensor comes from its maximum magnitudes in earlier steps. The state of n tensors is
// float32 [1 + L, n]: the scales, then a history of L rows, of which the first collects the maxima of the current step,
// the second is the oldest and the last the newest.

/// Which maximum of the history determines the scale.
enum class AmaxAlgo { max, most_recent };

struct DelayedScalingUpdate {
  double margin = 0;
  AmaxAlgo amax_compute_algo = AmaxAlgo::max;
};

/// Scales of 1 and an empty history of `length` rows.
at::Tensor make_delayed_state(int64_t length, int64_t tensors);
/// The scale of tensor i, as `kernels::quantize` takes it: a view of the state.
at::Tensor delayed_scale(const at::Tensor& state, int64_t i);
/// Adds a maximum magnitude, float32 of one element, to those of the current step. Thread-safe.
void record_amax(const at::Tensor& state, int64_t i, const at::Tensor& amax);

/// Ends a step. For each tensor that was quantized: its maximum moves to the end of the history, and
///   scale = (max of the format · 2^-margin) / amax
/// unless that amax is not finite. `reduced`: the maxima of the current step over all ranks, float32 [n]; undefined:
/// those of the state. `max`: the largest value of the format.
void update_delayed_state(const at::Tensor& state, const at::Tensor& reduced, float max,
                          const DelayedScalingUpdate& options);

}  // namespace weft::quant

template <>
struct weft::EnumNames<weft::quant::AmaxAlgo> {
  static constexpr std::array<const char*, 2> list = {"max", "most_recent"};
};
