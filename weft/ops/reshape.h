#pragma once
#include "weft/ops/operation.h"

namespace weft::ops {

/// y is x reshaped to `shape`; one size may be -1 and is inferred.
class Reshape final : public Op<Reshape> {
 public:
  struct Options {
    std::vector<int64_t> shape = {};
    static constexpr auto fields() {
      return std::tuple{Field{"shape", &Options::shape, "Shape of the output; one size may be -1 and is inferred.",
                              ParamKind::required}};
    }
  };
  enum Saved { kShape };

  explicit Reshape(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "Reshape"; }
  std::vector<std::string> saved_names() const override { return {"shape of the input (no data)"}; }
  bool output_is_input(const OpPlan&) const override { return true; }
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params) const override;

 private:
  Options options_;
};

}  // namespace weft::ops
