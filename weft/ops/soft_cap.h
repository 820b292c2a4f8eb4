#pragma once
#include "weft/ops/operation.h"

namespace weft::ops {

/// y = cap·tanh(x / cap), in the autocast dtype, else that of x.  dx = dy·(1 - tanh²(x / cap)).
class SoftCap final : public Op<SoftCap> {
 public:
  struct Options {
    double cap = 0;
    static constexpr auto fields() {
      return std::tuple{
          Field{"cap", &Options::cap, "Bound of the magnitude of the output; positive.", ParamKind::required}};
    }
  };
  enum Saved { kInput };

  explicit SoftCap(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "SoftCap"; }
  DtypeRule dtype_rule() const override { return DtypeRule::autocast; }
  std::vector<std::string> saved_names() const override { return {"input"}; }
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params) const override;

 private:
  Options options_;
};

}  // namespace weft::ops
