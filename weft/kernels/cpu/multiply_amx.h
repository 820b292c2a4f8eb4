#pragma once
#include <ATen/Parallel.h>
#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "weft/kernels/cpu/checksum_amx.h"
#include "weft/kernels/cpu/epilogue_amx.h"
#include "weft/kernels/cpu/pack_amx.h"
#include "weft/kernels/gemm.h"

// The product of two operands: how it is cut, and the loops. Included by gemm_amx.cpp only.

namespace weft::kernels::CPU_CAPABILITY {

/// How a product is cut. One operand is "near": its panels are walked one by one, packed while the panel before is
/// multiplied, and the start of a panel stays in L1. Of the other one, "far", a block of panels lies packed in L2 and
/// every near panel meets all of it. A reduction longer than `steps` is cut into chunks, whose sums wait in `scratch`.
struct Blocking {
  int steps;  // of one chunk
  int chunks;
  int64_t far;   // panels in a block
  int64_t near;  // panels whose sums wait while the chunks go by
};

constexpr int64_t kFarBytes = 1 << 20;      // half of L2
constexpr int64_t kScratchBytes = 1 << 20;  // the other half, if sums have to wait
constexpr int kMostSteps = 36;              // of one chunk: 1152 values

inline Blocking cut(int64_t near, int64_t far, int64_t k) {
  const int64_t steps = (k + kStep - 1) / kStep;
  Blocking b{};
  b.chunks = static_cast<int>(std::max<int64_t>(1, (steps + kMostSteps - 1) / kMostSteps));
  b.steps = static_cast<int>((steps + b.chunks - 1) / b.chunks);
  const int64_t panel_bytes = static_cast<int64_t>(std::max(b.steps, 1)) * 2 * kTile * 2;
  b.far = std::clamp<int64_t>(kFarBytes / panel_bytes / (b.chunks > 1 ? 2 : 1), 1, std::max<int64_t>(far, 1));
  b.near = b.chunks == 1 ? near : std::clamp<int64_t>(kScratchBytes / (b.far * kSquare * 4), 1, near);
  return b;
}

/// Memory of one thread, kept between calls: a far block, a strip of near panels, waiting sums, two squares.
struct Scratch {
  Bf16 *far = nullptr, *near = nullptr;
  float *sums = nullptr, *square[2] = {nullptr, nullptr};

  static Scratch& mine() {
    static thread_local Scratch scratch;
    return scratch;
  }

 private:
  static constexpr size_t kPanelBytes = kMostSteps * 2 * kTile * 2;
  static constexpr size_t kBytes = 4 << 20;
  std::unique_ptr<char, decltype(&std::free)> memory_{static_cast<char*>(std::aligned_alloc(2 << 20, kBytes)),
                                                      &std::free};

  Scratch() {
    TORCH_CHECK(memory_, "weft: no memory for a GEMM's scratch (", kBytes, " bytes).");
    madvise(memory_.get(), kBytes, MADV_HUGEPAGE);
    char* p = memory_.get();
    const auto take = [&](size_t bytes) { return std::exchange(p, p + bytes); };
    for (auto& s : square) s = reinterpret_cast<float*>(take(kSquare * 4));
    near = reinterpret_cast<Bf16*>(take(kStrip * kPanelBytes));
    far = reinterpret_cast<Bf16*>(take(kFarBytes + kPanelBytes));
    sums = reinterpret_cast<float*>(take(kScratchBytes + kSquare * 4 * 64));
  }
};

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

/// Adds up the lines of a weight under the steps of a product that already uses its packed copy.
class Verifier {
 public:
  Verifier() = default;
  /// Lines [from, to) of `data`.
  Verifier(const char* data, int64_t from, int64_t to) : sum_(from), next_(data + from * 64), left_(to - from) {}

  void pace(int64_t steps) { per_step_ = static_cast<int>((left_ + steps - 1) / std::max<int64_t>(steps, 1)); }
  [[gnu::always_inline]] void step() {
    for (int i = 0; i < per_step_ && left_ > 0; ++i, --left_, next_ += 64) {
      _mm_prefetch(next_ + 1024, _MM_HINT_T0);
      sum_.line(_mm512_loadu_si512(next_));
    }
  }
  const LineSum& finish() {
    sum_.add(next_, left_ * 64);
    left_ = 0;
    return sum_;
  }

 private:
  LineSum sum_;
  const char* next_ = nullptr;
  int64_t left_ = 0;
  int per_step_ = 0;
};

/// The near panels [near0, near1) against the far panels [far0, far1).
template <bool kNearIsA, class Rows>
class Multiplier {
 public:
  Multiplier(const Operand& near, const Operand& far, const Work& work, const Blocking& cut, Verifier& verifier)
      : near_(near), far_(far), work_(work), cut_(cut), verifier_(verifier), scratch_(Scratch::mine()) {}

