#include "weft/device/process_group.h"

#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>

#include "weft/device/host_alias.h"

namespace weft::device {
namespace {

using c10::ivalue::Future;
using c10d::ReduceOp;
using Tensors = ProcessGroup::Tensors;
using Works = std::vector<ProcessGroup::Work>;

struct Timer final : c10d::Timer {
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional(*to - *from) : std::nullopt;
  }
};

/// One or more collectives of Gloo, whose results are `outputs` on a device.
class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(int rank, Works parts, Tensors outputs)
      : Work(rank), parts_(std::move(parts)), outputs_(std::move(outputs)) {}

  bool isCompleted() override {
    return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(parts_.begin(), parts_.end(), [](const auto& part) { return part->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& part : parts_)
      if (auto error = part->exception()) return error;
    return nullptr;
  }
  int sourceRank() const override { return parts_.size() == 1 ? parts_[0]->sourceRank() : -1; }
  Tensors result() override { return outputs_; }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  /// May be called again, as with NCCL: Gloo's sends and receives would wait for another message.
  bool wait(std::chrono::milliseconds timeout) override {
    const std::lock_guard lock(waiting_);
    for (; waited_ < parts_.size(); ++waited_)
      if (!parts_[waited_]->wait(timeout)) return false;
    return true;
  }
  void abort() override {
    for (const auto& part : parts_) part->abort();
  }

  c10::intrusive_ptr<Future> getFuture() override {
    auto future = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
    if (parts_.size() != 1) {
      wait(kNoTimeout);
      future->markCompleted(outputs_);
      return future;
    }
    parts_[0]->getFuture()->addCallback([future, outputs = outputs_](Future& part) {
      if (part.hasError()) {
        future->setError(part.exception_ptr());
      } else {
        future->markCompleted(outputs);
      }
    });
    return future;
  }

 private:
  const Works parts_;
  const Tensors outputs_;
  std::mutex waiting_;
  size_t waited_ = 0;  // parts
};

/// A host alias as bytes, if Gloo does not know its dtype: for collectives that only move it.
at::Tensor bytes(const at::Tensor& t) {
  constexpr std::array kMoved{at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar,
                              at::kByte,  at::kInt,    at::kLong, at::kBool};
  const auto host = host_alias(t);
  const bool known = std::find(kMoved.begin(), kMoved.end(), t.scalar_type()) != kMoved.end();
  return known || !host.is_contiguous() ? host : host.view({-1}).view(at::kByte);
}

Tensors map(const Tensors& tensors, const std::function<at::Tensor(const at::Tensor&)>& change) {
  Tensors changed;
  std::transform(tensors.begin(), tensors.end(), std::back_inserter(changed), change);
  return changed;
}
Tensors bytes(const Tensors& tensors) {
  return map(tensors, [](const auto& t) { return bytes(t); });
}
std::vector<Tensors> bytes(const std::vector<Tensors>& lists) {
  std::vector<Tensors> changed;
  for (const auto& list : lists) changed.push_back(bytes(list));
  return changed;
}
Tensors aliases(const Tensors& tensors) { return map(tensors, host_alias); }

Tensors joined(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

/// What each rank multiplies its values by before the sum, if `op` is an average or has a factor. Gloo has neither.
std::optional<at::Tensor> factor_of(const ReduceOp& op, int ranks) {
  if (op == ReduceOp::AVG) return at::scalar_tensor(1. / ranks, at::kDouble);
  if (!(op == ReduceOp::PREMUL_SUM)) return {};
  const auto* given = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(given, "nccl: a PREMUL_SUM has no factor. Make it with torch.distributed._make_nccl_premul_sum.");
  return given->tensor_factor.defined() ? host_alias(given->tensor_factor)
                                        : at::scalar_tensor(given->double_factor, at::kDouble);
}

/// Options of a reduction as Gloo knows them.
template <class Options>
Options as_sum(const Options& given) {
  auto options = given;
  if (given.reduceOp == ReduceOp::AVG || given.reduceOp == ReduceOp::PREMUL_SUM) options.reduceOp = ReduceOp::SUM;
  return options;
}

at::Tensor factor_for(const at::Tensor& t, const at::Tensor& factor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!c10::isIntegralType(t.scalar_type(), /*includeBool=*/true),
                              "nccl on simulated devices: an average of ", t.scalar_type(),
                              " is not supported. Sum and divide, or convert to floating point.");
  return factor.to(t.scalar_type());
}

/// Host aliases of what is reduced in place.
Tensors scaled_in_place(const Tensors& tensors, const ReduceOp& op, int ranks) {
  auto hosts = aliases(tensors);
  if (const auto factor = factor_of(op, ranks))
    for (auto& host : hosts) host.mul_(factor_for(host, *factor));
  return hosts;
}
/// Host aliases of what is reduced into other tensors.
at::Tensor scaled(const at::Tensor& t, const ReduceOp& op, int ranks) {
  const auto host = host_alias(t);
  const auto factor = factor_of(op, ranks);
  return factor ? at::mul(host, factor_for(host, *factor)) : host;
}
Tensors scaled(const Tensors& tensors, const ReduceOp& op, int ranks) {
  return map(tensors, [&](const auto& t) { return scaled(t, op, ranks); });
}

}  // namespace

void register_timer() {
  c10d::TimerRegistry()->Register(
      c10::DeviceType::CUDA, [](c10::Device) -> std::unique_ptr<c10d::Timer> { return std::make_unique<Timer>(); });
}

