#pragma once
#include <ATen/Parallel.h>

#include <functional>
#include <memory>
#include <vector>

#include "weft/kernels/cpu/epilogue_amx.h"
#include "weft/kernels/cpu/pack_amx.h"
#include "weft/kernels/gemm.h"
#include "weft/kernels/huge_pages.h"

// The product of two operands: how it is cut, and one block of it. Included by *_amx.cpp only.

namespace weft::kernels::CPU_CAPABILITY {

/// How a product is cut. One operand is "near": its panels are walked one by one, packed while the panel before is
/// multiplied, and the start of a panel stays in L1. Of the other one, "far", a block of panels lies packed in L2 and
/// every near panel meets all of it. A reduction longer than `kc_steps` is cut into K-blocks, whose sums wait in
/// `Scratch::partial_sums`.
struct Blocking {
  int kc_steps;  // of one K-block
  int k_blocks;
  int k_steps;
  int64_t resident;  // panels in a block
  int64_t streamed;  // panels whose sums wait while the K-blocks go by: an even number, unless all
  bool full_k;       // a block is packed over all K-blocks at once: if it fits, and would be packed several times else
};

constexpr int64_t kResidentBytes = 1 << 20;     // half of L2
constexpr int64_t kPartialSumsBytes = 1 << 20;  // the other half, if sums have to wait
constexpr int kMaxKcSteps = 36;                 // of one chunk: 1152 values
/// Of squares that wait there, a and b of a gated product.
constexpr int64_t kMaxGatedPairs = kPartialSumsBytes / (2 * kBlockElems * 4);

/// The least size of a block with which `all` panels need no more blocks than with `cap`.
inline int64_t balanced_block_size(int64_t all, int64_t cap) {
  const int64_t blocks = (all + cap - 1) / cap;
  return (all + blocks - 1) / blocks;
}

/// `cap`: of far panels in a block, for the sake of something else than L2.
inline Blocking choose_blocking(int64_t streamed, int64_t resident, int64_t k, int64_t cap = INT64_MAX) {
  const int64_t steps = (k + kKStep - 1) / kKStep;
  Blocking b{};
  b.k_blocks = static_cast<int>(std::max<int64_t>(1, (steps + kMaxKcSteps - 1) / kMaxKcSteps));
  b.kc_steps = static_cast<int>((steps + b.k_blocks - 1) / b.k_blocks);
  b.k_steps = static_cast<int>(steps);
  const int64_t panel_bytes = static_cast<int64_t>(std::max(b.kc_steps, 1)) * 2 * kTileElems * 2;
  const int64_t fit = kResidentBytes / panel_bytes / (b.k_blocks > 1 ? 2 : 1);
  b.resident = balanced_block_size(std::max<int64_t>(resident, 1), std::max<int64_t>(std::min(fit, cap), 1));
  b.streamed = b.k_blocks == 1
                   ? streamed
                   : std::clamp<int64_t>(kPartialSumsBytes / (b.resident * kBlockElems * 4) / 2 * 2, 1, streamed);
  b.full_k = b.k_blocks == 1 || (b.streamed < streamed && b.resident * steps * 2 * kTileElems * 2 <= kResidentBytes);
  return b;
}

/// Memory of one thread, kept between calls: a far block, a strip of near panels, two squares of results that wait to
/// be transposed, waiting sums or pairs of squares, two squares of sums.
struct Scratch {
  static constexpr int64_t kPanelBytes = int64_t{kMaxKcSteps} * 2 * kTileElems * 2;
  static constexpr int64_t kStreamedSize = kStripPanels * kPanelBytes;
  static constexpr int64_t kResidentSize = kResidentBytes + kPanelBytes;
  static constexpr int64_t kTransposeSize = 2 * kBlockElems * 2;
  static constexpr int64_t kPartialSumsSize = kPartialSumsBytes + 64 * kBlockElems * 4;
  static constexpr int64_t kTotalSize = 4 << 20;
  static_assert(2 * kBlockElems * 4 + kTransposeSize + kStreamedSize + kResidentSize + kPartialSumsSize <= kTotalSize);

