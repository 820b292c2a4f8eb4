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
/// every near panel meets all of it. A reduction longer than `steps` is cut into chunks, whose sums wait in `scratch`.
struct Blocking {
  int steps;  // of one chunk
  int chunks;
  int all_steps;
  int64_t far;   // panels in a block
  int64_t near;  // panels whose sums wait while the chunks go by: an even number, unless all
  bool whole;    // a block is packed over all chunks at once: if it fits, and would be packed several times else
};

constexpr int64_t kFarBytes = 1 << 20;      // half of L2
constexpr int64_t kScratchBytes = 1 << 20;  // the other half, if sums have to wait
constexpr int kMostSteps = 36;              // of one chunk: 1152 values
/// Of squares that wait there, a and b of a gated product.
constexpr int64_t kMostPairs = kScratchBytes / (2 * kSquare * 4);

/// The least size of a block with which `all` panels need no more blocks than with `most`.
inline int64_t shared_evenly(int64_t all, int64_t most) {
  const int64_t blocks = (all + most - 1) / most;
  return (all + blocks - 1) / blocks;
}

/// `most`: of far panels in a block, for the sake of something else than L2.
inline Blocking cut(int64_t near, int64_t far, int64_t k, int64_t most = INT64_MAX) {
  const int64_t steps = (k + kStep - 1) / kStep;
  Blocking b{};
  b.chunks = static_cast<int>(std::max<int64_t>(1, (steps + kMostSteps - 1) / kMostSteps));
  b.steps = static_cast<int>((steps + b.chunks - 1) / b.chunks);
  b.all_steps = static_cast<int>(steps);
  const int64_t panel_bytes = static_cast<int64_t>(std::max(b.steps, 1)) * 2 * kTile * 2;
  const int64_t fit = kFarBytes / panel_bytes / (b.chunks > 1 ? 2 : 1);
  b.far = shared_evenly(std::max<int64_t>(far, 1), std::max<int64_t>(std::min(fit, most), 1));
  b.near = b.chunks == 1 ? near : std::clamp<int64_t>(kScratchBytes / (b.far * kSquare * 4) / 2 * 2, 1, near);
  b.whole = b.chunks == 1 || (b.near < near && b.far * steps * 2 * kTile * 2 <= kFarBytes);
  return b;
}

/// Memory of one thread, kept between calls: a far block, a strip of near panels, two squares of results that wait to
/// be transposed, waiting sums or pairs of squares, two squares of sums.
struct Scratch {
  static constexpr int64_t kPanelBytes = int64_t{kMostSteps} * 2 * kTile * 2;
  static constexpr int64_t kNearSize = kStrip * kPanelBytes;
  static constexpr int64_t kFarSize = kFarBytes + kPanelBytes;
  static constexpr int64_t kTurnSize = 2 * kSquare * 2;
  static constexpr int64_t kSumsSize = kScratchBytes + 64 * kSquare * 4;
  static constexpr int64_t kSize = 4 << 20;
  static_assert(2 * kSquare * 4 + kTurnSize + kNearSize + kFarSize + kSumsSize <= kSize);

  Bf16 *far = nullptr, *near = nullptr, *turn = nullptr;
  float *sums = nullptr, *square[2] = {nullptr, nullptr};

  /// That of this thread, or another while one is set aside.
  static Scratch& mine();

  /// While it lives, GEMMs of this thread use other memory: a progress callback may call them.
  class SetAside {
   public:
    SetAside();
    ~SetAside();
    SetAside(const SetAside&) = delete;
    SetAside& operator=(const SetAside&) = delete;
  };

  Scratch();

 private:
  HugeMemory memory_;
};

/// A block of far panels, packed side by side in the scratch of this thread.
class FarBlock {
 public:
  /// What becomes of a panel: its work, and its first row (column) in the numbers of that work.
  struct Panel {
    const Work* work;
    int64_t at;
  };

  explicit FarBlock(const Blocking& cut) : cut_(cut), memory_(Scratch::mine().far) {}
  /// All over again; what it has allocated it keeps.
  void restart(const Blocking& cut) {
    cut_ = cut;
    memory_ = Scratch::mine().far;
    runs_.clear();
    panels_.clear();
  }

  int64_t size() const { return static_cast<int64_t>(panels_.size()); }
  const Panel& panel(int64_t f) const { return panels_[f]; }
  /// Appends the panels of `m` from row (column) `first` on, which `work` counts alike; the work must stay.
  void add(const Operand& m, const Work& work, int64_t first, int64_t panels) {
    if (cut_.whole) pack_panels(m, first, panels, 0, cut_.all_steps, memory_ + size() * cut_.all_steps * 2 * kTile);
    runs_.push_back({m, first, panels});
    for (int64_t i = 0; i < panels; ++i) panels_.push_back({&work, first + i * kPanel});
  }
  /// Packs the steps of a chunk, unless that was done before.
  void pack(int chunk, int steps) {
    start_ = cut_.whole ? memory_ + static_cast<int64_t>(chunk) * cut_.steps * 2 * kTile : memory_;
    stride_ = static_cast<int64_t>(cut_.whole ? cut_.all_steps : steps) * 2 * kTile;
    if (cut_.whole) return;
    Bf16* to = memory_;
    for (auto& run : runs_) {
      pack_panels(run.m, run.first, run.panels, static_cast<int64_t>(chunk) * cut_.steps * kStep, steps, to);
      if (chunk + 1 == cut_.chunks) run.m.also = nullptr;  // once is enough
      to += run.panels * stride_;
    }
  }
  /// The chunk that was packed last.
  const Bf16* packed(int64_t f) const { return start_ + f * stride_; }

 private:
  struct Run {
    Operand m;
    int64_t first, panels;
  };
  Blocking cut_;
  Bf16 *memory_, *start_ = nullptr;
  int64_t stride_ = 0;
  std::vector<Run> runs_;
  std::vector<Panel> panels_;
};

/// Some panels of the near operand.
struct Near {
  const Operand& m;
  int64_t begin, end;
};

/// Multiplies near panels by a block of far ones; A is near if `near.m.left`, and never if B is gated. All works of the
/// block have the form `form`. `between`, if not null, is called about every ten microseconds.
void multiply_block(const Near& near, FarBlock& far, const Blocking& cut, const Form& form, const Epilogue& e,
                    const std::function<void()>* between = nullptr);

/// run(t) on each of `threads` threads.
template <class Run>
void on_threads(int threads, const Run& run) {
  if (threads == 1) return run(0);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) run(static_cast<int>(t));
  });
}

}  // namespace weft::kernels::CPU_CAPABILITY
