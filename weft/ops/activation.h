#pragma once
#include "weft/ops/activation_op.h"

namespace weft::ops {

/// y = f(x), elementwise: GELU (tanh form), QGELU x·σ(1.702x), ReLU, SReLU relu(x)², SiLU x·σ(x). Or y = f(a)·b, where
/// a is the first and b the second half of the last dimension: GLU (f = σ), GEGLU, QGEGLU, ReGLU, SReGLU.
class Activation final : public ActivationOp {
 public:
  struct Options {
    kernels::ActKind kind = kernels::ActKind::gelu;  // part of the operation's name, not a field
    bool cache_quantized_input = false;
    static constexpr auto fields() {
      return std::tuple{Field{"cache_quantized_input", &Options::cache_quantized_input}};
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
