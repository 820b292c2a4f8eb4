#include "weft/ops/reshape.h"

#include <ATen/ops/zeros.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>

#include "weft/ops/leading_dims.h"
#include "weft/ops/registry.h"

namespace weft::ops {

Reshape::Reshape(Options options) : options_(std::move(options)) {
  const auto& shape = options_.shape;
  const bool below = std::any_of(shape.begin(), shape.end(), [](int64_t size) { return size < -1; });
  TORCH_CHECK_VALUE(!below, "Reshape: shape is ", at::IntArrayRef(shape), ", expected sizes of 0 or more, or -1.");
  const auto open = std::count(shape.begin(), shape.end(), -1);
  const bool empty = std::count(shape.begin(), shape.end(), 0) > 0;
  TORCH_CHECK_VALUE(open == 0 || (open == 1 && !empty), "Reshape: shape is ", at::IntArrayRef(shape),
                    ", expected at most one -1, and no -1 together with a 0.");
}

Inferred Reshape::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const {
  const auto values = x.numel();
  int64_t known = 1;
  bool fits = true;
  for (const auto size : options_.shape) fits &= size == -1 || !c10::mul_overflows(known, size, &known);
  const bool open = std::count(options_.shape.begin(), options_.shape.end(), -1) > 0;
  fits = fits && (open ? known > 0 && same_size(values % known, 0) : same_size(values, known));
  TORCH_CHECK_VALUE(fits, "cannot reshape input of shape ", x.sizes, " to ", at::IntArrayRef(options_.shape),
                    "; expected a shape with ", values, " elements.");
  Inferred out{.y = {{}, x.dtype}};
  for (const auto size : options_.shape) out.y.sizes.push_back(size == -1 ? values / known : c10::SymInt(size));
  out.saved.resize(1);
  if (plan.needs_input_grad) out.saved[kShape] = x;
  return out;
}

at::Tensor Reshape::forward(OpContext& ctx, const at::Tensor& x, Params) const {
  at::Tensor y;
  try {
    y = x.reshape(options_.shape);
  } catch (const c10::Error&) {
    (void)infer(ctx.plan(), Spec::of(x), {}, {});  // raises an error with the sizes
    throw;
  }
  if (ctx.needs_input_grad()) ctx.save(kShape, at::zeros({}, x.options()).expand(x.sizes()));
  return share_version_counter(y, x);
}

at::Tensor Reshape::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  return ctx.needs_input_grad() ? share_version_counter(dy.reshape(ctx.saved(kShape).sizes()), dy) : at::Tensor{};
}

static const Register<Reshape> reshape{"Reshape",
                                       {.summary = "Reshapes the input: y = x.reshape(shape).",
                                        .details = "The output is a view of the input where that is possible.",
                                        .shape = "Input: ``(*)``, any shape.\nOutput: ``shape``.",
                                        .example_inputs = "torch.randn(2, 12)",
                                        .example_shape = "[4, 2, 3]"},
                                       {.shape = {4, -1, 3}}};

}  // namespace weft::ops
