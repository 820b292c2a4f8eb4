#pragma once
#include "weft/ops/operation.h"

namespace weft::ops {

/// Base of the operations between ranks. With one rank they return x itself, and dy as its gradient.
template <class Self>
class Collective : public Op<Self> {
 public:
  bool output_is_input(const OpPlan&) const override { return single_rank(); }

 protected:
  bool single_rank() const { return static_cast<const Self*>(this)->options().process_group_size == 1; }
};

/// y is x of all ranks, one after the other in the first dimension; dx is this rank's part of the sum of dy.
class AllGather final : public Collective<AllGather> {
 public:
  struct Options {
    std::optional<std::string> process_group = {};
    int64_t process_group_size = 1;
    static constexpr auto fields() {
      return std::tuple{Field{"process_group", &Options::process_group, ParamKind::positional},
                        Field{"process_group_size", &Options::process_group_size}};
    }
  };
  explicit AllGather(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "AllGather"; }
  Inferred infer(const OpPlan&, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params params) const override;

 private:
  Options options_;
};

/// y is this rank's part, in the first dimension, of the sum of x over all ranks; dx is dy of all ranks.
class ReduceScatter final : public Collective<ReduceScatter> {
 public:
  using Options = AllGather::Options;
  explicit ReduceScatter(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "ReduceScatter"; }
  Inferred infer(const OpPlan&, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params params) const override;

 private:
  Options options_;
};

/// y is the sum of x over all ranks. dx is the sum of dy if each rank does something of its own with y; where all do
/// the same, dy is already the whole gradient, and reduce_in_backward must be off.
class AllReduce final : public Collective<AllReduce> {
 public:
  struct Options {
    std::optional<std::string> process_group = {};
    bool reduce_in_backward = true;
    int64_t process_group_size = 1;
    static constexpr auto fields() {
      return std::tuple{Field{"process_group", &Options::process_group, ParamKind::positional},
                        Field{"reduce_in_backward", &Options::reduce_in_backward, ParamKind::positional},
                        Field{"process_group_size", &Options::process_group_size}};
    }
  };
  explicit AllReduce(Options options);

  const Options& options() const { return options_; }
  std::string_view name() const override { return "AllReduce"; }
  Inferred infer(const OpPlan&, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const override;
  at::Tensor forward(OpContext& ctx, const at::Tensor& x, Params params) const override;
  at::Tensor backward(OpContext& ctx, const at::Tensor& dy, Params params) const override;

 private:
  Options options_;
};

}  // namespace weft::ops
