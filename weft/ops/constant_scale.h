#pragma once
#include "weft/ops/operation.h"

namespace weft::ops {

/// y = x·scale.
class ConstantScale final : public Op<ConstantScale> {
 public:
  struct Options {
    double scale = 1;
    static constexpr auto fields() {
      return std::tuple{Field{"scale", &Options::scale, "Factor of every element.", ParamKind::required}};
    }
  };
  explicit ConstantScale(Options options) : options_(options) {}

  const Options& options() const { return options_; }
  std::string_view name() const override { return "ConstantScale"; }
  Inferred infer(const OpPlan&, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext&, const at::Tensor& x, Params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params) const override;

 private:
  Options options_;
};

}  // namespace weft::ops