  Bf16 *resident = nullptr, *streamed = nullptr, *transpose_scratch = nullptr;
  float *partial_sums = nullptr, *block[2] = {nullptr, nullptr};

  /// That of this thread, or another while one is set aside.
  static Scratch& current();

  /// While it lives, GEMMs of this thread use other memory: a progress callback may call them.
  class NestedScope {
   public:
    NestedScope();
    ~NestedScope();
    NestedScope(const NestedScope&) = delete;
    NestedScope& operator=(const NestedScope&) = delete;
  };

  Scratch();

 private:
  HugePageBuffer memory_;
};

/// A block of far panels, packed side by side in the scratch of this thread.
class ResidentPanels {
 public:
  /// What becomes of a panel: its work, and its first row (column) in the numbers of that work.
  struct Panel {
    const EpilogueArgs* args;
    int64_t start;
  };

  explicit ResidentPanels(const Blocking& blocking) : blocking_(blocking), memory_(Scratch::current().resident) {}
  /// All over again; what it has allocated it keeps.
  void restart(const Blocking& blocking) {
    blocking_ = blocking;
    memory_ = Scratch::current().resident;
    ranges_.clear();
    panels_.clear();
  }

  int64_t size() const { return static_cast<int64_t>(panels_.size()); }
  const Panel& panel(int64_t f) const { return panels_[f]; }
  /// Appends the panels of `m` from row (column) `first` on, which `args` counts alike; the work must stay.
  void append(const Operand& m, const EpilogueArgs& args, int64_t first, int64_t panels) {
    if (blocking_.full_k)
      pack_panels(m, first, panels, 0, blocking_.k_steps, memory_ + size() * blocking_.k_steps * 2 * kTileElems);
    ranges_.push_back({m, first, panels});
    for (int64_t i = 0; i < panels; ++i) panels_.push_back({&args, first + i * kBlockDim});
  }
  /// Packs the steps of a chunk, unless that was done before.
  void pack(int k_block, int steps) {
    start_ = blocking_.full_k ? memory_ + static_cast<int64_t>(k_block) * blocking_.kc_steps * 2 * kTileElems : memory_;
    stride_ = static_cast<int64_t>(blocking_.full_k ? blocking_.k_steps : steps) * 2 * kTileElems;
    if (blocking_.full_k) return;
    Bf16* to = memory_;
    for (auto& range : ranges_) {
      pack_panels(range.m, range.first, range.panels, static_cast<int64_t>(k_block) * blocking_.kc_steps * kKStep,
                  steps, to);
      if (k_block + 1 == blocking_.k_blocks) range.m.second_dst = nullptr;  // once is enough
      to += range.panels * stride_;
    }
  }
  /// The chunk that was packed last.
  const Bf16* packed(int64_t f) const { return start_ + f * stride_; }

 private:
  struct OperandRange {
    Operand m;
    int64_t first, panels;
  };
  Blocking blocking_;
  Bf16 *memory_, *start_ = nullptr;
  int64_t stride_ = 0;
  std::vector<OperandRange> ranges_;
  std::vector<Panel> panels_;
};

/// Some panels of the near operand.
struct StreamedPanels {
  const Operand& m;
  int64_t begin, end;
};

/// Multiplies near panels by a block of far ones; A is near if `streamed.m.left`, and never if B is gated. All works of
/// the block have the variant `variant`. `progress`, if not null, is called about every ten microseconds.
void gemm_macrokernel(const StreamedPanels& streamed, ResidentPanels& resident, const Blocking& blocking,
                      const KernelVariant& variant, const Epilogue& e, const std::function<void()>* progress = nullptr);

/// run(t) on each of `threads` threads.
template <class Fn>
void on_threads(int threads, const Fn& run) {
  if (threads == 1) return run(0);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) run(static_cast<int>(t));
  });
}

}  // namespace weft::kernels::CPU_CAPABILITY
