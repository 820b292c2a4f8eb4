#include "weft/ops/activation_op.h"

#include <cmath>

#include "weft/ops/leading_dims.h"

namespace weft::ops {

ActivationOp::ActivationOp(std::string_view name, kernels::Act act, bool cache_quantized_input) : act_(act) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !cache_quantized_input, name,
      ": cache_quantized_input is not supported (quantized tensors are not supported). Leave it false.");
}

Inferred ActivationOp::infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const {
  const auto input = x.as(plan.dtype(x.dtype));
  Inferred out{.y = activation_output(act_, input)};
  out.saved.resize(1);
  if (plan.needs_input_grad) out.saved[kInput] = saved_input(x, input.dtype);
  return out;
}

at::Tensor ActivationOp::forward(OpContext& ctx, const at::Tensor& x, Params) const {
  auto input = activation_input(act_, x, ctx.dtype(x.scalar_type()));
  auto y = kernels::activation_forward(act_, input);
  if (ctx.needs_input_grad()) ctx.save(kInput, std::move(input));
  return y;
}

at::Tensor ActivationOp::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  return ctx.needs_input_grad() ? kernels::activation_backward(act_, dy, ctx.saved(kInput)) : at::Tensor{};
}

/// A gated activation splits the last dimension into halves, and each half into blocks of glu_interleave_size. `Size`
/// is int64_t or c10::SymInt.
template <class Size>
static void check_gated_sizes(const kernels::Act& act, c10::ArrayRef<Size> sizes) {
  TORCH_CHECK_VALUE(!sizes.empty(), "input is a scalar, expected at least 1 dimension.");
  const Size& columns = sizes.back();
  const Size half = columns / 2;
  TORCH_CHECK_VALUE(same_size(columns % 2, 0), "input has ", columns, " columns, expected an even number.");
  TORCH_CHECK_VALUE(act.interleave == 0 || same_size(half % act.interleave, 0), "half of the input has ", half,
                    " columns, expected a multiple of glu_interleave_size ", act.interleave, ".");
}

at::Tensor activation_input(const kernels::Act& act, const at::Tensor& x, at::ScalarType dtype) {
  if (act.gated()) check_gated_sizes(act, x.sizes());
  return as_dtype(x, dtype);
}

Spec activation_output(const kernels::Act& act, const Spec& x) {
  if (!act.gated()) return x;
  check_gated_sizes(act, c10::SymIntArrayRef(x.sizes));
  return x.with_last(x.sizes.back() / 2);
}

void check_positive(std::string_view op, std::string_view argument, double value) {
  TORCH_CHECK_VALUE(std::isfinite(value) && value > 0, op, ": ", argument, " is ", value,
                    ", expected a finite positive number.");
}

int64_t interleave_size(std::string_view op, std::optional<int64_t> given) {
  TORCH_CHECK_VALUE(!given || *given > 0, op, ": glu_interleave_size is ", *given,
                    ", expected a positive integer or none.");
  return given.value_or(0);
}

}  // namespace weft::ops
