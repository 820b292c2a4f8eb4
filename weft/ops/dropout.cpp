#include "weft/ops/dropout.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include "weft/kernels/rows.h"
#include "weft/ops/leading_dims.h"
#include "weft/ops/registry.h"

namespace weft::ops {

Dropout::Dropout(Options options) : options_(options) {
  TORCH_CHECK_VALUE(options_.p >= 0 && options_.p <= 1, "Dropout: p is ", options_.p, ", expected 0 to 1.");
}

Inferred Dropout::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const {
  Inferred out{.y = x};
  out.saved.resize(1);
  if (output_is_input(plan)) return out;
  out.y.dtype = plan.dtype(x.dtype);
  if (plan.needs_input_grad && options_.p < 1) out.saved[kMask] = x.as(at::kBool);
  return out;
}

at::Tensor Dropout::mask(OpContext& ctx, const at::Tensor& x) const {
  auto m = at::empty(x.sizes(), x.options().dtype(at::kBool)).bernoulli_(1 - options_.p);
  if (ctx.needs_input_grad()) ctx.save(kMask, m);
  return m;
}

at::Tensor Dropout::forward(OpContext& ctx, const at::Tensor& x, Params) const {
  if (output_is_input(ctx.plan())) return x;
  const auto input = as_dtype(x, ctx.dtype(x.scalar_type()));
  if (options_.p == 1) return at::zeros_like(input);
  return kernels::scaled_mask_add(input, mask(ctx, x), 1 / (1 - options_.p));
}

at::Tensor Dropout::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  if (!ctx.needs_input_grad()) return {};
  if (output_is_input(ctx.plan())) return dy;
  if (options_.p == 1) return at::zeros_like(dy);
  return kernels::scaled_mask_add(dy, ctx.saved(kMask), 1 / (1 - options_.p));
}

static const Register<Dropout> dropout{
    "Dropout",
    {.summary = "Zeroes random elements in training and scales the others: y = x·m / (1 - p).",
     .details = "Each m is 0 with probability p and 1 otherwise, drawn from torch's generator. In evaluation the "
                "output is the input itself.",
     .shape = kSameShape},
    {.p = 0.5}};

}  // namespace weft::ops
