#include "weft/kernels/cpu/gemm_grid.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "weft/kernels/cpu/blocking.h"

namespace weft::kernels {
namespace {

constexpr int64_t kPanelStepBytes = 2 * kTileElems * 2;  // of a panel, packed, in a k-step
constexpr int64_t kBlockBytes = kBlockElems * 4;         // sums of a block
constexpr int64_t kMaxPartialSums = 64 << 20;
constexpr int64_t kMinStepsPerPart = 16;  // k-steps; fewer do not pay for the partial sums

alignas(64) std::atomic<int64_t> packed_bytes_total{0};

/// Whether K can be split into `parts`.
bool allows_parts(const GemmWork& work, int parts) {
  if (parts == 1) return true;
  const auto sums = work.resident_panels * work.streamed_panels * kBlockBytes * parts;
  return work.splits_k && work.k_steps >= parts * kMinStepsPerPart && sums <= kMaxPartialSums;
}

}  // namespace

GemmWork dense_gemm_work(int64_t m, int64_t n, int64_t k, bool weight_gradient) {
  auto resident = panels_of(m), streamed = panels_of(n);
  if (weight_gradient) std::swap(resident, streamed);
  const auto blocking = choose_blocking(streamed, resident, k);
  return {.resident_panels = resident,
          .streamed_panels = streamed,
          .k_steps = blocking.k_steps,
          .block_panels = blocking.resident,
          .splits_k = weight_gradient};
}

/// A block takes 64 cycles in a k-step at the peak of AMX, about 90 in the kernel. Packing takes about 0.25 cycles per
/// byte, and a byte from L3 0.1.
double LargestShare::cycles() const {
  return 90. * static_cast<double>(block_steps) + 0.25 * static_cast<double>(packed_bytes) +
         0.1 * static_cast<double>(moved_bytes);
}

LargestShare largest_share(const GemmWork& work, const GemmGrid& grid) {
  const auto resident = ceil_div(work.resident_panels, grid.resident);
  const auto streamed = ceil_div(work.streamed_panels / work.panels_per_unit, grid.streamed) * work.panels_per_unit;
  const auto steps = ceil_div(work.k_steps, grid.k), blocks = ceil_div(resident, work.block_panels);
  LargestShare share;
  share.block_steps = resident * streamed * steps;
  share.packed_bytes =
      ceil_div((work.resident_panels + work.streamed_panels) * work.k_steps * kPanelStepBytes, grid.threads());
  share.moved_bytes = (resident + streamed * blocks) * steps * kPanelStepBytes;
  // Each part writes its sums; the last one reads those of all parts.
  if (grid.k > 1) share.moved_bytes += resident * streamed * kBlockBytes * (1 + grid.k);
  return share;
}

double imbalance(const GemmWork& work, const GemmGrid& grid, int threads) {
  const auto all = work.resident_panels * work.streamed_panels * work.k_steps;
  return static_cast<double>(largest_share(work, grid).block_steps) * threads / static_cast<double>(all);
}

GemmGrid choose_grid(const GemmWork& work, int threads) {
  GemmGrid best;
  if (work.resident_panels == 0 || work.streamed_panels == 0) return best;
  double least = largest_share(work, best).cycles();
  const auto units = work.streamed_panels / work.panels_per_unit;
  for (const int parts : std::array{1, 2, 4, 8, 16}) {
    if (parts > threads || !allows_parts(work, parts)) break;
    const auto left = static_cast<int64_t>(threads / parts);
    for (int64_t resident = 1; resident <= left;) {
      const GemmGrid grid{static_cast<int>(resident), static_cast<int>(std::min(left / resident, units)), parts};
      const auto cycles = largest_share(work, grid).cycles();
      if (cycles < least) best = grid, least = cycles;
      const auto panels = ceil_div(work.resident_panels, resident);
      if (panels == 1) break;
      resident = ceil_div(work.resident_panels, panels - 1);  // the next number of threads with a smaller share
    }
  }
  return best;
}

int64_t gemm_packed_bytes() { return packed_bytes_total.load(std::memory_order_relaxed); }
void count_packed_bytes(int64_t bytes) { packed_bytes_total.fetch_add(bytes, std::memory_order_relaxed); }

}  // namespace weft::kernels
