#pragma once
#include "weft/ops/operation.h"

namespace weft::ops {

/// y and the extra output are both x itself.  dx = dy + gradient of the extra output.
class MakeExtraOutput final : public Op<MakeExtraOutput> {
 public:
  struct Options {
    bool in_place = false;
    static constexpr auto fields() {
      return std::tuple{
          Field{"in_place", &Options::in_place,
                "Write the input gradient into the gradient of the extra output if nothing else references it."}};
    }
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
