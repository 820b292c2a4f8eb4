#include "weft/fused/rule.h"
#include "weft/ops/basic_linear.h"
#include "weft/ops/make_extra_output.h"
#include "weft/ops/rows.h"
#include "weft/tensor/ownership.h"

namespace weft::fused {
namespace {

/// An epilogue that adds g: into g itself if nobody else can see it.
kernels::Epilogue added(at::Tensor g) {
  if (!g.defined()) return {};
  const bool ours = sole_owner(g) && g.is_contiguous();
  auto matrix = ops::as_matrix(g);
  return {.add = matrix, .out = ours ? matrix : at::Tensor{}, .dtype = g.scalar_type()};
}

/// dx = dy W + g in one GEMM, g being the gradient of the extra output. Written into g itself if nobody else can see
/// it.
class LinearAdd final : public FusedOp {
 public:
  explicit LinearAdd(const Match& match) : linear_(match.op(1)) {}

  at::Tensor backward(StepContext& ctx, const at::Tensor& dy) const override {
    auto fork = ctx.op(0), linear = ctx.op(1);
    auto g = fork.take_extra_output_grad(0);
    if (!dy.defined()) return g;
    const auto& op = static_cast<const ops::BasicLinear&>(*linear_);
    op.weight_gradient(linear, dy);
    return op.input_gradient(linear, dy, ctx.params(1), added(std::move(g))).out;
  }

 private:
  ops::OpPtr linear_;
};

}  // namespace

FusionRule backward_linear_add() {
  return {.name = "linear_add",
          .pass = Pass::backward,
          .pattern = {one<ops::MakeExtraOutput>(), one<ops::BasicLinear>()},
          .refuse = [](const Match& m, const PlanView& view) -> std::string {
            if (!m.get<ops::MakeExtraOutput>().in_place()) return "MakeExtraOutput does not permit in_place";
            if (!view.plans[m.first()].input_wanted) return "no gradient of the input is wanted";
            return {};
          },
          .make = make_fused<LinearAdd>,
          .sample = []() -> std::vector<ops::OpPtr> {
            return {std::make_shared<ops::MakeExtraOutput>(ops::MakeExtraOutput::Options{.in_place = true}),
                    std::make_shared<ops::BasicLinear>(ops::BasicLinear::Options{.in_features = 8, .out_features = 4})};
          },
          .rewrite = {}};
}

}  // namespace weft::fused
