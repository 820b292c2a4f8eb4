#include "weft/kernels/cpu/multiply_amx.h"

#include <utility>

namespace weft::kernels::CPU_CAPABILITY {
namespace {

/// Brings the next near panel of a packed operand to L2, a few lines under each step.
class Prefetcher {
 public:
  Prefetcher(const Operand& m, int64_t panel, int64_t k0, int64_t far) {
    if (!m.packed || panel >= m.panels()) return;
    next_ = reinterpret_cast<const char*>(m.packed_panel(panel, k0));
    per_step_ = static_cast<int>((kPanel + far - 1) / far);
  }
  [[gnu::always_inline]] void step() {
    for (int i = 0; i < per_step_; ++i, next_ += 64) _mm_prefetch(next_, _MM_HINT_T1);
  }

 private:
  const char* next_ = nullptr;
  int per_step_ = 0;
};

/// Calls somebody now and then, between panels, when no tile holds anything. The callback may use AMX itself, call a
/// GEMM or run into oneDNN, so it finds tiles released and scratch set aside.
class Interruption {
 public:
  explicit Interruption(const std::function<void()>* call) : call_(call) {}
  void after(int64_t steps) {
    constexpr int64_t kOften = 320;  // steps in ten microseconds
    steps_ += steps;
    if (!call_ || steps_ < kOften) return;
    steps_ = 0;
    const Scratch::SetAside scratch;
    _tile_release();
    (*call_)();
    TileConfig::load();
  }

 private:
  const std::function<void()>* call_;
  int64_t steps_ = 0;
};

/// Near panels against one block of far panels.
template <bool kNearIsA, class Rows>
class Multiplier {
 public:
  Multiplier(const Operand& near, FarBlock& far, const Blocking& cut, Interruption interruption)
      : near_(near), far_(far), cut_(cut), interruption_(interruption), scratch_(Scratch::mine()) {}

  void run(int64_t begin, int64_t end) {
    const TileConfig config;
    for (int64_t n = begin; n < end; n += cut_.near) chunks(n, std::min(end, n + cut_.near));
    _mm_sfence();
  }

 private:
  void chunks(int64_t begin, int64_t end) {
    for (int chunk = 0; chunk < cut_.chunks; ++chunk) {
      const int64_t k0 = static_cast<int64_t>(chunk) * cut_.steps * kStep;
      const int steps = static_cast<int>(std::min<int64_t>(cut_.steps, (near_.k - k0 + kStep - 1) / kStep));
      far_.pack(chunk, steps);
      const int64_t together = near_.k_contiguous ? 1 : kStrip;
      for (int64_t n = begin; n < end; ++n) {
        const int64_t in_strip = (n - begin) % together;
        if (!near_.packed && in_strip == 0)
          pack_panels(near_, n * kPanel, std::min(together, end - n), k0, steps, scratch_.near);
        tile_fence();
        panel(near_.packed ? near_.packed_panel(n, k0) : scratch_.near + in_strip * steps * 2 * kTile, n, n - begin,
              steps, chunk);
        tile_fence();
        interruption_.after(far_.size() * steps);
      }
      finish_waiting();
    }
  }

  /// The sums of a near panel and far panel f. Those of b lie behind those of a.
  float* square(int64_t n, int64_t waiting, int64_t f) {
    if (!near_.half && cut_.chunks == 1) return scratch_.square[turn_ ^= 1];
    if (!near_.half) return scratch_.sums + (waiting * far_.size() + f) * kSquare;
    const int64_t pair = (cut_.chunks == 1 ? 0 : waiting / 2 * far_.size()) + f;
    return scratch_.sums + (2 * pair + n % 2) * kSquare;
  }

