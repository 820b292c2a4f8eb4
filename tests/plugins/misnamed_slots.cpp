// An operation for tests/python/test_dispatcher.py, loaded into Python before weft. Its slot "input" does not hold the
// input, and its slot "copy" holds a parameter: only SavedSpec::from may decide what a compiled graph drops.
#include "weft/ops/leading_dims.h"
#include "weft/ops/registry.h"

namespace weft::ops {
namespace {

/// y = w·x².  dx = dy·w·2x,  dw = Σ_rows dy·x².
class MisnamedSlots final : public Op<MisnamedSlots> {
 public:
  struct Options {
    int64_t size = 1;
    static constexpr auto fields() {
      return std::tuple{Field{"size", &Options::size, "Size of the last dimension.", ParamKind::required}};
    }
  };
  enum Saved { kDoubled, kWeight };

  explicit MisnamedSlots(Options options) : options_(options) {}

  const Options& options() const { return options_; }
  std::string_view name() const override { return "MisnamedSlots"; }
  std::vector<ParamSpec> params() const override {
    return {{.name = "weight", .shape = {options_.size}, .init = Init::ones}};
  }
  std::vector<std::string> saved_names() const override { return {"input", "copy"}; }
  Inferred infer(const OpPlan& plan, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec> params) const override {
    Inferred out{.y = x};
    out.saved.resize(2);
    if (plan.needs_grad) out.saved = {x, SavedSpec(params[0], SavedFrom::parameter, 0)};
    return out;
  }
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params params) const override {
    if (ctx.needs_grad()) {
      ctx.save(kDoubled, x.mul(2));
      ctx.save(kWeight, params[0]);
    }
    return x.mul(x).mul(params[0]);
  }
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params) const override {
    const auto& doubled = ctx.saved(kDoubled);
    if (ctx.needs_param_grad(0)) ctx.set_param_grad(0, as_matrix(dy.mul(doubled).mul(doubled).div(4)).sum(0));
    return ctx.needs_input_grad() ? dy.mul(doubled).mul(ctx.saved(kWeight)) : at::Tensor{};
  }

 private:
  Options options_;
};

const Register<MisnamedSlots> misnamed_slots{
    "MisnamedSlots", {.summary = "Scales the square: y = w·x².", .shape = kSameShape}, {.size = 4}};

}  // namespace
}  // namespace weft::ops
