#pragma once
#include <array>

#include "weft/ops/activation_op.h"
#include "weft/ops/field_descriptions.h"

namespace weft::ops {
/// `approximate` of torch.nn.GELU.
enum class GeluApproximation { tanh, none };
}  // namespace weft::ops

template <>
struct weft::EnumNames<weft::ops::GeluApproximation> {
  static constexpr std::array<const char*, 2> list{"tanh", "none"};
};

namespace weft::ops {

/// y = x·Φ(x) = x/2·(1 + erf(x/√2)), or its approximation x·(½ + ½·tanh(√(2/π)·(x + 0.044715·x³))).
class GELU final : public ActivationOp {
 public:
  struct Options {
    GeluApproximation approximate = GeluApproximation::tanh;
    bool cache_quantized_input = false;
    static constexpr auto fields() {
      return std::tuple{
          Field{"approximate", &Options::approximate,
                "``\"tanh\"``: the tanh form, as in Transformer Engine; ``\"none\"``: the erf form, as in "
                "torch.nn.GELU().",
                ParamKind::positional},
          Field{"cache_quantized_input", &Options::cache_quantized_input, description::kCacheQuantizedInput}};
    }
  };
  explicit GELU(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "GELU"; }
  std::vector<FieldValue> fields() const override { return list_fields(options_); }

 private:
  Options options_;
};

/// y = f(x), elementwise: QGELU x·σ(1.702x), ReLU, SReLU relu(x)², SiLU x·σ(x). Or y = f(a)·b, where
/// a is the first and b the second half of the last dimension: GLU (f = σ), GEGLU, QGEGLU, ReGLU, SReGLU.
class Activation final : public ActivationOp {
 public:
  struct Options {
    kernels::ActKind kind = kernels::ActKind::relu;  // part of the operation's name, not a field
    bool cache_quantized_input = false;
    static constexpr auto fields() {
      return std::tuple{
          Field{"cache_quantized_input", &Options::cache_quantized_input, description::kCacheQuantizedInput}};
    }
  };
  explicit Activation(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override;
  std::vector<FieldValue> fields() const override { return list_fields(options_); }

 private:
  Options options_;
};

}  // namespace weft::ops
