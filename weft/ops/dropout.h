#pragma once
#include "weft/ops/operation.h"

namespace weft::ops {

/// Training: y = x·m/(1-p), with each m 0 with probability p and 1 otherwise, drawn from torch's generator. Evaluation:
/// y is x itself.
class Dropout final : public Op<Dropout> {
 public:
  struct Options {
    double p = 0;
    static constexpr auto fields() {
      return std::tuple{Field{"p", &Options::p, "Probability with which an element is set to zero in training.",
                              ParamKind::required}};
    }
  };
  enum Saved { kMask };

  explicit Dropout(Options options);

  const Options& options() const { return options_; }
  /// Draws m for x and saves it for backward if needed.
  at::Tensor mask(OpContext& ctx, const at::Tensor& x) const;

  std::string_view name() const override { return "Dropout"; }
  DtypeRule dtype_rule() const override { return DtypeRule::autocast; }
  std::vector<std::string> saved_names() const override { return {"mask"}; }
  bool depends_on_training() const override { return true; }
  bool output_is_input(const OpPlan& plan) const override { return !plan.training || options_.p == 0; }
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params) const override;

 private:
  Options options_;
};

}  // namespace weft::ops
