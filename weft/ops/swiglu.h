#pragma once
#include "weft/ops/activation_op.h"
#include "weft/ops/field_descriptions.h"

namespace weft::ops {

// In all three, a is the first and b the second half of the last dimension. With glu_interleave_size S, blocks of S
// values of a and S values of b alternate instead. The output is not interleaved.

/// y = a·σ(a)·b.
class SwiGLU final : public ActivationOp {
 public:
  struct Options {
    bool cache_quantized_input = false;
    std::optional<int64_t> glu_interleave_size = {};
    static constexpr auto fields() {
      return std::tuple{
          Field{"cache_quantized_input", &Options::cache_quantized_input, description::kCacheQuantizedInput},
          Field{"glu_interleave_size", &Options::glu_interleave_size, description::kGluInterleaveSize}};
    }
  };
  explicit SwiGLU(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "SwiGLU"; }
  std::vector<FieldValue> fields() const override { return list_fields(options_); }

 private:
  Options options_;
};

/// y = β1·tanh(a/β1)·σ(a) · β2·tanh(b/β2).
class SiTUGLU final : public ActivationOp {
 public:
  struct Options {
    double beta1 = 4.0;
    double beta2 = 25.0;
    bool cache_quantized_input = false;
    std::optional<int64_t> glu_interleave_size = {};
    static constexpr auto fields() {
      return std::tuple{
          Field{"beta1", &Options::beta1, description::kBeta1}, Field{"beta2", &Options::beta2, description::kBeta2},
          Field{"cache_quantized_input", &Options::cache_quantized_input, description::kCacheQuantizedInput},
          Field{"glu_interleave_size", &Options::glu_interleave_size, description::kGluInterleaveSize}};
    }
  };
  explicit SiTUGLU(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "SiTUGLU"; }
  std::vector<FieldValue> fields() const override { return list_fields(options_); }

 private:
  Options options_;
};

/// y = ā·σ(alpha·ā)·b̄ with ā = min(a, limit), b̄ = clamp(b, ±limit) + glu_linear_offset.
class ClampedSwiGLU final : public ActivationOp {
 public:
  struct Options {
    double limit = 7.0;
    double alpha = 1.702;
    double glu_linear_offset = 1.0;
    bool cache_quantized_input = false;
    std::optional<int64_t> glu_interleave_size = {};
    static constexpr auto fields() {
      return std::tuple{
          Field{"limit", &Options::limit, description::kLimit}, Field{"alpha", &Options::alpha, description::kAlpha},
          Field{"glu_linear_offset", &Options::glu_linear_offset, description::kGluLinearOffset},
          Field{"cache_quantized_input", &Options::cache_quantized_input, description::kCacheQuantizedInput},
          Field{"glu_interleave_size", &Options::glu_interleave_size, description::kGluInterleaveSize}};
    }
  };
  explicit ClampedSwiGLU(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "ClampedSwiGLU"; }
  std::vector<FieldValue> fields() const override { return list_fields(options_); }

 private:
  Options options_;
};

}  // namespace weft::ops
