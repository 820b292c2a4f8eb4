#include <thread>

#include "weft/kernels/cpu/product_amx.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels::CPU_CAPABILITY {
namespace {

/// The memory of tiles that somebody else has made of `m`.
const Bf16* laid_out(const at::Tensor& tiles, const Operand& m) {
  const std::array<int64_t, 4> sizes{m.panels(), 2 * steps_of(m), 16, kStep};
  TORCH_CHECK_VALUE(tiles.sizes() == at::IntArrayRef(sizes) && tiles.is_contiguous(), "gemm: the left factor has ",
                    m.extent, " rows of ", m.k, " values, its tiles have shape ", tiles.sizes(), ".");
  return reinterpret_cast<const Bf16*>(tiles.const_data_ptr());
}

/// One call: A B with its epilogue.
class Product {
 public:
  Product(at::Tensor a, at::Tensor b, const Epilogue& e, const at::Tensor& tiles)
      : a_(std::move(a)),
        b_(std::move(b)),
        e_(e),
        left_(operand(a_, true)),
        right_(operand(b_, false)),
        // Walk along a transposed A, which is a weight gradient's, so that its squares lie side by side in memory.
        near_is_a_(!left_.k_contiguous && !(e.act && e.act->gated())),
        threads_(at::in_parallel_region() ? 1 : at::get_num_threads()),
        results_(e, left_.extent, right_.extent, /*with_out=*/true),
        work_(results_.work()) {
    if (tiles.defined()) left_.packed = laid_out(tiles, left_);
    if (results_.gated()) right_.half = right_.extent / 2;
    if (near_is_a_) std::swap(work_.ahead_columns, work_.ahead_rows);
    if (!near_is_a_) most_far_ = results_.most_far(work_);
    if (e.keep_tiles && !near_is_a_) work_.tiles = results_.add_tiles();
  }

  GemmResult run() {
    const auto packed = packed_near();
    if (packed) near().packed = packed->data();
    multiply();
    return results_.finish();
  }

 private:
  Operand& near() { return near_is_a_ ? left_ : right_; }
  const Operand& far() const { return near_is_a_ ? right_ : left_; }

  /// The near operand in tiles: a frozen weight's copy, or packed for this call if several far blocks meet it. Null if
  /// it is in tiles already, or packed panel by panel.
  std::shared_ptr<const PackedCopy> packed_near() {
    if (near().packed) return nullptr;
    std::shared_ptr<const PackedCopy> kept;
    if (e_.weight && !near_is_a_) kept = packed_if_frozen(b_, right_);
    if (kept) return kept;
    const auto fars = far().panels();
    const bool several = cut(near().panels(), fars, near().k, most_far_).far * threads_ < fars;
    return several ? packed_once(near()) : nullptr;
  }

  void multiply() {
    auto sums = results_.column_sums(threads_);
    const auto caller = std::this_thread::get_id();
    on_threads(threads_, [&](int t) {
      multiply_share(t, sums[t].data(), std::this_thread::get_id() == caller ? e_.between : nullptr);
    });
    results_.sum_up(sums);
  }

  /// A thread's share of the far panels, or of the near ones if those are too few.
  void multiply_share(int t, float* sums, const std::function<void()>* between) {
    Work work = work_;
    work.sums = e_.keep_sums ? sums : nullptr;
    if (work.tiles) work.turn = Scratch::mine().turn;
    const auto form = form_of(work, e_.act, e_.slope);
    const int64_t fars = far().panels(), unit = near().together(), nears = near().panels() / unit;
    const bool split_far = fars >= threads_;
    const auto part = [&](int64_t all, bool split, int i) { return split ? all * (t + i) / threads_ : all * i; };
    const int64_t n0 = part(nears, !split_far, 0) * unit, n1 = part(nears, !split_far, 1) * unit;
    const int64_t f0 = part(fars, split_far, 0), f1 = part(fars, split_far, 1);
    const auto blocking = cut(n1 - n0, f1 - f0, near().k, most_far_);
    for (int64_t f = f0; f < f1; f += blocking.far) {
      FarBlock block(blocking);
      block.add(far(), work, f * kPanel, std::min(blocking.far, f1 - f));
      multiply_block({near(), n0, n1}, block, blocking, form, e_, between);
    }
  }

  at::Tensor a_, b_;
  const Epilogue& e_;
  Operand left_, right_;
  bool near_is_a_;
  int threads_;
  Results results_;
  Work work_;
  int64_t most_far_ = INT64_MAX;
};

}  // namespace
}  // namespace weft::kernels::CPU_CAPABILITY

namespace weft::kernels::amx {
GemmResult gemm(const at::Tensor& a, const at::Tensor& b, const Epilogue& epilogue, const at::Tensor& tiles) {
  return CPU_CAPABILITY::Product(a, b, epilogue, tiles).run();
}
}  // namespace weft::kernels::amx
