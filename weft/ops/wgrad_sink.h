#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>

#include "weft/kernels/grouped.h"
#include "weft/ops/context.h"

namespace weft::ops {

/// Where a weight gradient is written, how, and what autograd receives for it.
struct WgradSink {
  enum class Returns { gradient, dummy, nothing };
  at::Tensor out = {};      // the parameter's main_grad; undefined: allocate
  bool accumulate = false;  // out += dW; otherwise out = dW, and out is not read
  Returns returns = Returns::gradient;
  bool zero_dummy = false;
};

/// An operation's options for its weight gradient.
struct WgradOptions {
  bool accumulate = false;
  bool delay = false;
};

/// A pending wgrad GEMM: dW = scale·dyᵀ x, or with `splits` one dW per group of rows.
struct WgradGemm {
  at::Tensor dy = {}, x = {};  // [..., out] and [..., in], of one dtype
  double scale = 1;
  int64_t graph_task_id = 0;  // LeafParams::graph_task_id; set if the gradient is delayed or overwrites main_grad
  const std::function<void()>* progress = nullptr;  // as in Epilogue; null for a delayed GEMM
  at::Tensor packed_dy = {};                        // dyᵀ, packed; optional
  at::Tensor splits = {};                           // row counts of the groups, for a grouped weight
  bool stacked = false;  // the grouped weight is one parameter [G, out, in], not G parameters
  kernels::GroupedPath path = kernels::GroupedPath::best;
  std::optional<kernels::GroupedQuantization> quantization = {};  // of a grouped weight
  /// If set, computes dW instead of one GEMM: writes it to `out` (if undefined, to new memory), or adds it to `out` if
  /// `accumulate`. Returns where it wrote.
  std::function<at::Tensor(const at::Tensor& out, bool accumulate)> compute = {};
};

/// Determines the sink of `param`. With `fetch`, main_grad is obtained and ready to be written; without, it is only
/// checked to exist.
WgradSink resolve(const WgradOptions& options, const at::Tensor& param, bool fetch);

/// Computes, or delays, the gradients of the `count` parameters from `first` on, writes them to their sinks and returns
/// to autograd, for each parameter:
///   accumulate: a dummy gradient if the parameter has grad_added_to_main_grad (which is set to true), else nothing
///   otherwise:  dW, or nothing if delayed
void weight_gradient(OpContext& ctx, const WgradOptions& options, int first, int count, WgradGemm gemm);

/// Computes all gradients of `params` that the oldest backward delayed: into main_grad, or into .grad if `accumulate`
/// is off. False if none are pending. Call it below autograd.
bool backward_dw(const WgradOptions& options, Params params);

/// The number of pending `backward_dw` calls, one per backward, for `param` or the parameter list that starts with it.
size_t pending_dw(const at::Tensor& param);

/// A placeholder for a gradient already written elsewhere: sizes, strides, dtype and device of `param`, in memory
/// shared by all equal requests. The contents are unspecified unless `zero`.
at::Tensor dummy_gradient(const at::Tensor& param, bool zero);

}  // namespace weft::ops
