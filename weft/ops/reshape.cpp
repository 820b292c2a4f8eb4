#include "weft/ops/reshape.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "weft/ops/registry.h"

namespace weft::ops {

Reshape::Reshape(Options options) : options_(std::move(options)) {
  const auto& shape = options_.shape;
  const bool below = std::any_of(shape.begin(), shape.end(), [](int64_t size) { return size < -1; });
  TORCH_CHECK_VALUE(!below, "Reshape: shape is ", shape, ", expected sizes of 0 or more, or -1.");
  const auto open = std::count(shape.begin(), shape.end(), -1);
  const bool empty = std::count(shape.begin(), shape.end(), 0) > 0;
  TORCH_CHECK_VALUE(open == 0 || (open == 1 && !empty), "Reshape: shape is ", shape,
                    ", expected at most one -1, and none beside a 0.");
}

Inferred Reshape::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const {
  c10::SymInt values = 1;
  for (const auto& size : x.sizes) values = values * size;
  int64_t known = 1;
  for (const auto size : options_.shape) known *= size == -1 ? 1 : size;
  Inferred out{.y = {{}, x.dtype}, .extra_outputs = {}, .saved = {}};
  for (const auto size : options_.shape) out.y.sizes.push_back(size == -1 ? values / known : c10::SymInt(size));
  out.saved.resize(1);
  if (plan.input_wanted) out.saved[kShape] = x;
  return out;
}

at::Tensor Reshape::forward(OpContext& ctx, const at::Tensor& x, Params) const {
  if (ctx.input_wanted()) ctx.save(kShape, at::empty({}, x.options()).expand(x.sizes()));
  return x.reshape(options_.shape);
}

at::Tensor Reshape::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  return ctx.input_wanted() ? dy.reshape(ctx.saved(kShape).sizes()) : at::Tensor{};
}

static const Register<Reshape> reshape{
    "Reshape", "The values of x in the sizes `shape`, of which one may be -1.", {.shape = {4, -1, 3}}};

}  // namespace weft::ops
