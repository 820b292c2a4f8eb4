#include "weft/nn/linear.h"

#include "weft/ops/bias.h"
#include "weft/ops/collectives.h"
#include "weft/ops/parallel.h"

namespace weft::nn {

using ops::ParallelMode;

namespace {

ops::OpPtr basic_linear(const LinearOptions& o) {
  ops::BasicLinear::Options options{.in_features = o.in_features,
                                    .out_features = o.out_features,
                                    .dtype = o.dtype,
                                    .accumulate_into_main_grad = o.accumulate_into_main_grad,
                                    .delay_wgrad_compute = o.delay_wgrad_compute,
                                    .userbuffers_options = o.userbuffers_options,
                                    .overlap = o.overlap};
  if (o.tensor_parallel_mode == ParallelMode::row) {
    options.in_features = ops::divide_evenly("Linear", "in_features", o.in_features, o.tensor_parallel_size);
    options.fan_in = o.in_features;  // initialized as in the unsharded layer
  } else {                           // column, or not parallel
    options.tensor_parallel_mode = o.tensor_parallel_mode;
    options.tensor_parallel_group = o.tensor_parallel_group;
    options.tensor_parallel_size = o.tensor_parallel_size;
    options.sequence_parallel = o.sequence_parallel;
  }
  return std::make_shared<ops::BasicLinear>(std::move(options));
}

/// The bias of this rank has out_features elements, or its shard of them in column mode. Bias divides its size by the
/// number of ranks, so row mode with one bias per rank passes out_features times that number.
ops::OpPtr bias(const LinearOptions& o) {
  const bool row = o.tensor_parallel_mode == ParallelMode::row, replicated = row && o.replicated_bias;
  return std::make_shared<ops::Bias>(
      ops::Bias::Options{.size = o.out_features * (row && !replicated ? o.tensor_parallel_size : 1),
                         .dtype = o.dtype,
                         .tensor_parallel = o.tensor_parallel_mode && !replicated,
                         .tensor_parallel_group = o.tensor_parallel_group,
                         .tensor_parallel_size = o.tensor_parallel_size,
                         .sequence_parallel = replicated && o.sequence_parallel});
}

/// The sum of a row-parallel output over the ranks. Without sequence_parallel all ranks receive the same dy, which
/// backward does not reduce.
ops::OpPtr reduction(const LinearOptions& o) {
  if (o.sequence_parallel)
    return std::make_shared<ops::ReduceScatter>(ops::ReduceScatter::Options{
        .process_group = o.tensor_parallel_group, .process_group_size = o.tensor_parallel_size});
  return std::make_shared<ops::AllReduce>(ops::AllReduce::Options{.process_group = o.tensor_parallel_group,
                                                                  .reduce_in_backward = false,
                                                                  .process_group_size = o.tensor_parallel_size});
}

/// Sets the number of ranks from the group if it is not given. With one rank, turns tensor parallelism off.
LinearOptions resolved(LinearOptions options) {
  auto& ranks = options.tensor_parallel_size;
  ranks = options.tensor_parallel_mode ? ops::resolve_group_size("Linear", options.tensor_parallel_group, ranks) : 1;
  if (ranks == 1) {
    options.tensor_parallel_mode.reset();
    options.tensor_parallel_group.reset();
    options.sequence_parallel = false;
  }
  return options;
}

}  // namespace

std::vector<ops::OpPtr> linear_ops(const LinearOptions& options) {
  const auto o = resolved(options);
  std::vector<ops::OpPtr> list{basic_linear(o)};
  if (o.bias) list.push_back(bias(o));
  if (o.tensor_parallel_mode == ParallelMode::row)
    list.insert(o.replicated_bias ? list.begin() + 1 : list.end(), reduction(o));
  return list;
}

LinearImpl::LinearImpl(LinearOptions options) : Fusible("Linear"), options_(resolved(std::move(options))) {
  for (const auto& op : linear_ops(options_)) register_op_parameters(*op);
}

std::vector<fuser::Stage> LinearImpl::stages() const {
  std::vector<fuser::Stage> list;
  for (auto& op : linear_ops(options_)) list.push_back({.op = std::move(op), .label = "Linear"});
  return list;
}

void LinearImpl::reset_parameters() {
  for (const auto& stage : stages()) initialize(*stage.op);
}

std::shared_ptr<torch::nn::Module> LinearImpl::clone(const std::optional<at::Device>& device) const {
  auto copy = std::make_shared<LinearImpl>(options_);
  copy->copy_values(*this, device);
  return copy;
}

void LinearImpl::pretty_print(std::ostream& stream) const {
  stream << "Linear(in_features=" << options_.in_features << ", out_features=" << options_.out_features
         << ", bias=" << (options_.bias ? "true" : "false") << ")";
}

}  // namespace weft::nn
