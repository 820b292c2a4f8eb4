#pragma once
#include "weft/ops/pass_through.h"

namespace weft::ops {

/// Marks where tensors may be quantized. Linears quantize their operands themselves, so y is x itself and dx is dy.
class Quantize final : public PassThrough<Quantize> {
 public:
  struct Options {
    bool forward = true;
    bool backward = false;
    static constexpr auto fields() {
      return std::tuple{
          Field{"forward", &Options::forward, "Mark the input for quantization; has no effect.", ParamKind::positional},
          Field{"backward", &Options::backward, "Mark the output gradient for quantization; has no effect.",
                ParamKind::positional}};
    }
  };
  explicit Quantize(Options options) : options_(options) {}

  const Options& options() const { return options_; }
  std::string_view name() const override { return "Quantize"; }

 private:
  Options options_;
};

}  // namespace weft::ops
