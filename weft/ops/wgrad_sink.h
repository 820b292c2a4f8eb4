#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>

#include "weft/kernels/grouped.h"
#include "weft/ops/context.h"

namespace weft::ops {

/// Where a weight gradient goes, how it is written there, and what autograd gets for it.
struct WgradSink {
  enum class Returns { gradient, dummy, nothing };
  at::Tensor out = {};      // the parameter's main_grad; undefined: fresh memory
  bool accumulate = false;  // out += dW; otherwise out = dW, and out is not read
  Returns returns = Returns::gradient;
  bool zero_dummy = false;
};

/// What an operation says about its weight gradient.
struct WgradOptions {
  std::string_view op;  // for messages
  bool accumulate = false;
  bool delay = false;
};

/// A weight gradient that is due: dW = scale·dyᵀ x; or, with `splits`, one for each group of rows.
struct WgradGemm {
  at::Tensor dy, x;  // [..., out] and [..., in], of one dtype
  double scale = 1;
  int64_t graph_task_id = 0;  // the backward it belongs to (LeafParams::graph_task_id), if that matters
  const std::function<void()>* progress = nullptr;  // as in Epilogue; of a product that is not put off
  at::Tensor packed_dy = {};                        // of dyᵀ, if somebody has made them
  at::Tensor splits = {};                           // of a grouped weight
  bool stacked = false;                             // a grouped weight is one parameter [G, out, in], not G of them
  kernels::GroupedPath path = kernels::GroupedPath::best;
};

/// Reads where the gradient of `param` goes. With `fetch` its main_grad is there to be written; without, it was only
/// checked that there is one.
WgradSink resolve(const WgradOptions& options, const at::Tensor& param, bool fetch);

/// Computes the gradient of the operation's parameters `first` to `first + count` into their sinks, or puts it off, and
/// tells autograd for each of them:
///   accumulate: a dummy if the parameter has grad_added_to_main_grad, which is set; else nothing
///   otherwise:  dW, or nothing if delayed
void weight_gradient(OpContext& ctx, const WgradOptions& options, int first, int count, WgradGemm gemm);

/// Computes the delayed gradients of `params` that the oldest backward left, however often it used them: into
/// main_grad, or into .grad without accumulation. False if none are pending. To be called below autograd.
bool backward_dw(const WgradOptions& options, Params params);

/// How many calls of `backward_dw` are due for `param`, or for the parameters whose first it is: one per backward.
size_t pending_dw(const at::Tensor& param);

/// A gradient that stands for one already written elsewhere: sizes, strides, dtype and device of `param`, memory shared
/// by all that ask for the same, contents without meaning unless `zero`.
at::Tensor dummy_gradient(const at::Tensor& param, bool zero);

}  // namespace weft::ops
