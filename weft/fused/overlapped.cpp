#include "weft/fused/overlapped.h"

#include "weft/comm/settings.h"

namespace weft::fused {
namespace {

Element linear_that(bool (*fits)(const ops::BasicLinear&)) {
  return {[fits](const ops::BasicOp& op) {
    const auto* linear = dynamic_cast<const ops::BasicLinear*>(&op);
    return linear && fits(*linear);
  }};
}

template <class T>
bool over_ranks(const ops::BasicOp& op) {
  const auto* collective = dynamic_cast<const T*>(&op);
  return collective && collective->options().process_group_size > 1;
}

}  // namespace

Element column_linear() {
  return linear_that([](const ops::BasicLinear& linear) { return linear.sums_input_gradient(); });
}
Element row_linear() {
  return linear_that([](const ops::BasicLinear& linear) { return linear.sums_output(); });
}
Element whole_linear() {
  return linear_that([](const ops::BasicLinear& linear) { return !linear.parallel(); });
}
Element sum_over_ranks() {
  return {[](const ops::BasicOp& op) { return over_ranks<ops::ReduceScatter>(op) || over_ranks<ops::AllReduce>(op); }};
}
Element scatter_over_ranks() { return {over_ranks<ops::ReduceScatter>}; }

std::string refuse_overlap(const Match& match, const PlanView& view) {
  const auto linear = match.find<ops::BasicLinear>();
  if (!linear->options().overlap.value_or(true)) return "overlap=False";
  if (comm::given_transport() == "plain") return "WEFT_TRANSPORT=plain";
  const auto device = view.key.trait(0).device;
  if (device != c10::DeviceType::CPU) return "x is on " + c10::DeviceTypeName(device, /*lower_case=*/true);
  return {};
}

at::Tensor with_leading(const at::Tensor& matrix, const at::Tensor& like, int ranks) {
  auto sizes = like.sizes().vec();
  sizes[0] = ranks > 0 ? sizes[0] * ranks : sizes[0] / -ranks;
  sizes.back() = matrix.size(1);
  return matrix.view(sizes);
}

}  // namespace weft::fused
