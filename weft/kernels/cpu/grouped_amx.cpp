#include "weft/kernels/cpu/grouped_left_amx.h"
#include "weft/kernels/cpu/product_amx.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels::CPU_CAPABILITY {
namespace {

const Bf16* bf16(const void* p) { return static_cast<const Bf16*>(p); }
const Bf16* from_row(const at::Tensor& t, int64_t row) { return bf16(t.const_data_ptr()) + row * t.strides()[0]; }

/// Rows of a group, in a matrix of all rows.
Place rows_of(const at::Tensor& t, int64_t row) {
  if (!t.defined()) return {};
  Place p{static_cast<char*>(t.data_ptr()), t.sizes().size() > 1 ? t.strides()[0] : 1, t.scalar_type()};
  p.data = p.at(row, 0);
  return p;
}
Place matrix_of(const GroupedMatrix& m, int64_t g) {
  if (!m.defined()) return {};
  return {static_cast<char*>(m.data(g)), m.columns(), m.dtype()};
}

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// The panels of all groups, laid out in a row by cost and cut into equal parts for the threads: run(g, begin, end) for
/// those that start within the part of thread t. `cost(g)` is that of each of a group's `panels` panels; 0: no work.
template <class Cost, class Run>
void share(const OpenIndex& index, int64_t panels, int t, int threads, const Cost& cost, const Run& run) {
  int64_t total = 0;
  for (int64_t g = 0; g < index.groups(); ++g) total += cost(g) * panels;
  const auto from = total / threads * t + total % threads * t / threads;
  const auto to = total / threads * (t + 1) + total % threads * (t + 1) / threads;
  int64_t at = 0;
  for (int64_t g = 0; g < index.groups() && at < to; ++g) {
    const auto each = cost(g), start = at;
    if (each == 0) continue;
    at += each * panels;
    const auto panel = [&](int64_t place) {
      return std::clamp<int64_t>(up(std::max<int64_t>(place - start, 0), each), 0, panels);
    };
    if (const auto begin = panel(from), end = panel(to); begin < end) run(g, begin, end);
  }
}

int thread_count() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

/// The block of this thread; its lists keep their memory.
FarBlock& far_block(const Blocking& cut) {
  static thread_local FarBlock block(cut);
  block.restart(cut);
  return block;
}

/// Near panels `begin` to `end` of one group against all of `far`.
void multiply_panels(const Operand& near, const Operand& far, const Work& work, int64_t begin, int64_t end) {
  static const Epilogue none;
  const auto form = form_of(work, {}, {});
  const auto blocking = cut(end - begin, far.panels(), near.k);
  for (int64_t f = 0; f < far.panels(); f += blocking.far) {
    auto& block = far_block(blocking);
    block.add(far, work, f * kPanel, std::min(blocking.far, far.panels() - f));
    multiply_block({near, begin, end}, block, blocking, form, none);
  }
}

Work plain_work(int64_t rows, int64_t columns, const Place& out) {
  Work w;
  w.rows = rows;
  w.columns = w.reach = columns;
  w.out = out;
  w.row = row_function({}, {});
  return w;
}

/// Y = X Wᵀ or X W for the groups of a call.
class GroupedRun {
 public:
  GroupedRun(const OpenIndex& index, const GroupedProduct& call)
      : index_(index), call_(call), n_(call.transposed ? call.w.rows() : call.w.columns()), k_(call.x.sizes()[1]) {}

  /// Rows of the bias that are scaled need sums over all of k at once.
  static bool takes(const GroupedProduct& call) { return !call.scales.defined() || call.x.sizes()[1] <= kMostLeft; }

  void run() const {
    const int threads = thread_count();
    on_threads(threads, [&](int t) {
      LeftMultiplier left;
      share(
          index_, up(n_, kPanel), t, threads, [&](int64_t g) { return cost(g); },
          [&](int64_t g, int64_t begin, int64_t end) { group(left, g, begin, end); });
    });
  }

 private:
  /// In squares, with the way of W from memory as three of them.
  int64_t cost(int64_t g) const { return index_.rows(g) == 0 ? 0 : up(index_.rows(g), kPanel) + 3; }

  /// Panels of W of one group.
  void group(LeftMultiplier& by_left, int64_t g, int64_t begin, int64_t end) const {
    const bool left = call_.transposed && k_ <= kMostLeft && (index_.rows(g) <= kFewRows || call_.scales.defined());
    if (!left) return by_panels(g, begin, end);
    const auto p = left_product(g);
    by_left.run(p, begin * 2, std::min(end * 2, p.tiles()));
  }

