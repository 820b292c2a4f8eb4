#include "weft/core/ownership.h"
#include "weft/fused/rule.h"
#include "weft/kernels/rows.h"
#include "weft/ops/add_extra_input.h"
#include "weft/ops/dropout.h"

namespace weft::fused {
namespace {

/// y = e + x·m/(1-p) in one pass, where e is the extra input and m the mask. Written into e if AddExtraInput is
/// in_place and e is not referenced elsewhere. Runs both operations one by one if dtypes or shapes differ.
class DropoutAdd final : public ForwardFusion {
 public:
  explicit DropoutAdd(const Match& match)
      : dropout_(match.find<ops::Dropout>()), join_(match.find<ops::AddExtraInput>()) {}

  at::Tensor forward(StepContext& ctx, const at::Tensor& x) const override {
    auto dropout = ctx.op(0), join = ctx.op(1);
    const auto& e = join.extra_input(0);
    if (e.scalar_type() != x.scalar_type() || e.sizes() != x.sizes() ||
        dropout.dtype(x.scalar_type()) != x.scalar_type())
      return join_->forward(join, dropout_->forward(dropout, x, {}), {});
    const auto mask = dropout_->mask(dropout, x);
    const auto scale = 1 / (1 - dropout_->options().p);
    auto sum = join.take_extra_input(0);
    return join_->in_place() && sole_owner(sum) ? sum.addcmul_(x, mask, scale)
                                                : kernels::scaled_mask_add(x, mask, scale, sum);
  }

 private:
  MatchedOp<ops::Dropout> dropout_;
  MatchedOp<ops::AddExtraInput> join_;
};

std::string reject(const Match& m, const PlanView& view) {
  const auto& dropout = m.get<ops::Dropout>();
  if (dropout.output_is_input(view.plans[m.first()])) return "Dropout is the identity (evaluation mode, or p is 0)";
  if (dropout.options().p == 1) return "p is 1, so every value is dropped";
  return {};
}

}  // namespace

PatternRule forward_dropout_add() {
  return {.name = "dropout_add",
          .pattern = {one<ops::Dropout>(), one<ops::AddExtraInput>()},
          .reject = reject,
          .make = make_fused<DropoutAdd>(),
          .sample = []() -> std::vector<ops::OpPtr> {
            return {std::make_shared<ops::Dropout>(ops::Dropout::Options{.p = 0.25}),
                    std::make_shared<ops::AddExtraInput>(ops::AddExtraInput::Options{.in_place = true})};
          }};
}

}  // namespace weft::fused
