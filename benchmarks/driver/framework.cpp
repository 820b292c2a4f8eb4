#include "benchmarks/driver/framework.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sum.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "weft/fuser/fuser.h"
#include "weft/kernels/activation.h"
#include "weft/kernels/norm.h"

namespace bench {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int kSize = 8, kScales = 16;
constexpr double kEps = 1e-5, kScale = 0.99;

Tensor leaf() { return at::randn({kSize, kSize}).requires_grad_(); }

/// y = gelu(rms_norm(x) W1ᵀ + b) W2ᵀ and its gradients, written by hand.
struct FiveByHand : torch::autograd::Function<FiveByHand> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& g, const Tensor& w1, const Tensor& b,
                        const Tensor& w2) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [n, rstd] = weft::kernels::rms_norm_forward(x, g, kEps);
    const auto h = at::addmm(b, n, w1.t());
    const auto a = weft::kernels::activation_forward({.kind = weft::kernels::ActKind::gelu}, h);
    ctx->save_for_backward({x, rstd, n, h, a, g, w1, w2});
    return at::mm(a, w2.t());
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto s = ctx->get_saved_variables();
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto &x = s[0], &rstd = s[1], &n = s[2], &h = s[3], &a = s[4], &g = s[5], &w1 = s[6], &w2 = s[7];
    const auto& dy = grads[0];
    const auto dw2 = at::mm(dy.t(), a);
    const auto da = at::mm(dy, w2);
    const auto dh = weft::kernels::activation_backward({.kind = weft::kernels::ActKind::gelu}, da, h);
    const auto db = at::sum(dh, 0);
    const auto dw1 = at::mm(dh.t(), n);
    const auto dn = at::mm(dh, w1);
    auto norm = weft::kernels::rms_norm_backward(dn, x, rstd, g, {true, true});
    return {norm.dx, norm.dgamma, dw1, db, dw2};
  }
};

struct SixteenByHand : torch::autograd::Function<SixteenByHand> {
  static Tensor forward(AutogradContext*, const Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto y = x;
    for (int i = 0; i < kScales; ++i) y = at::mul(y, kScale);
    return y;
  }
  static variable_list backward(AutogradContext*, variable_list grads) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto dx = grads[0];
    for (int i = 0; i < kScales; ++i) dx = at::mul(dx, kScale);
    return {dx};
  }
};

// ---- 64 tiny experts: overhead of a grouped MLP ---------------------------------------------------------------------

constexpr int64_t kExperts = 64, kFeatures = 16, kExpertRows = 2 * kExperts;

/// An autograd node with as many leaves, saved tensors and gradients, which computes nothing.
struct ManyLeaves : torch::autograd::Function<ManyLeaves> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& probs, at::TensorList weights) {
    const at::AutoDispatchBelowADInplaceOrView below;
    variable_list saved{x, probs, at::empty({kExpertRows, 2 * kFeatures})};
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(std::move(saved));
    return at::empty_like(x);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list&) {
    const auto saved = ctx->get_saved_variables();
    const at::AutoDispatchBelowADInplaceOrView below;
    variable_list grads{at::empty_like(saved[0]), at::empty_like(saved[1])};
    for (const auto& sizes :
         {std::array{kExperts, 2 * kFeatures, kFeatures}, std::array{kExperts, kFeatures, kFeatures}}) {
      const auto block = at::empty(sizes);
      for (int64_t g = 0; g < kExperts; ++g) grads.push_back(block.select(0, g));
    }
    return grads;
  }
};

struct Experts {
  std::vector<Tensor> weights;
  Tensor x = at::randn({kExpertRows, kFeatures}).requires_grad_(), probs = at::rand({kExpertRows}).requires_grad_();
  Tensor splits = at::full({kExperts}, 2, at::kLong), dy = at::randn({kExpertRows, kFeatures});

  explicit Experts(bool single) {
    for (const int64_t rows : {2 * kFeatures, kFeatures})
      for (int64_t g = 0; g < (single ? 1 : kExperts); ++g)
        weights.push_back(
            (single ? at::randn({kExperts, rows, kFeatures}) : at::randn({rows, kFeatures})).requires_grad_());
  }
  void clear() const {
    for (const auto& w : weights) w.mutable_grad().reset();
  }
};

std::function<void()> experts_by_weft(bool single) {
  const auto linear = [&](int64_t in, int64_t out) {
    return "GroupedLinear(num_groups=64, in_features=" + std::to_string(in) + ", out_features=" + std::to_string(out) +
           ", bias=false, single_grouped_weight=" + (single ? "true" : "false") + ")";
  };
  const auto text = linear(kFeatures, 2 * kFeatures) + "; ScaledSwiGLU(); " + linear(kFeatures, kFeatures);
  auto fuser = std::make_shared<weft::fuser::Fuser>(weft::fuser::Pipeline::parse(text));
  return [fuser, e = Experts(single)] {
    e.clear();
    torch::autograd::backward({(*fuser)(e.x, e.weights, {e.splits, e.probs, e.splits})[0]}, {e.dy});
  };
}

std::function<void()> experts_by_hand(bool single) {
  return [e = Experts(single)] {
    e.clear();
    torch::autograd::backward({ManyLeaves::apply(e.x, e.probs, at::TensorList(e.weights))}, {e.dy});
  };
}

std::vector<Tensor> five_params() {
  return {at::ones({kSize}).requires_grad_(), leaf(), at::randn({kSize}).requires_grad_(), leaf()};
}

/// Runs backward as `y.backward(g)` does.
void backward(const Tensor& y, const Tensor& g) { torch::autograd::backward({y}, {g}); }

std::function<void()> through_weft(const char* text, std::vector<Tensor> params) {
  auto fuser = std::make_shared<weft::fuser::Fuser>(weft::fuser::Pipeline::parse(text));
  return [fuser, params = std::move(params), x = leaf(), g = at::randn({kSize, kSize})] {
    const auto y = (*fuser)(x, params, {});
    backward(y[0], g);
  };
}

constexpr const char* kFive =
    "RMSNorm(normalized_shape=[8], eps=1e-05); BasicLinear(in_features=8, out_features=8); Bias(size=8); GELU(); "
    "BasicLinear(in_features=8, out_features=8)";

std::string sixteen() {
  std::string text;
  for (int i = 0; i < kScales; ++i) text += std::string(i ? "; " : "") + "ConstantScale(scale=0.99)";
  return text;
}

}  // namespace

const std::vector<FrameworkProblem>& framework_problems() {
  static const std::vector<FrameworkProblem> problems{
      {"five", [] { return through_weft(kFive, five_params()); },
       []() -> std::function<void()> {
         return [p = five_params(), x = leaf(), g = at::randn({kSize, kSize})] {
           backward(FiveByHand::apply(x, p[0], p[1], p[2], p[3]), g);
         };
       }},
      {"sixteen", [] { return through_weft(sixteen().c_str(), {}); },
       []() -> std::function<void()> {
         return [x = leaf(), g = at::randn({kSize, kSize})] { backward(SixteenByHand::apply(x), g); };
       }},
      {"experts", [] { return experts_by_weft(false); }, [] { return experts_by_hand(false); }},
      {"experts_packed", [] { return experts_by_weft(true); }, [] { return experts_by_weft(false); }},
  };
  return problems;
}

}  // namespace bench
