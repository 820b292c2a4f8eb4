#pragma once
#include "weft/ops/operation.h"

namespace weft::ops {

/// Base of operations for which y is x itself and dx is dy.
template <class Self>
class PassThrough : public Op<Self> {
 public:
  bool output_is_input(const OpPlan&) const override { return true; }
  Inferred infer(const OpPlan&, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const override {
    return {.y = x};
  }
  at::Tensor forward(OpContext&, const at::Tensor& x, Params) const override { return x; }
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params) const override {
    return ctx.needs_input_grad() ? dy : at::Tensor{};
  }
};

}  // namespace weft::ops
