#pragma once
#include "weft/ops/field_descriptions.h"
#include "weft/ops/operation.h"

namespace weft::ops {

/// Base of the collective operations. With one rank, y is x itself and dx is dy.
template <class Self>
class Collective : public Op<Self> {
 public:
  bool output_is_input(const OpPlan&) const override { return single_rank(); }

 protected:
  bool single_rank() const { return static_cast<const Self*>(this)->options().process_group_size == 1; }
};

/// y is x of all ranks, concatenated along dimension 0; dx is dy, reduce-scattered.
class AllGather final : public Collective<AllGather> {
 public:
  struct Options {
    std::optional<std::string> process_group = {};
    int64_t process_group_size = 1;
    static constexpr auto fields() {
      return std::tuple{
          Field{"process_group", &Options::process_group, description::kProcessGroup, ParamKind::positional},
          Field{"process_group_size", &Options::process_group_size, description::kGroupSize}};
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

/// y is this rank's shard, along dimension 0, of the sum of x over all ranks; dx is dy, all-gathered.
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

/// y is the sum of x over all ranks. With reduce_in_backward dx is the sum of dy, as needed if ranks use y differently.
/// If all ranks compute the same from y, dy is already the full gradient and reduce_in_backward must be false.
class AllReduce final : public Collective<AllReduce> {
 public:
  struct Options {
    std::optional<std::string> process_group = {};
    bool reduce_in_backward = true;
    int64_t process_group_size = 1;
    static constexpr auto fields() {
      return std::tuple{
          Field{"process_group", &Options::process_group, description::kProcessGroup, ParamKind::positional},
          Field{"reduce_in_backward", &Options::reduce_in_backward,
                "All-reduce the gradient too; False if all ranks compute the same from the output, so that each has "
                "the full gradient.",
                ParamKind::positional},
          Field{"process_group_size", &Options::process_group_size, description::kGroupSize}};
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
