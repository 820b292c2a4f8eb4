#pragma once
#include <ATen/Parallel.h>

#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "weft/kernels/cpu/pack_amx.h"
#include "weft/kernels/cpu/packed_weight_cache.h"

// Included by *_amx.cpp only.

namespace weft::kernels::CPU_CAPABILITY {

inline int thread_count() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

/// How an operand is divided for packing: strips of panels, K-blocks, and pieces of a K-block.
struct PackingPieces {
  int64_t strip_panels = 1;
  int k_steps = 0, kc_steps = 0;  // of the reduction, and of a K-block
  int piece_steps = 0;            // of a piece

  /// For `threads` that each need `panels` panels at once: small enough that each finds a piece of its own, and that
  /// packing one takes about as long as SharedPanels::wait.
  static PackingPieces choose(const Operand& m, int k_steps, int kc_steps, int64_t panels, int threads) {
    const auto unit = m.panels_per_unit();
    const auto each = panels / threads / unit * unit;
    PackingPieces p{.strip_panels = m.k_contiguous ? unit : std::clamp<int64_t>(each, unit, kStripPanels),
                    .k_steps = k_steps,
                    .kc_steps = kc_steps};
    const auto strips = std::max<int64_t>(1, panels / p.strip_panels);
    const auto pieces = std::max(ceil_div(threads, strips), p.strip_panels * kc_steps / kMaxPanelSteps);
    p.piece_steps = static_cast<int>(std::max<int64_t>(1, kc_steps / std::max<int64_t>(1, pieces)));
    return p;
  }
  int k_blocks() const { return static_cast<int>(ceil_div(k_steps, kc_steps)); }
  int pieces_per_block() const { return static_cast<int>(ceil_div(kc_steps, piece_steps)); }

 private:
  static constexpr int64_t kMaxPanelSteps = 36;  // of a piece: panels × k-steps, of 2 KB each
};

/// An operand that the threads of a GEMM pack together, each piece once: the first thread that needs a piece packs it
/// into memory that all threads read. No thread waits for one that does not run: if a piece that another thread has
/// taken is not ready after about the time in which it can be packed, the caller packs it for itself.
class SharedPanels {
 public:
  /// Elements of a packed operand.
  static int64_t elements(const Operand& m) { return m.panels() * ceil_div(m.k, kKStep) * 2 * kTileElems; }

  SharedPanels(const Operand& m, const PackingPieces& pieces)
      : m_(m),
        pieces_(pieces),
        strips_(ceil_div(m.panels(), pieces.strip_panels)),
        states_(std::make_unique<std::atomic<uint8_t>[]>(
            static_cast<size_t>(strips_ * pieces.k_blocks() * pieces.pieces_per_block()))) {}

  /// Where to pack: `elements` elements.
  void set_memory(Bf16* data) { data_ = data; }

  /// Elements from a panel to the next one.
  int64_t panel_stride() const { return int64_t{pieces_.k_steps} * 2 * kTileElems; }
  /// The end of the strip that contains a panel.
  int64_t strip_end(int64_t panel) const {
    return std::min((panel / pieces_.strip_panels + 1) * pieces_.strip_panels, m_.panels());
  }

  /// Packs the pieces of a panel's strip in a K-block that no thread has taken.
  void pack_free(int64_t panel, int k_block) {
    const auto strip = panel / pieces_.strip_panels;
    auto* const states = states_of(strip, k_block);
    for (int i = 0; i < pieces_.pieces_per_block(); ++i) {
      uint8_t state = kFree;
      if (states[i].load(std::memory_order_relaxed) != kFree) continue;
      if (!states[i].compare_exchange_strong(state, kTaken, std::memory_order_relaxed)) continue;
      pack_piece(strip, k_block, i);
      states[i].store(kReady, std::memory_order_release);
    }
  }

  /// Packs, in parallel, all pieces that no thread has taken.
  void pack_all_free() {
    at::parallel_for(0, strips_, 1, [&](int64_t begin, int64_t end) {
      for (auto strip = begin; strip < end; ++strip)
        for (int k_block = 0; k_block < pieces_.k_blocks(); ++k_block) pack_free(strip * pieces_.strip_panels, k_block);
    });
  }

  /// The panel in a K-block; null unless it is ready.
  const Bf16* find(int64_t panel, int k_block) const {
    const auto* const states = states_of(panel / pieces_.strip_panels, k_block);
    for (int i = 0; i < pieces_.pieces_per_block(); ++i)
      if (states[i].load(std::memory_order_acquire) != kReady) return nullptr;
    return at(panel, int64_t{k_block} * pieces_.kc_steps);
  }
  /// As find; waits for pieces that other threads are packing, about as long as packing them takes.
  const Bf16* wait(int64_t panel, int k_block) const {
    constexpr int kPauses = 256;  // of about 100 cycles
    for (int i = 0; i < kPauses; ++i, _mm_pause())
      if (const auto* found = find(panel, k_block)) return found;
    return nullptr;
  }

 private:
  enum State : uint8_t { kFree, kTaken, kReady };

  std::atomic<uint8_t>* states_of(int64_t strip, int k_block) const {
    return states_.get() + (strip * pieces_.k_blocks() + k_block) * pieces_.pieces_per_block();
  }
  Bf16* at(int64_t panel, int64_t step) const { return data_ + panel * panel_stride() + step * 2 * kTileElems; }
  void pack_piece(int64_t strip, int k_block, int piece) {
    const auto block = int64_t{k_block} * pieces_.kc_steps,
               block_end = std::min<int64_t>(block + pieces_.kc_steps, pieces_.k_steps);
    const auto begin = block + int64_t{piece} * pieces_.piece_steps,
               end = std::min(begin + pieces_.piece_steps, block_end);
    if (begin >= end) return;
    const auto panel = strip * pieces_.strip_panels;
    pack_panels(m_, panel * kBlockDim, strip_end(panel) - panel, begin * kKStep, static_cast<int>(end - begin),
                at(panel, begin), panel_stride());
  }

  Operand m_;
  PackingPieces pieces_;
  int64_t strips_;
  Bf16* data_ = nullptr;
  std::unique_ptr<std::atomic<uint8_t>[]> states_;  // [strip][K-block][piece]
};

/// Operands that threads pack together, in one buffer.
class SharedOperands {
 public:
  /// Adds an operand that is not empty. Valid as long as this object, and ready to pack after `allocate`.
  SharedPanels* add(const Operand& m, const PackingPieces& pieces) {
    offsets_.push_back(elements_);
    elements_ += SharedPanels::elements(m);
    return &operands_.emplace_back(m, pieces);
  }
  /// Allocates the memory of all operands.
  void allocate() {
    if (operands_.empty()) return;
    memory_ = acquire_buffer(elements_ * 2);
    for (size_t i = 0; i < operands_.size(); ++i) operands_[i].set_memory(memory_->data() + offsets_[i]);
  }

 private:
  std::deque<SharedPanels> operands_;
  std::vector<int64_t> offsets_;
  int64_t elements_ = 0;
  std::shared_ptr<PackedCopy> memory_;
};

}  // namespace weft::kernels::CPU_CAPABILITY
