#include "weft/kernels/cpu/macrokernel_amx.h"

#include <utility>

namespace weft::kernels::CPU_CAPABILITY {
namespace {

/// The packed panels of the streamed operand, one after the other.
class StreamedCursor {
 public:
  StreamedCursor(const Operand& m, Bf16* scratch) : m_(m), scratch_(scratch) {}

  /// Starts a K-block of `steps` k-steps from k0.
  void start(int k_block, int64_t k0, int steps) { k_block_ = k_block, k0_ = k0, steps_ = steps, strip_ = {0, 0}; }
  /// Panel n; panels before `end` follow.
  const Bf16* panel(int64_t n, int64_t end) {
    if (m_.packed) return m_.packed_panel(n, k0_);
    if (n < strip_.begin || n >= strip_.end)
      m_.shared ? find_strip(n, end) : pack_strip(n, std::min(n + own_strip_panels(), end));
    return data_ + (n - strip_.begin) * stride_;
  }
  /// Panel n if it is packed and not in the scratch of this thread; otherwise null.
  const Bf16* packed(int64_t n) const {
    if (m_.packed) return m_.packed_panel(n, k0_);
    return m_.shared ? m_.shared->find(n, k_block_) : nullptr;
  }

 private:
  int64_t own_strip_panels() const { return m_.k_contiguous ? 1 : kStripPanels; }

  void find_strip(int64_t n, int64_t end) {
    const auto strip_end = std::min(m_.shared->strip_end(n), end);
    m_.shared->pack_free(n, k_block_);
    data_ = m_.shared->wait(n, k_block_);
    if (!data_) return pack_strip(n, strip_end);
    stride_ = m_.shared->panel_stride();
    strip_ = {n, strip_end};
  }
  void pack_strip(int64_t begin, int64_t end) {
    pack_panels(m_, begin * kBlockDim, end - begin, k0_, steps_, scratch_);
    data_ = scratch_;
    stride_ = int64_t{steps_} * 2 * kTileElems;
    strip_ = {begin, end};
  }

  const Operand& m_;
  Bf16* scratch_;
  int k_block_ = 0, steps_ = 0;
  int64_t k0_ = 0;
  Range strip_{0, 0};  // panels at `data_`
  const Bf16* data_ = nullptr;
  int64_t stride_ = 0;
};

/// Prefetches the next streamed panel to L2, a few cache lines per k-step.
class PanelPrefetcher {
 public:
  /// `next` may be null. `uses`: how often the current panel is multiplied before `next` is needed.
  PanelPrefetcher(const Bf16* next, int64_t uses) : next_(reinterpret_cast<const char*>(next)) {
    if (next) per_step_ = static_cast<int>((kLinesPerStep + uses - 1) / uses);
  }
  [[gnu::always_inline]] void step() {
    for (int i = 0; i < per_step_; ++i, next_ += 64) _mm_prefetch(next_, _MM_HINT_T1);
  }

 private:
  static constexpr int kLinesPerStep = 2 * kTileElems * 2 / 64;  // cache lines of a panel in a k-step
  const char* next_;
  int per_step_ = 0;
};

/// Calls the progress callback between panels, when no tile is live. The callback may use AMX (a GEMM of weft or
/// oneDNN), so the tiles are released and it gets its own scratch.
class ProgressHook {
 public:
  explicit ProgressHook(const std::function<void()>* call) : call_(call) {}
  void after(int64_t steps) {
    constexpr int64_t kStepsPerCall = 320;  // about 10 µs
    steps_ += steps;
    if (!call_ || steps_ < kStepsPerCall) return;
    steps_ = 0;
    const Scratch::NestedScope scratch;
    _tile_release();
    (*call_)();
    TileConfig::load();
  }

 private:
  const std::function<void()>* call_;
  int64_t steps_ = 0;
};

/// Multiplies streamed panels by one resident block.
template <bool kStreamedIsA, class RowKernel>
class MacroKernel {
 public:
  MacroKernel(const StreamedPanels& streamed, ResidentPanels& resident, const Blocking& blocking,
              ProgressHook progress_hook)
      : range_(streamed),
        streamed_(streamed.m),
        resident_(resident),
        blocking_(blocking),
        progress_hook_(progress_hook),
        scratch_(Scratch::current()),
        cursor_(streamed.m, scratch_.streamed) {}

