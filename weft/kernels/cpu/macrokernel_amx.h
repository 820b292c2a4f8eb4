#pragma once
#include <ATen/Parallel.h>

#include <functional>
#include <memory>
#include <vector>

#include "weft/kernels/cpu/epilogue_amx.h"
#include "weft/kernels/cpu/shared_panels_amx.h"
#include "weft/kernels/gemm.h"
#include "weft/kernels/huge_pages.h"

// The macrokernel of the AMX GEMM: streamed panels times one resident block. Included by *_amx.cpp only.

namespace weft::kernels::CPU_CAPABILITY {

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

/// A block of resident panels: those of an operand that threads pack together, or packed one after the other in the
/// scratch of this thread.
class ResidentPanels {
 public:
  /// The epilogue of a panel, and the panel's first row (column) in it.
  struct Panel {
    const EpilogueArgs* args;
    int64_t start;
  };

  /// `first_to_pack`: the panel at which this thread starts to pack what several threads need, another one in each.
  explicit ResidentPanels(const Blocking& blocking, int64_t first_to_pack = 0)
      : blocking_(blocking), memory_(Scratch::current().resident), first_to_pack_(first_to_pack) {}
  /// Empties the block, keeping its allocations.
  void restart(const Blocking& blocking, int64_t first_to_pack = 0) {
    blocking_ = blocking;
    first_to_pack_ = first_to_pack;
    memory_ = Scratch::current().resident;
    ranges_.clear();
    panels_.clear();
  }

  int64_t size() const { return static_cast<int64_t>(panels_.size()); }
  const Panel& panel(int64_t i) const { return panels_[i]; }
  /// Appends panels of `m` from row (column) `first` on. `args` counts rows (columns) as `m` does and must stay alive.
  void append(const Operand& m, const EpilogueArgs& args, int64_t first, int64_t panels) {
    if (blocking_.full_k && !m.shared)
      pack_panels(m, first, panels, 0, blocking_.k_steps, memory_ + size() * blocking_.k_steps * 2 * kTileElems);
    ranges_.push_back({m, first, panels});
    for (int64_t i = 0; i < panels; ++i) panels_.push_back({&args, first + i * kBlockDim});
  }
  /// Packs K-block `k_block`, unless the block is packed over all of K.
  void pack(int k_block, int steps) {
    packed_.resize(panels_.size());
    Bf16* to = blocking_.full_k ? memory_ + int64_t{k_block} * blocking_.kc_steps * 2 * kTileElems : memory_;
    const auto stride = int64_t{blocking_.full_k ? blocking_.k_steps : steps} * 2 * kTileElems;
    int64_t panel = 0;
    for (auto& range : ranges_) {
      for (int64_t i = 0; i < range.panels; ++i) packed_[panel + i] = to + i * stride;
      if (range.m.shared) {
        pack_shared(range, k_block, steps, packed_.data() + panel, to, stride);
      } else if (!blocking_.full_k) {
        pack_panels(range.m, range.first, range.panels, int64_t{k_block} * blocking_.kc_steps * kKStep, steps, to);
        if (k_block + 1 == blocking_.k_blocks) range.m.second_dst = nullptr;  // written once
      }
      panel += range.panels;
      to += range.panels * stride;
    }
  }
  /// Panel i of the K-block that `pack` selected last.
  const Bf16* packed(int64_t i) const { return packed_[i]; }

 private:
  struct OperandRange {
    Operand m;
    int64_t first, panels;
  };

  /// Finds the panels of a shared operand. Packs those that nobody packs, and to `own` those that are not ready.
  void pack_shared(const OperandRange& range, int k_block, int steps, const Bf16** found, Bf16* own, int64_t stride) {
    const auto first = range.first / kBlockDim;
    for (int64_t i = 0; i < range.panels; ++i)
      range.m.shared->pack_free(first + (first_to_pack_ + i) % range.panels, k_block);
    for (int64_t i = 0; i < range.panels; ++i) {
      if (const auto* panel = range.m.shared->wait(first + i, k_block))
        found[i] = panel;
      else
        pack_panels(range.m, (first + i) * kBlockDim, 1, int64_t{k_block} * blocking_.kc_steps * kKStep, steps,
                    own + i * stride, stride);
    }
  }

  Blocking blocking_;
  Bf16* memory_;
  int64_t first_to_pack_ = 0;
  std::vector<OperandRange> ranges_;
  std::vector<Panel> panels_;
  std::vector<const Bf16*> packed_;  // of a K-block
};

/// A range of panels of the streamed operand. Of `threads` that multiply the same panels and pack them together, this
/// is number `thread`; each starts at another panel.
struct StreamedPanels {
  const Operand& m;
  int64_t begin, end;
  int thread = 0, threads = 1;
};

/// Multiplies streamed panels by a resident block. A is streamed if `streamed.m.left`, which a gated B does not allow.
/// Every epilogue of the block has the variant `variant`. `progress`, if not null, is called about every 10 µs.
void gemm_macrokernel(const StreamedPanels& streamed, ResidentPanels& resident, const Blocking& blocking,
                      const KernelVariant& variant, const Epilogue& e, const std::function<void()>* progress = nullptr);

/// Calls run(t) for t in [0, threads) in parallel.
template <class Fn>
void on_threads(int threads, const Fn& run) {
  if (threads == 1) return run(0);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) run(static_cast<int>(t));
  });
}

}  // namespace weft::kernels::CPU_CAPABILITY
