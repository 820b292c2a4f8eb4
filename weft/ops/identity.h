#pragma once
#include "weft/ops/pass_through.h"

namespace weft::ops {

/// y is x itself.
class Identity final : public PassThrough<Identity> {
 public:
  struct Options {
    static constexpr auto fields() { return std::tuple{}; }
  };
  explicit Identity(Options options) : options_(options) {}

  const Options& options() const { return options_; }
  std::string_view name() const override { return "Identity"; }

 private:
  Options options_;
};

}  // namespace weft::ops