  void run() {
    const TileConfig config;
    for (int64_t n = range_.begin; n < range_.end; n += blocking_.streamed)
      multiply_k_blocks(n, std::min(range_.end, n + blocking_.streamed));
    _mm_sfence();
  }

 private:
  void multiply_k_blocks(int64_t begin, int64_t end) {
    const int64_t unit = streamed_.panels_per_unit();
    const int64_t first = begin + share_of((end - begin) / unit, range_.thread, range_.threads).begin * unit;
    const auto next = [&](int64_t n) { return n + 1 == end ? begin : n + 1; };
    for (int k_block = 0; k_block < blocking_.k_blocks; ++k_block) {
      const int64_t k0 = static_cast<int64_t>(k_block) * blocking_.kc_steps * kKStep;
      const int steps = static_cast<int>(std::min<int64_t>(blocking_.kc_steps, ceil_div(streamed_.k - k0, kKStep)));
      resident_.pack(k_block, steps);
      cursor_.start(k_block, k0, steps);
      for (int64_t i = begin, n = first; i < end; ++i, n = next(n)) {
        const auto* const streamed = cursor_.panel(n, end);
        tile_fence();
        panel(streamed, cursor_.packed(next(n)), n, n - begin, steps, k_block);
        tile_fence();
        progress_hook_.after(resident_.size() * steps);
      }
      finish_deferred();
    }
  }

  /// The accumulator block of streamed panel n, the `slot`-th whose partial sums are kept, and resident panel r. Gated
  /// (n even: a, n odd: b): the block of b follows that of a.
  float* accumulator(int64_t n, int64_t slot, int64_t r) {
    if (!streamed_.half && blocking_.k_blocks == 1) return scratch_.block[block_parity_ ^= 1];
    if (!streamed_.half) return scratch_.partial_sums + (slot * resident_.size() + r) * kBlockElems;
    const int64_t pair = (blocking_.k_blocks == 1 ? 0 : slot / 2 * resident_.size()) + r;
    return scratch_.partial_sums + (2 * pair + n % 2) * kBlockElems;
  }

  /// Multiplies one streamed panel by the resident block; `next`, the panel to prefetch, may be null. The epilogue of
  /// each accumulator block overlaps with the tile multiplications of the next one.
  [[gnu::flatten]] void panel(const Bf16* streamed, const Bf16* next, int64_t n, int64_t slot, int steps, int k_block) {
    const int64_t resident = resident_.size();
    PanelPrefetcher prefetcher(next, resident);
    const bool gate = streamed_.half && n % 2 == 0;                    // finished together with panel n + 1
    const bool complete = k_block + 1 == blocking_.k_blocks && !gate;  // the accumulators are complete
    const int64_t streamed_start = (streamed_.half ? n / 2 : n) * kBlockDim;
    const int rows_per_step = (kBlockDim + steps - 1) / std::max(steps, 1);  // of the previous block's epilogue
    const EpilogueArgs* args = deferred_.c ? deferred_.args : resident_.panel(0).args;
    DeferredEpilogue<RowKernel> epilogue(*args, deferred_.c, deferred_.row, deferred_.column);
    if (deferred_.c) epilogue.start(*args);
    deferred_ = {};
    for (int64_t r = 0; r < resident; ++r) {
      float* c = accumulator(n, slot, r);
      const Bf16* other = resident_.packed(r);
      const char* next_partial_sums = reinterpret_cast<const char*>(c + streamed_.panels_per_unit() * kBlockElems);
      gemm_microkernel<kStreamedIsA>(kStreamedIsA ? streamed : other, kStreamedIsA ? other : streamed, steps, c,
                                     k_block > 0, [&](int i) {
                                       for (int row = 0; row < rows_per_step; ++row) epilogue.step();
                                       prefetcher.step();
                                       if (k_block > 0) {
                                         _mm_prefetch(next_partial_sums + 128 * i, _MM_HINT_T0);
                                         _mm_prefetch(next_partial_sums + 128 * i + 64, _MM_HINT_T0);
                                       }
                                     });
      if (!complete) continue;
      epilogue.finish(*args);
      args = resident_.panel(r).args;
      const int64_t start = resident_.panel(r).start, row = kStreamedIsA ? streamed_start : start,
                    column = kStreamedIsA ? start : streamed_start;
      const bool defer = r + 1 == resident && steps > 0;
      if (defer) deferred_ = {args, c, row, column};
      epilogue = DeferredEpilogue<RowKernel>(*args, defer ? nullptr : c, row, column);
      if (!defer) epilogue.start(*args);
    }
    epilogue.finish(*args);
  }

