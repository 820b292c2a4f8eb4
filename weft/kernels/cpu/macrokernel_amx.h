#pragma once
#include <ATen/Parallel.h>

#include <functional>
#include <memory>
#include <vector>

#include "weft/kernels/cpu/epilogue_amx.h"
#include "weft/kernels/cpu/pack_amx.h"
#include "weft/kernels/gemm.h"
#include "weft/kernels/huge_pages.h"

// Blocking of the AMX GEMM, and its macrokernel: streamed panels times one resident block. Included by *_amx.cpp only.

namespace weft::kernels::CPU_CAPABILITY {

/// The blocking of a GEMM. The streamed operand is read one panel at a time; the head of the panel stays in L1. The
/// resident operand is packed into blocks of panels that stay in L2, and each streamed panel is multiplied by the whole
/// block. A reduction longer than `kc_steps` is split into K-blocks, whose partial sums are kept in
/// `Scratch::partial_sums`.
struct Blocking {
  int kc_steps;      // k-steps of a K-block
  int k_blocks;      // K-blocks of the reduction
  int k_steps;       // k-steps of the reduction
  int64_t resident;  // panels in a resident block
  int64_t streamed;  // panels whose partial sums are kept across K-blocks: even, unless it is all panels
  bool full_k;       // pack a resident block over all of K at once, if it fits and is needed several times
};

constexpr int64_t kResidentBytes = 1 << 20;     // half of L2
constexpr int64_t kPartialSumsBytes = 1 << 20;  // the other half, with several K-blocks
constexpr int kMaxKcSteps = 36;                 // k-steps of a K-block: 1152 elements
/// Pairs of accumulator blocks (a and b of a gated GEMM) that fit into `kPartialSumsBytes`.
constexpr int64_t kMaxGatedPairs = kPartialSumsBytes / (2 * kBlockElems * 4);

/// The smallest block size that splits `all` panels into no more blocks than `cap` does.
inline int64_t balanced_block_size(int64_t all, int64_t cap) {
  const int64_t blocks = (all + cap - 1) / cap;
  return (all + blocks - 1) / blocks;
}

/// `cap`: maximum number of resident panels in a block, besides the limit that L2 sets.
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

/// Per-thread scratch memory, reused across calls: a resident block, a strip of streamed panels, two blocks of results
/// to transpose, partial sums (or gated pairs), and two accumulator blocks.
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

  /// The scratch of this thread at the current nesting depth.
  static Scratch& current();

  /// In its scope, GEMMs of this thread use another Scratch, because a progress callback may call GEMMs.
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

/// A block of resident panels, packed one after the other in the scratch of this thread.
class ResidentPanels {
 public:
  /// The epilogue of a panel, and the panel's first row (column) in it.
  struct Panel {
    const EpilogueArgs* args;
    int64_t start;
  };

  explicit ResidentPanels(const Blocking& blocking) : blocking_(blocking), memory_(Scratch::current().resident) {}
  /// Empties the block, keeping its allocations.
  void restart(const Blocking& blocking) {
    blocking_ = blocking;
    memory_ = Scratch::current().resident;
    ranges_.clear();
    panels_.clear();
  }

  int64_t size() const { return static_cast<int64_t>(panels_.size()); }
  const Panel& panel(int64_t i) const { return panels_[i]; }
  /// Appends panels of `m` from row (column) `first` on. `args` counts rows (columns) as `m` does and must stay alive.
  void append(const Operand& m, const EpilogueArgs& args, int64_t first, int64_t panels) {
    if (blocking_.full_k)
      pack_panels(m, first, panels, 0, blocking_.k_steps, memory_ + size() * blocking_.k_steps * 2 * kTileElems);
    ranges_.push_back({m, first, panels});
    for (int64_t i = 0; i < panels; ++i) panels_.push_back({&args, first + i * kBlockDim});
  }
  /// Packs K-block `k_block`, unless the block is packed over all of K.
  void pack(int k_block, int steps) {
    start_ = blocking_.full_k ? memory_ + static_cast<int64_t>(k_block) * blocking_.kc_steps * 2 * kTileElems : memory_;
    stride_ = static_cast<int64_t>(blocking_.full_k ? blocking_.k_steps : steps) * 2 * kTileElems;
    if (blocking_.full_k) return;
    Bf16* to = memory_;
    for (auto& range : ranges_) {
      pack_panels(range.m, range.first, range.panels, static_cast<int64_t>(k_block) * blocking_.kc_steps * kKStep,
                  steps, to);
      if (k_block + 1 == blocking_.k_blocks) range.m.second_dst = nullptr;  // written once
      to += range.panels * stride_;
    }
  }
  /// Panel i of the K-block that `pack` selected last.
  const Bf16* packed(int64_t i) const { return start_ + i * stride_; }

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

/// A range of panels of the streamed operand.
struct StreamedPanels {
  const Operand& m;
  int64_t begin, end;
};

/// Multiplies streamed panels by a resident block. A is streamed if `streamed.m.left`, which a gated B does not allow.
/// Every epilogue of the block has the variant `variant`. `progress`, if not null, is called about every 10 µs.
void gemm_macrokernel(const StreamedPanels& streamed, ResidentPanels& resident, const Blocking& blocking,
                      const KernelVariant& variant, const Epilogue& e, const std::function<void()>* progress = nullptr);

inline int thread_count() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

struct Range {
  int64_t begin, end;
};
/// Thread t's share of [0, count) if `split`, otherwise all of it.
inline Range share_of(int64_t count, int t, int threads, bool split) {
  return split ? Range{count * t / threads, count * (t + 1) / threads} : Range{0, count};
}

/// Calls run(t) for t in [0, threads) in parallel.
template <class Fn>
void on_threads(int threads, const Fn& run) {
  if (threads == 1) return run(0);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) run(static_cast<int>(t));
  });
}

}  // namespace weft::kernels::CPU_CAPABILITY