  LeftProduct left_product(int64_t g) const {
    const auto row = index_.begin(g);
    LeftProduct p;
    p.x = from_row(call_.x, row);
    p.ldx = call_.x.strides()[0];
    p.rows = index_.rows(g);
    p.w = bf16(call_.w.data(g));
    p.n = n_;
    p.k = k_;
    p.bias = matrix_of(call_.bias, g);
    p.scales = rows_of(call_.scales, row);
    p.out = rows_of(call_.out, row);
    return p;
  }

  void by_panels(int64_t g, int64_t begin, int64_t end) const {
    const auto row = index_.begin(g);
    Operand x, w;
    x.data = from_row(call_.x, row);
    x.ld = call_.x.strides()[0];
    x.extent = index_.rows(g);
    x.k = w.k = k_;
    w.data = bf16(call_.w.data(g));
    w.ld = call_.w.columns();
    w.extent = n_;
    w.left = false;
    w.k_contiguous = call_.transposed;
    auto work = plain_work(x.extent, n_, rows_of(call_.out, row));
    work.ahead_rows = kPanel;
    work.bias = bias(g);
    multiply_panels(w, x, work, begin, end);
  }

  /// As float32 with room for reading beyond its end.
  const float* bias(int64_t g) const {
    if (!call_.bias.defined()) return nullptr;
    static thread_local std::vector<float> values;
    values.resize(n_ + kPanel);
    const auto from = matrix_of(call_.bias, g);
    for (int64_t i = 0; i < n_; i += 16) {
      const auto mask = first(n_ - i);
      _mm512_mask_storeu_ps(values.data() + i, mask, load16(from, 0, i, mask));
    }
    return values.data();
  }

  static constexpr int64_t kFewRows = 512, kMostLeft = 16384;
  static_assert(kMostLeft / kStep * 2 * kTile * 2 <= Scratch::kFarSize, "a packed panel of X");
  static_assert(kMostLeft / kStep * kTile * 2 <= Scratch::kNearSize, "a copied tile row of W");

  const OpenIndex& index_;
  const GroupedProduct& call_;
  int64_t n_, k_;
};

/// dW = dYᵀ X for the groups of a call.
class GradientRun {
 public:
  GradientRun(const OpenIndex& index, const GroupedGradient& call)
      : index_(index), call_(call), n_(call.out.rows()), k_(call.out.columns()) {}

  void run() const {
    const int threads = thread_count();
    on_threads(threads, [&](int t) {
      share(
          index_, up(n_, kPanel), t, threads, [&](int64_t g) { return cost(g); },
          [&](int64_t g, int64_t begin, int64_t end) { group(g, begin, end); });
    });
  }

 private:
  /// In steps, with the way of dW to memory as four of them.
  int64_t cost(int64_t g) const {
    if (index_.rows(g) == 0) return call_.add ? 0 : 2;
    return up(index_.rows(g), kStep) + 4;
  }

  void group(int64_t g, int64_t begin, int64_t end) const {
    const auto row = index_.begin(g), rows = index_.rows(g);
    const auto out = matrix_of(call_.out, g);
    if (rows == 0) {
      const auto last = std::min(n_, end * kPanel);
      std::memset(out.at(begin * kPanel, 0), 0, (last - begin * kPanel) * k_ * out.bytes());
      return;
    }
    Operand dy, x;
    dy.data = from_row(call_.dy, row);
    dy.ld = call_.dy.strides()[0];
    dy.extent = n_;
    x.data = from_row(call_.x, row);
    x.ld = call_.x.strides()[0];
    x.extent = k_;
    x.left = false;
    dy.k = x.k = rows;
    dy.k_contiguous = x.k_contiguous = false;
    auto work = plain_work(n_, k_, out);
    if (call_.add) work.add[work.adds++] = out;
    work.ahead_rows = kPanel;
    multiply_panels(dy, x, work, begin, end);
  }

  const OpenIndex& index_;
  const GroupedGradient& call_;
  int64_t n_, k_;
};

}  // namespace
}  // namespace weft::kernels::CPU_CAPABILITY

namespace weft::kernels::amx {

void grouped_gemm(const OpenIndex& index, const GroupedProduct& call) {
  using CPU_CAPABILITY::GroupedRun;
  if (GroupedRun::takes(call)) return GroupedRun(index, call).run();
  for (int64_t g = 0; g < index.groups(); ++g) split_gemm(index, call, g);
}

void grouped_weight_gradient(const OpenIndex& index, const GroupedGradient& call) {
  CPU_CAPABILITY::GradientRun(index, call).run();
}

}  // namespace weft::kernels::amx