  /// Runs the epilogue of the last block, if no next panel has overlapped it.
  void finish_deferred() {
    if (!deferred_.c) return;
    DeferredEpilogue<RowKernel> epilogue(*deferred_.args, deferred_.c, deferred_.row, deferred_.column);
    epilogue.start(*deferred_.args);
    epilogue.finish(*deferred_.args);
    deferred_ = {};
  }

  const StreamedPanels& range_;
  const Operand& streamed_;
  ResidentPanels& resident_;
  const Blocking& blocking_;
  ProgressHook progress_hook_;
  Scratch& scratch_;
  StreamedCursor cursor_;
  int block_parity_ = 0;  // accumulator block in use
  struct {
    const EpilogueArgs* args = nullptr;
    const float* c = nullptr;
    int64_t row = 0, column = 0;
  } deferred_;  // block whose epilogue runs with the next panel; c null: none
};

/// The scratch memory of this thread, one per nesting level of progress callbacks.
struct ScratchStack {
  std::vector<std::unique_ptr<Scratch>> all;
  size_t depth = 0;

  static ScratchStack& current() {
    static thread_local ScratchStack stack;
    return stack;
  }
};

}  // namespace

Scratch& Scratch::current() {
  auto& [all, depth] = ScratchStack::current();
  while (all.size() <= depth) all.push_back(std::make_unique<Scratch>());
  return *all[depth];
}

Scratch::NestedScope::NestedScope() { ++ScratchStack::current().depth; }
Scratch::NestedScope::~NestedScope() { --ScratchStack::current().depth; }

Scratch::Scratch() : memory_(kTotalSize) {
  char* p = memory_.data();
  const auto take = [&](int64_t bytes) { return std::exchange(p, p + bytes); };
  for (auto& s : block) s = reinterpret_cast<float*>(take(kBlockElems * 4));
  transpose_scratch = reinterpret_cast<Bf16*>(take(kTransposeSize));
  streamed = reinterpret_cast<Bf16*>(take(kStreamedSize));
  resident = reinterpret_cast<Bf16*>(take(kResidentSize));
  partial_sums = reinterpret_cast<float*>(take(kPartialSumsSize));
}

void gemm_macrokernel(const StreamedPanels& streamed, ResidentPanels& resident, const Blocking& blocking,
                      const KernelVariant& variant, const Epilogue& e, const std::function<void()>* progress) {
  if (resident.size() == 0 || streamed.begin == streamed.end) return;
  const EpilogueArgs& args = *resident.panel(0).args;
  const ProgressHook progress_hook(progress);
  const auto run = [&]<bool kStreamedIsA, class RowKernel>() {
    MacroKernel<kStreamedIsA, RowKernel>(streamed, resident, blocking, progress_hook).run();
  };
  if (streamed.m.left)
    with_row_kernel<true>(variant, args, e.act, e.act_grad,
                          [&]<class RowKernel>() { run.template operator()<true, RowKernel>(); });
  else
    with_row_kernel<false>(variant, args, e.act, e.act_grad,
                           [&]<class RowKernel>() { run.template operator()<false, RowKernel>(); });
}

}  // namespace weft::kernels::CPU_CAPABILITY
