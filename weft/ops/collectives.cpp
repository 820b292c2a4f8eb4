#include "weft/ops/collectives.h"

#include "weft/comm/group.h"
#include "weft/ops/parallel.h"
#include "weft/ops/registry.h"

namespace weft::ops {
namespace {

/// Resolves the group size and drops the group if it has one rank.
template <class Options>
Options resolve_group(std::string_view op, Options options) {
  auto& ranks = options.process_group_size;
  if (options.process_group || ranks != 1) ranks = resolve_group_size(op, options.process_group, ranks);
  if (ranks == 1) options.process_group.reset();
  return options;
}

template <class Options>
comm::Group group_of(const Options& options) {
  return {*options.process_group, options.process_group_size};
}

void check_first_dimension(const Spec& x) {
  TORCH_CHECK_VALUE(!x.sizes.empty(), "input is a scalar, expected at least 1 dimension.");
}

}  // namespace

AllGather::AllGather(Options options) : options_(resolve_group("AllGather", std::move(options))) {}

Inferred AllGather::infer(const OpPlan&, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const {
  Inferred out{.y = x};
  if (single_rank()) return out;
  check_first_dimension(x);
  out.y.sizes[0] = x.sizes[0] * options_.process_group_size;
  return out;
}

at::Tensor AllGather::forward(OpContext&, const at::Tensor& x, Params) const {
  return single_rank() ? x : group_of(options_).all_gather(x).wait();
}

at::Tensor AllGather::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  if (!ctx.needs_input_grad()) return {};
  return single_rank() ? dy : group_of(options_).reduce_scatter(dy).wait();
}

ReduceScatter::ReduceScatter(Options options) : options_(resolve_group("ReduceScatter", std::move(options))) {}

Inferred ReduceScatter::infer(const OpPlan&, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const {
  Inferred out{.y = x};
  if (single_rank()) return out;
  check_first_dimension(x);
  out.y.sizes[0] = x.sizes[0] / options_.process_group_size;
  return out;
}

at::Tensor ReduceScatter::forward(OpContext&, const at::Tensor& x, Params) const {
  return single_rank() ? x : group_of(options_).reduce_scatter(x).wait();
}

at::Tensor ReduceScatter::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  if (!ctx.needs_input_grad()) return {};
  return single_rank() ? dy : group_of(options_).all_gather(dy).wait();
}

AllReduce::AllReduce(Options options) : options_(resolve_group("AllReduce", std::move(options))) {}

Inferred AllReduce::infer(const OpPlan&, const Spec& x, c10::ArrayRef<Spec>, c10::ArrayRef<Spec>) const {
  return {.y = x};
}

at::Tensor AllReduce::forward(OpContext&, const at::Tensor& x, Params) const {
  return single_rank() ? x : group_of(options_).all_reduce(x).wait();
}

at::Tensor AllReduce::backward(OpContext& ctx, const at::Tensor& dy, Params) const {
  if (!ctx.needs_input_grad()) return {};
  return single_rank() || !options_.reduce_in_backward ? dy : group_of(options_).all_reduce(dy).wait();
}

static const Register<AllGather> all_gather{
    "AllGather",
    {.summary = "Concatenates the inputs of all ranks along dimension 0: y = [x_0; x_1; …].",
     .details = "The gradient is reduce-scattered. With one rank the output is the input itself.",
     .shape = "Input: ``(n, *)``, the same on all ranks.\nOutput: ``(p * n, *)`` with p ranks."},
    {}};
static const Register<ReduceScatter> reduce_scatter{
    "ReduceScatter",
    {.summary = "Sums the inputs of all ranks and returns one shard of dimension 0: y = (Σ x_r)[shard of this rank].",
     .details = "The gradient is all-gathered. With one rank the output is the input itself.",
     .shape = "Input: ``(p * n, *)`` with p ranks.\nOutput: ``(n, *)``."},
    {}};
static const Register<AllReduce> all_reduce{"AllReduce",
                                            {.summary = "Sums the inputs of all ranks: y = Σ x_r.",
                                             .details = "With one rank the output is the input itself.",
                                             .shape = kSameShape},
                                            {}};

}  // namespace weft::ops
