#include "weft/fused/overlapped.h"

#include "weft/comm/settings.h"
#include "weft/overlap/clock.h"

namespace weft::fused {
namespace {

Element linear_matching(bool (*fits)(const ops::BasicLinear&)) {
  return {[fits](const ops::BasicOp& op) {
    const auto* linear = dynamic_cast<const ops::BasicLinear*>(&op);
    return linear && fits(*linear);
  }};
}

template <class T>
bool spans_ranks(const ops::BasicOp& op) {
  const auto* collective = dynamic_cast<const T*>(&op);
  return collective && collective->options().process_group_size > 1;
}

}  // namespace

Element column_linear() {
  return linear_matching([](const ops::BasicLinear& linear) { return linear.reduces_input_gradient(); });
}
Element row_linear() {
  return linear_matching([](const ops::BasicLinear& linear) { return linear.reduces_output(); });
}
Element unsharded_linear() {
  return linear_matching([](const ops::BasicLinear& linear) { return !linear.parallel(); });
}
Element cross_rank_reduction() {
  return {
      [](const ops::BasicOp& op) { return spans_ranks<ops::ReduceScatter>(op) || spans_ranks<ops::AllReduce>(op); }};
}
Element cross_rank_reduce_scatter() { return {spans_ranks<ops::ReduceScatter>}; }

std::string reject_overlap(const Match& match, const PlanView& view) {
  const auto linear = match.find<ops::BasicLinear>();
  if (!linear->options().overlap.value_or(true)) return "overlap=False";
  if (comm::transport_from_env() == "plain") return "WEFT_TRANSPORT=plain";
  const auto device = view.key.tensor_meta(0).device;
  if (device != c10::DeviceType::CPU)
    return "x is on " + c10::DeviceTypeName(device, /*lower_case=*/true) + "; overlap runs on the CPU only";
  return {};
}

LinearGroup::LinearGroup(const Match& match) {
  const auto& linear = match.get<ops::BasicLinear>().options();
  const auto set = [&](const std::optional<std::string>& group, int64_t ranks, bool scatter_output) {
    name = *group, size = static_cast<int>(ranks), scatters = scatter_output, overlap = linear.overlap;
  };
  if (const auto scatter = match.find<ops::ReduceScatter>())
    set(scatter->options().process_group, scatter->options().process_group_size, true);
  else if (const auto reduce = match.find<ops::AllReduce>())
    set(reduce->options().process_group, reduce->options().process_group_size, false);
  else
    set(linear.tensor_parallel_group, linear.tensor_parallel_size, linear.sequence_parallel);
}

OverlappedCall::OverlappedCall(StepContext& ctx, const LinearGroup& group)
    : ctx_(ctx), group_(group), start_(overlap::now()) {}

OverlappedCall::~OverlappedCall() {
  if (!decision_) return;
  try {
    ctx_.report(decision_->text(overlap::now() - start_));
  } catch (const std::bad_alloc&) {  // explain() keeps the report of the previous call
  }
}

comm::Transport* OverlappedCall::all_gather(at::ScalarType dtype, int64_t rows, int64_t n, int64_t k) {
  return decide({comm::CommOp::all_gather, dtype, rows, n, k, group_.size});
}

comm::Transport* OverlappedCall::reduction(const at::Tensor& rows, int64_t n, int64_t k) {
  return decide({group_.scatters ? comm::CommOp::reduce_scatter : comm::CommOp::all_reduce, rows.scalar_type(),
                 (rows.size(0) + group_.size - 1) / group_.size, n, k, group_.size});
}

comm::Transport* OverlappedCall::decide(const overlap::OverlapShape& shape) {
  decision_ = overlap::decide_overlap(group_.name, shape, group_.overlap);
  return decision_->transport.get();
}

at::Tensor with_leading_dims(const at::Tensor& matrix, const at::Tensor& like, int ranks) {
  auto sizes = like.sizes().vec();
  sizes[0] = ranks > 0 ? sizes[0] * ranks : sizes[0] / -ranks;
  sizes.back() = matrix.size(1);
  return matrix.view(sizes);
}

}  // namespace weft::fused
