#include "weft/nn/linear.h"

#include "weft/ops/bias.h"
#include "weft/ops/collectives.h"
#include "weft/ops/parallel.h"

namespace weft::nn {

using ops::ParallelMode;

LinearImpl::LinearImpl(LinearOptions options) : Fusible("Linear"), options_(std::move(options)) {
  if (options_.tensor_parallel_mode) ranks_ = ops::resolve_group_size("Linear", options_.tensor_parallel_group, 1);
  if (ranks_ == 1) {
    options_.tensor_parallel_mode.reset();
    options_.tensor_parallel_group.reset();
    options_.sequence_parallel = false;
  }
  for (const auto& stage : stages()) register_op_parameters(*stage.op);
}

/// no mode, or column:  BasicLinear, Bias
/// row:                 BasicLinear on this rank's features, Bias, reduction; a replicated bias follows the reduction
std::vector<fuser::Stage> LinearImpl::stages() const {
  std::vector<ops::OpPtr> basic_ops{basic_linear()};
  if (options_.bias) basic_ops.push_back(bias());
  if (options_.tensor_parallel_mode == ParallelMode::row)
    basic_ops.insert(options_.replicated_bias ? basic_ops.begin() + 1 : basic_ops.end(), reduction());
  std::vector<fuser::Stage> list;
  for (auto& op : basic_ops) list.push_back({.op = std::move(op), .label = "Linear"});
  return list;
}

ops::OpPtr LinearImpl::basic_linear() const {
  ops::BasicLinear::Options options{.in_features = options_.in_features,
                                    .out_features = options_.out_features,
                                    .dtype = options_.dtype,
                                    .accumulate_into_main_grad = options_.accumulate_into_main_grad,
                                    .delay_wgrad_compute = options_.delay_wgrad_compute,
                                    .userbuffers_options = options_.userbuffers_options,
                                    .overlap = options_.overlap};
  if (options_.tensor_parallel_mode == ParallelMode::row) {
    options.in_features = ops::divide_evenly("Linear", "in_features", options_.in_features, ranks_);
    options.fan_in = options_.in_features;
  } else {
    options.tensor_parallel_mode = options_.tensor_parallel_mode;
    options.tensor_parallel_group = options_.tensor_parallel_group;
    options.tensor_parallel_size = ranks_;
    options.sequence_parallel = options_.sequence_parallel;
  }
  return std::make_shared<ops::BasicLinear>(std::move(options));
}

ops::OpPtr LinearImpl::bias() const {
  ops::Bias::Options options{.size = options_.out_features,
                             .dtype = options_.dtype,
                             .tensor_parallel = ranks_ > 1,
                             .tensor_parallel_group = options_.tensor_parallel_group,
                             .tensor_parallel_size = ranks_};
  if (options_.tensor_parallel_mode == ParallelMode::row) {
    if (options_.replicated_bias) {
      options.tensor_parallel = false;
      options.sequence_parallel = options_.sequence_parallel;
    } else {
      options.size *= ranks_;
    }
  }
  return std::make_shared<ops::Bias>(std::move(options));
}

ops::OpPtr LinearImpl::reduction() const {
  const auto& group = options_.tensor_parallel_group;
  if (options_.sequence_parallel)
    return std::make_shared<ops::ReduceScatter>(
        ops::ReduceScatter::Options{.process_group = group, .process_group_size = ranks_});
  return std::make_shared<ops::AllReduce>(
      ops::AllReduce::Options{.process_group = group, .reduce_in_backward = false, .process_group_size = ranks_});
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
