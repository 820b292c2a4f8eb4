#pragma once
#include "weft/kernels/activation.h"
#include "weft/ops/operation.h"

namespace weft::ops {

/// y = act(x), in the autocast dtype, else that of x. Base of the activations without extra tensors; subclasses map
/// their fields to `act`. With `cache_quantized_input` forward saves x in FP8 (E4M3, scaled by its own maximum), and
/// backward computes with the values of these codes.
class ActivationOp : public BasicOp {
 public:
  enum Saved { kInput };

  const kernels::Act& act() const { return act_; }
  bool caches_quantized_input() const { return cache_quantized_input_; }
  DtypeRule dtype_rule() const override { return DtypeRule::autocast; }
  std::vector<std::string> saved_names() const override { return {"input"}; }
  kernels::TierChoice kernel(const TierQuery& q) const override {
    return kernels::choose_vector_tier(q.device, q.dtype);
  }
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params params) const override;

 protected:
  ActivationOp(kernels::Act act, bool cache_quantized_input)
      : act_(act), cache_quantized_input_(cache_quantized_input) {}

 private:
  kernels::Act act_;
  bool cache_quantized_input_;
};

/// `x` cast to `dtype`. Raises ValueError if the columns of `x` cannot be split as `act` requires: an even number, and
/// a multiple of its interleave size.
at::Tensor activation_input(const kernels::Act& act, const at::Tensor& x, at::ScalarType dtype);
/// Sizes and dtype of act(x).
Spec activation_output(const kernels::Act& act, const Spec& x);
/// Raises ValueError unless `value` is finite and positive.
void check_positive(std::string_view op, std::string_view argument, double value);
/// Converts `glu_interleave_size` to `Act::interleave`: 0 if not given. Raises ValueError if not positive.
int64_t interleave_size(std::string_view op, std::optional<int64_t> given);

/// The gated activation that `options` describe: SiTUGLU if they have beta1 and beta2, ClampedSwiGLU if they have a
/// limit, else SwiGLU.
template <class Options>
kernels::Act gated_act(std::string_view op, const Options& options) {
  kernels::Act act{.kind = kernels::ActKind::swiglu, .interleave = interleave_size(op, options.glu_interleave_size)};
  if constexpr (requires { options.beta1; }) {
    check_positive(op, "beta1", options.beta1);
    check_positive(op, "beta2", options.beta2);
    act.kind = kernels::ActKind::situglu;
    act.beta1 = options.beta1;
    act.beta2 = options.beta2;
  } else if constexpr (requires { options.limit; }) {
    act.kind = kernels::ActKind::clamped_swiglu;
    act.limit = options.limit;
    act.alpha = options.alpha;
    act.offset = options.glu_linear_offset;
  }
  return act;
}

}  // namespace weft::ops