  /// One near panel against the block.
  [[gnu::flatten]] void panel(const Bf16* near, int64_t n, int64_t waiting, int steps, int chunk) {
    const int64_t far = far_.size();
    Prefetcher ahead(near_, n + 1, static_cast<int64_t>(chunk) * cut_.steps * kStep, far);
    const bool gate = near_.half && n % 2 == 0;  // waits for its other half
    const bool last = chunk + 1 == cut_.chunks && !gate;
    const int64_t near_at = (near_.half ? n / 2 : n) * kPanel;
    const int rows = (kPanel + steps - 1) / std::max(steps, 1);  // of the square before, under each step
    const Work* work = waits_.c ? waits_.work : far_.panel(0).work;
    Pending<Rows> pending(*work, waits_.c, waits_.row, waits_.column);
    if (waits_.c) pending.start(*work);
    waits_ = {};
    for (int64_t f = 0; f < far; ++f) {
      float* c = square(n, waiting, f);
      const Bf16* other = far_.packed(f);
      const char* sums = reinterpret_cast<const char*>(c + near_.together() * kSquare);  // that wait and are next
      multiply<kNearIsA>(kNearIsA ? near : other, kNearIsA ? other : near, steps, c, chunk > 0, [&](int i) {
        for (int r = 0; r < rows; ++r) pending.step();
        ahead.step();
        if (chunk > 0) {
          _mm_prefetch(sums + 128 * i, _MM_HINT_T0);
          _mm_prefetch(sums + 128 * i + 64, _MM_HINT_T0);
        }
      });
      if (!last) continue;
      pending.finish(*work);
      work = far_.panel(f).work;
      const int64_t at = far_.panel(f).at, row = kNearIsA ? near_at : at, column = kNearIsA ? at : near_at;
      const bool wait = f + 1 == far && steps > 0;
      if (wait) waits_ = {work, c, row, column};
      pending = Pending<Rows>(*work, wait ? nullptr : c, row, column);
      if (!wait) pending.start(*work);
    }
    pending.finish(*work);
  }

  /// The last square of a panel is finished under the first one of the next panel, or here.
  void finish_waiting() {
    if (!waits_.c) return;
    Pending<Rows> pending(*waits_.work, waits_.c, waits_.row, waits_.column);
    pending.start(*waits_.work);
    pending.finish(*waits_.work);
    waits_ = {};
  }

  const Operand& near_;
  FarBlock& far_;
  const Blocking& cut_;
  Interruption interruption_;
  Scratch& scratch_;
  int turn_ = 0;  // of the two squares
  struct {
    const Work* work = nullptr;
    const float* c = nullptr;
    int64_t row = 0, column = 0;
  } waits_;  // square that waits for its epilogue
};

}  // namespace

namespace {

/// Scratch of this thread, one for each callback that it is inside of and one more.
struct ScratchStack {
  std::vector<std::unique_ptr<Scratch>> all;
  size_t depth = 0;

  static ScratchStack& mine() {
    static thread_local ScratchStack stack;
    return stack;
  }
};

}  // namespace

Scratch& Scratch::mine() {
  auto& [all, depth] = ScratchStack::mine();
  while (all.size() <= depth) all.push_back(std::make_unique<Scratch>());
  return *all[depth];
}

Scratch::SetAside::SetAside() { ++ScratchStack::mine().depth; }
Scratch::SetAside::~SetAside() { --ScratchStack::mine().depth; }

Scratch::Scratch() : memory_(kSize) {
  char* p = memory_.data();
  const auto take = [&](int64_t bytes) { return std::exchange(p, p + bytes); };
  for (auto& s : square) s = reinterpret_cast<float*>(take(kSquare * 4));
  turn = reinterpret_cast<Bf16*>(take(kTurnSize));
  near = reinterpret_cast<Bf16*>(take(kNearSize));
  far = reinterpret_cast<Bf16*>(take(kFarSize));
  sums = reinterpret_cast<float*>(take(kSumsSize));
}

void multiply_block(const Near& near, FarBlock& far, const Blocking& cut, const Form& form, const Epilogue& e,
                    const std::function<void()>* between) {
  if (far.size() == 0 || near.begin == near.end) return;
  const Work& work = *far.panel(0).work;
  const Interruption interruption(between);
  const auto run = [&]<bool kNearIsA, class Rows>() {
    Multiplier<kNearIsA, Rows>(near.m, far, cut, interruption).run(near.begin, near.end);
  };
  if (near.m.left)
    with_rows<true>(form, work, e.act, e.slope, [&]<class Rows>() { run.template operator()<true, Rows>(); });
  else
    with_rows<false>(form, work, e.act, e.slope, [&]<class Rows>() { run.template operator()<false, Rows>(); });
}

}  // namespace weft::kernels::CPU_CAPABILITY
