#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>

namespace weft::ops {

/// Where a weight gradient goes, how it is written there, and what autograd gets for it.
struct WgradSink {
  enum class Gives { gradient, dummy, nothing };
  at::Tensor out = {};  // the parameter's main_grad; undefined: fresh memory
  bool add = false;     // out += dW; otherwise out = dW, and out is not read
  Gives gives = Gives::gradient;
  bool zero_dummy = false;
};

/// What an operation says about its weight gradient.
struct WgradOptions {
  std::string_view op;  // for messages
  bool accumulate = false;
  bool delay = false;
};

/// A weight gradient that is due: dW = scale·dyᵀ x.
struct WgradProduct {
  at::Tensor dy, x;  // [..., out] and [..., in], of one dtype
  double scale = 1;
  int64_t run = 0;                                 // the backward run it belongs to
  const std::function<void()>* between = nullptr;  // as in Epilogue; of a product that is not put off
};

/// Reads where the gradient of `param` goes. With `fetch` its main_grad is there to be written; without, it was only
/// checked that there is one.
WgradSink resolve(const WgradOptions& options, const at::Tensor& param, bool fetch);

/// Computes the gradient into its sink, or puts it off; returns what autograd gets for `param`:
///   accumulate: a dummy if the parameter has grad_added_to_main_grad, which is set; else nothing
///   otherwise:  dW, or nothing if delayed
at::Tensor weight_gradient(const WgradOptions& options, const at::Tensor& param, WgradProduct product);

/// Computes the oldest gradient of `param` that was put off: into main_grad, or into .grad without accumulation. False
/// if none waits. To be called below autograd.
bool backward_dw(const WgradOptions& options, const at::Tensor& param);

/// How many gradients of `param` wait for `backward_dw`.
size_t pending_dw(const at::Tensor& param);

/// A gradient that stands for one already written elsewhere: sizes, strides, dtype and device of `param`, memory shared
/// by all that ask for the same, contents without meaning unless `zero`.
at::Tensor dummy_gradient(const at::Tensor& param, bool zero);

}  // namespace weft::ops
