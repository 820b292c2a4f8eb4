#pragma once
#include "weft/ops/operation.h"

namespace weft::ops {

/// Returns x itself, and once more as an extra output.  dx = dy + gradient of the extra output.
class MakeExtraOutput final : public Op<MakeExtraOutput> {
 public:
  struct Options {
    bool in_place = false;  // add into the extra output's gradient if nobody else can see it
    static constexpr auto fields() { return std::tuple{Field{"in_place", &Options::in_place}}; }
  };
  explicit MakeExtraOutput(Options options) : options_(options) {}

  const Options& options() const { return options_; }
  std::string_view name() const override { return "MakeExtraOutput"; }
  int extra_outputs() const override { return 1; }
  bool output_is_input(const OpPlan&) const override { return true; }
  bool in_place() const override { return options_.in_place; }
  Inferred infer(const OpPlan&, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params) const override;

 private:
  Options options_;
};

}  // namespace weft::ops
