#pragma once
#include "weft/ops/operation.h"

namespace weft::ops {

/// y = e + x, where e is an extra input of the same shape as x.  dx = de = dy.
class AddExtraInput final : public Op<AddExtraInput> {
 public:
  struct Options {
    bool in_place = false;
    static constexpr auto fields() {
      return std::tuple{Field{"in_place", &Options::in_place,
                              "Write the output into the extra input if nothing else references it."}};
    }
  };
  explicit AddExtraInput(Options options) : options_(options) {}

  const Options& options() const { return options_; }
  std::string_view name() const override { return "AddExtraInput"; }
  int extra_inputs() const override { return 1; }
  DtypeRule dtype_rule() const override { return DtypeRule::promote; }
  bool in_place() const override { return options_.in_place; }
  Inferred infer(const OpPlan&, const Spec& x, c10::ArrayRef<Spec> extra, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params) const override;

 private:
  Options options_;
};

}  // namespace weft::ops