  void run(int64_t near0, int64_t near1, int64_t far0, int64_t far1) {
    const TileConfig config;
    verifier_.pace((near1 - near0) * (far1 - far0) * ((near_.k + kStep - 1) / kStep));
    for (int64_t f = far0; f < far1; f += cut_.far)
      for (int64_t n = near0; n < near1; n += cut_.near)
        block(n, std::min(near1, n + cut_.near), f, std::min(far1, f + cut_.far));
    _mm_sfence();
  }

 private:
  void block(int64_t near0, int64_t near1, int64_t far0, int64_t far1) {
    const int64_t far = far1 - far0;
    for (int chunk = 0; chunk < cut_.chunks; ++chunk) {
      const int64_t k0 = static_cast<int64_t>(chunk) * cut_.steps * kStep;
      const int steps = static_cast<int>(std::min<int64_t>(cut_.steps, (near_.k - k0 + kStep - 1) / kStep));
      pack_panels(far_, far0 * kPanel, far, k0, steps, scratch_.far);
      const int64_t together = near_.k_contiguous ? 1 : kStrip;
      for (int64_t n = near0; n < near1; ++n) {
        const int64_t in_strip = (n - near0) % together;
        if (!near_.packed && in_strip == 0)
          pack_panels(near_, n * kPanel, std::min(together, near1 - n), k0, steps, scratch_.near);
        tile_fence();
        panel(near_.packed ? near_.packed_panel(n, k0) : scratch_.near + in_strip * steps * 2 * kTile, n, n - near0,
              far0, far, steps, chunk);
        tile_fence();
      }
    }
  }

  /// One near panel against the block.
  [[gnu::flatten]] void panel(const Bf16* near, int64_t n, int64_t waiting, int64_t far0, int64_t far, int steps,
                              int chunk) {
    Prefetcher ahead(near_, n + 1, static_cast<int64_t>(chunk) * cut_.steps * kStep, far);
    const bool last = chunk + 1 == cut_.chunks;
    const int rows = (kPanel + steps - 1) / std::max(steps, 1);  // of the square before, under each step
    Pending<Rows> pending(work_, nullptr, 0, 0);
    Verifier verifier = verifier_;
    for (int64_t f = 0; f < far; ++f) {
      float* c = cut_.chunks == 1 ? scratch_.square[f & 1] : scratch_.sums + (waiting * far + f) * kSquare;
      const Bf16* other = scratch_.far + f * steps * 2 * kTile;
      const char* sums = reinterpret_cast<const char*>(c + kSquare);  // that wait and are next
      multiply<kNearIsA>(kNearIsA ? near : other, kNearIsA ? other : near, steps, c, chunk > 0, [&](int i) {
        for (int r = 0; r < rows; ++r) pending.step();
        ahead.step();
        verifier.step();
        if (chunk > 0) {
          _mm_prefetch(sums + 128 * i, _MM_HINT_T0);
          _mm_prefetch(sums + 128 * i + 64, _MM_HINT_T0);
        }
      });
      if (!last) continue;
      pending.finish(work_);
      const int64_t a = kNearIsA ? n : far0 + f, b = kNearIsA ? far0 + f : n;
      pending = Pending<Rows>(work_, c, a * kPanel, b * kPanel);
      pending.start(work_);
    }
    pending.finish(work_);
    verifier_ = verifier;
  }

  const Operand &near_, &far_;
  const Work& work_;
  const Blocking& cut_;
  Verifier& verifier_;
  Scratch& scratch_;
};

/// What a thread adds to while it multiplies.
struct Share {
  std::vector<float> sums;  // of columns
  Verifier verifier;
};

/// Runs the product on all threads, one share each: of the far panels, or of the near ones if those are too few.
inline void multiply_all(const Operand& a, const Operand& b, const Work& work, const Epilogue& e, bool near_is_a,
                         std::vector<Share>& shares) {
  const Operand &near = near_is_a ? a : b, &far = near_is_a ? b : a;
  const int64_t nears = near.panels(), fars = far.panels();
  const auto threads = static_cast<int64_t>(shares.size());
  const bool split_far = fars >= threads;
  const auto run = [&](int64_t t) {
    Work mine = work;
    mine.sums = e.keep_sums ? shares[t].sums.data() : nullptr;
    const int64_t n0 = split_far ? 0 : nears * t / threads, n1 = split_far ? nears : nears * (t + 1) / threads;
    const int64_t f0 = split_far ? fars * t / threads : 0, f1 = split_far ? fars * (t + 1) / threads : fars;
    const auto blocking = cut(n1 - n0, f1 - f0, near.k);
    auto& verifier = shares[t].verifier;
    if (near_is_a) {
      with_rows<true>(mine, e.act, e.slope, [&]<class Rows>() {
        Multiplier<true, Rows>(near, far, mine, blocking, verifier).run(n0, n1, f0, f1);
      });
    } else {
      with_rows<false>(mine, e.act, e.slope, [&]<class Rows>() {
        Multiplier<false, Rows>(near, far, mine, blocking, verifier).run(n0, n1, f0, f1);
      });
    }
    verifier.finish();
  };
  if (threads == 1) return run(0);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) run(t);
  });
}

}  // namespace weft::kernels::CPU_CAPABILITY