ProcessGroup::Options::Options() : c10d::Backend::Options("nccl", std::chrono::minutes(10)) {}

ProcessGroup::ProcessGroup(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<Options> options)
    : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), options_(std::move(options)) {}

void ProcessGroup::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  gloo_->setTimeout(timeout);
}

void ProcessGroup::startCoalescing() { coalesced_.emplace(); }

ProcessGroup::Work ProcessGroup::endCoalescing() {
  TORCH_CHECK(coalesced_, "nccl: endCoalescing without startCoalescing.");
  auto works = *std::exchange(coalesced_, std::nullopt);
  Tensors outputs;
  for (const auto& work : works) outputs = joined({outputs, work->result()});
  return c10::make_intrusive<DeviceWork>(rank_, std::move(works), std::move(outputs));
}

ProcessGroup::Work ProcessGroup::start(Work gloo, Tensors outputs) {
  auto work = c10::make_intrusive<DeviceWork>(rank_, Works{std::move(gloo)}, std::move(outputs));
  if (coalesced_) coalesced_->push_back(work);
  return work;
}

ProcessGroup::Work ProcessGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto hosts = bytes(tensors);
  return start(gloo_->broadcast(hosts, options), tensors);
}

ProcessGroup::Work ProcessGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  auto hosts = scaled_in_place(tensors, options.reduceOp, size_);
  return start(gloo_->allreduce(hosts, as_sum(options)), tensors);
}

ProcessGroup::Work ProcessGroup::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto hosts = scaled_in_place(tensors, options.reduceOp, size_);
  return start(gloo_->allreduce_coalesced(hosts, as_sum(options)), tensors);
}

ProcessGroup::Work ProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  auto hosts = scaled_in_place(tensors, options.reduceOp, size_);
  return start(gloo_->reduce(hosts, as_sum(options)), tensors);
}

ProcessGroup::Work ProcessGroup::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& options) {
  auto to = bytes(outputs);
  auto from = bytes(inputs);
  return start(gloo_->allgather(to, from, options), joined(outputs));
}

ProcessGroup::Work ProcessGroup::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& options) {
  auto to = bytes(output), from = bytes(input);
  return start(gloo_->_allgather_base(to, from, options), {output});
}

ProcessGroup::Work ProcessGroup::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                 const c10d::AllgatherOptions& options) {
  auto to = bytes(outputs), from = bytes(inputs);
  return start(gloo_->allgather_into_tensor_coalesced(to, from, options), outputs);
}

ProcessGroup::Work ProcessGroup::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::GatherOptions& options) {
  auto to = bytes(outputs);
  auto from = bytes(inputs);
  return start(gloo_->gather(to, from, options), joined(outputs));
}

ProcessGroup::Work ProcessGroup::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ScatterOptions& options) {
  auto to = bytes(outputs);
  auto from = bytes(inputs);
  return start(gloo_->scatter(to, from, options), outputs);
}

ProcessGroup::Work ProcessGroup::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                const c10d::ReduceScatterOptions& options) {
  auto to = aliases(outputs);
  std::vector<Tensors> from;
  for (const auto& list : inputs) from.push_back(scaled(list, options.reduceOp, size_));
  return start(gloo_->reduce_scatter(to, from, as_sum(options)), outputs);
}

ProcessGroup::Work ProcessGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) {
  auto to = host_alias(output), from = scaled(input, options.reduceOp, size_);
  return start(gloo_->_reduce_scatter_base(to, from, as_sum(options)), {output});
}

ProcessGroup::Work ProcessGroup::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                 const c10d::ReduceScatterOptions& options) {
  auto to = aliases(outputs), from = scaled(inputs, options.reduceOp, size_);
  return start(gloo_->reduce_scatter_tensor_coalesced(to, from, as_sum(options)), outputs);
}

ProcessGroup::Work ProcessGroup::alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options) {
  const auto rows = [](const at::Tensor& t) {  // bytes keep the rows that the splits count
    const auto host = bytes(t);
    return host.scalar_type() == t.scalar_type() || t.size(0) == 0 ? host
                                                                   : host.view({t.size(0), host.numel() / t.size(0)});
  };
  auto to = rows(output), from = rows(input);
  return start(gloo_->alltoall_base(to, from, output_splits, input_splits, options), {output});
}

ProcessGroup::Work ProcessGroup::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  auto to = bytes(outputs), from = bytes(inputs);
  return start(gloo_->alltoall(to, from, options), outputs);
}

ProcessGroup::Work ProcessGroup::send(Tensors& tensors, int to, int tag) {
  auto hosts = bytes(tensors);
  return start(gloo_->send(hosts, to, tag), tensors);
}

ProcessGroup::Work ProcessGroup::recv(Tensors& tensors, int from, int tag) {
  auto hosts = bytes(tensors);
  return start(gloo_->recv(hosts, from, tag), tensors);
}

ProcessGroup::Work ProcessGroup::recvAnysource(Tensors& tensors, int tag) {
  auto hosts = bytes(tensors);
  return start(gloo_->recvAnysource(hosts, tag), tensors);
}

ProcessGroup::Work ProcessGroup::barrier(const c10d::BarrierOptions& options) {
  auto on_host = options;
  on_host.device_ids.clear();
  on_host.device.reset();
  return start(gloo_->barrier(on_host), {});
}

}  // namespace weft::device
