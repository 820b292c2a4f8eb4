#pragma once
#include "weft/ops/pass_through.h"

namespace weft::ops {

// This version runs groups of one rank only: there, each of these returns x itself.

/// y is x of all ranks, one after the other in the first dimension.
class AllGather final : public PassThrough<AllGather> {
 public:
  struct Options {
    std::optional<std::string> process_group = {};
    int64_t process_group_size = 1;
    static constexpr auto fields() {
      return std::tuple{Field{"process_group", &Options::process_group, Given::position},
                        Field{"process_group_size", &Options::process_group_size}};
    }
  };
  explicit AllGather(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "AllGather"; }

 private:
  Options options_;
};

/// y is this rank's part, in the first dimension, of the sum of x over all ranks.
class ReduceScatter final : public PassThrough<ReduceScatter> {
 public:
  using Options = AllGather::Options;
  explicit ReduceScatter(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "ReduceScatter"; }

 private:
  Options options_;
};

/// y is the sum of x over all ranks.
class AllReduce final : public PassThrough<AllReduce> {
 public:
  struct Options {
    std::optional<std::string> process_group = {};
    bool reduce_in_backward = true;
    int64_t process_group_size = 1;
    static constexpr auto fields() {
      return std::tuple{Field{"process_group", &Options::process_group, Given::position},
                        Field{"reduce_in_backward", &Options::reduce_in_backward, Given::position},
                        Field{"process_group_size", &Options::process_group_size}};
    }
  };
  explicit AllReduce(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "AllReduce"; }

 private:
  Options options_;
};

}  // namespace weft::ops
