#include "weft/kernels/optimizer.h"

#include <array>
#include <atomic>
#include <bit>
#include <numeric>
#include <vector>

#include "weft/kernels/cpu/optimizer_loops.h"
#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/quantize_math.h"

namespace weft::kernels {
namespace {

constexpr int64_t kStepBlock = 2048;  // weights that are decoded or encoded while they are in the L1 cache

/// The elements of a contiguous tensor from `begin` on.
Elements elements(const at::Tensor& t, int64_t begin) {
  if (!t.defined()) return {};
  auto* bytes = static_cast<char*>(const_cast<void*>(t.const_data_ptr()));
  return {bytes + begin * static_cast<int64_t>(t.element_size()), t.scalar_type()};
}

AdamCall adam_call(const AdamTensors& t, const AdamOptions& options, int64_t begin) {
  return {.options = options,
          .grad = elements(t.grad, begin),
          .exp_avg = elements(t.exp_avg, begin),
          .exp_avg_sq = elements(t.exp_avg_sq, begin)};
}

/// Calls run(block, begin, count) for consecutive blocks of [0, n), in parallel.
template <class F>
void for_each_block(int64_t n, const F& run) {
  parallel_rows((n + kStepBlock - 1) / kStepBlock, kStepBlock, [&](int64_t first, int64_t last) {
    for (auto block = first; block < last; ++block) {
      const auto begin = block * kStepBlock;
      run(block, begin, std::min(kStepBlock, n - begin));
    }
  });
}

float join_halves(at::BFloat16 high, int16_t low) {
  const auto rest = static_cast<uint16_t>(high.x - (low < 0 ? 1 : 0));
  return std::bit_cast<float>(static_cast<uint32_t>(rest) << 16 | static_cast<uint16_t>(low));
}

void split_halves(float value, at::BFloat16& high, int16_t& low) {
  const auto bits = std::bit_cast<uint32_t>(value);
  low = static_cast<int16_t>(bits & 0xffff);
  high.x = static_cast<uint16_t>((bits >> 16) + (low < 0 ? 1 : 0));
}

/// Writes the codes of scale·values. Returns the maximum magnitude of the values.
template <Format kCodes>
float encode_block(const float* values, float scale, uint8_t* codes, int64_t count) {
  float amax = 0;
  for (int64_t i = 0; i < count; ++i) {
    amax = max_magnitude(amax, values[i]);
    codes[i] = static_cast<uint8_t>(encode<kCodes>(values[i] * scale));
  }
  return amax;
}

}  // namespace

void adam_step(const AdamTensors& t, const AdamOptions& options, const at::Tensor& master) {
  const auto& weight = master.defined() ? master : t.param;
  const auto& loops = optimizer_loops(vector_tier(weight));
  parallel_rows(weight.numel(), 1, [&](int64_t begin, int64_t end) {
    auto call = adam_call(t, options, begin);
    call.weight = elements(weight, begin);
    if (master.defined()) call.rounded = elements(t.param, begin);
    loops.adam(call, end - begin);
  });
}

void adam_step_split(const AdamTensors& t, const AdamOptions& options, const at::Tensor& low_bits) {
  const auto& loops = optimizer_loops(vector_tier(t.param));
  auto* const high = t.param.data_ptr<at::BFloat16>();
  auto* const low = low_bits.data_ptr<int16_t>();
  for_each_block(t.param.numel(), [&](int64_t, int64_t begin, int64_t count) {
    std::array<float, kStepBlock> weights;
    for (int64_t i = 0; i < count; ++i) weights[i] = join_halves(high[begin + i], low[begin + i]);
    auto call = adam_call(t, options, begin);
    call.weight = {weights.data(), at::kFloat};
    loops.adam(call, count);
    for (int64_t i = 0; i < count; ++i) split_halves(weights[i], high[begin + i], low[begin + i]);
  });
}

float adam_step_quantized(const AdamTensors& t, const AdamOptions& options, const at::Tensor& master, float scale,
                          Format format) {
  const auto& loops = optimizer_loops(vector_tier(master));
  const auto encode = format == Format::e4m3 ? encode_block<Format::e4m3> : encode_block<Format::e5m2>;
  const auto* const weights = master.data_ptr<float>();
  auto* const codes = t.param.data_ptr<uint8_t>();
  std::vector<float> amax(static_cast<size_t>((master.numel() + kStepBlock - 1) / kStepBlock));
  for_each_block(master.numel(), [&](int64_t block, int64_t begin, int64_t count) {
    auto call = adam_call(t, options, begin);
    call.weight = elements(master, begin);
    loops.adam(call, count);
    amax[block] = encode(weights + begin, scale, codes + begin, count);
  });
  return amax.empty() ? 0 : *std::max_element(amax.begin(), amax.end());
}

void sgd_step(const SgdTensors& t, const SgdOptions& options, const at::Tensor& copy) {
  const auto& loops = optimizer_loops(vector_tier(t.param));
  parallel_rows(t.param.numel(), 1, [&](int64_t begin, int64_t end) {
    loops.sgd({.options = options,
               .grad = elements(t.grad, begin),
               .weight = elements(t.param, begin),
               .momentum = elements(t.momentum, begin),
               .copy = elements(copy, begin)},
              end - begin);
  });
}

bool scale_into(const at::Tensor& out, const at::Tensor& x, float scale) {
  const auto& loops = optimizer_loops(vector_tier(x));
  std::atomic<bool> finite = true;
  parallel_rows(x.numel(), 1, [&](int64_t begin, int64_t end) {
    if (!loops.scale(elements(out, begin), elements(x, begin), scale, end - begin)) finite = false;
  });
  return finite;
}

double sum_of_squares(const at::Tensor& x, float scale) {
  const auto& loops = optimizer_loops(vector_tier(x));
  std::vector<double> sums(static_cast<size_t>((x.numel() + kStepBlock - 1) / kStepBlock));
  for_each_block(x.numel(), [&](int64_t block, int64_t begin, int64_t count) {
    sums[block] = loops.sum_of_squares(elements(x, begin), scale, count);
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

}  // namespace weft::kernels
