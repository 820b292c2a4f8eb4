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
    if (!multiply_by_kept()) multiply_by_packed_once();
    return results_.finish();
  }

 private:
  Operand& near() { return near_is_a_ ? left_ : right_; }
  const Operand& far() const { return near_is_a_ ? right_ : left_; }

  /// Multiplies; on the way adds up `lines`, if any, and returns their checksum.
  Checksum multiply(const Lines* lines = nullptr) {
    auto shares = shares_of(threads_, e_.keep_sums ? results_.columns() : 0, lines);
    const auto caller = std::this_thread::get_id();
    on_threads(threads_, [&](int t) {
      multiply_share(t, shares[t], std::this_thread::get_id() == caller ? e_.between : nullptr);
    });
    results_.sum_up(shares);
    return checksum_of(shares);
  }

  /// A thread's share of the far panels, or of the near ones if those are too few.
  void multiply_share(int t, Share& share, const std::function<void()>* between) {
    Work work = work_;
    work.sums = e_.keep_sums ? share.sums.data() : nullptr;
    if (work.tiles) work.turn = Scratch::mine().turn;
    const auto form = form_of(work, e_.act, e_.slope);
    const int64_t fars = far().panels(), unit = near().together(), nears = near().panels() / unit;
    const bool split_far = fars >= threads_;
    const auto part = [&](int64_t all, bool split, int i) { return split ? all * (t + i) / threads_ : all * i; };
    const int64_t n0 = part(nears, !split_far, 0) * unit, n1 = part(nears, !split_far, 1) * unit;
    const int64_t f0 = part(fars, split_far, 0), f1 = part(fars, split_far, 1);
    const auto blocking = cut(n1 - n0, f1 - f0, near().k, most_far_);
    share.verifier.pace((n1 - n0) * (f1 - f0) * blocking.all_steps);
    for (int64_t f = f0; f < f1; f += blocking.far) {
      FarBlock block(blocking);
      block.add(far(), work, f * kPanel, std::min(blocking.far, f1 - f));
      multiply_block({near(), n0, n1}, block, blocking, form, e_, share.verifier, between);
    }
    share.verifier.finish();
  }

  /// By a packed copy of the weight that later calls find again. False if none is to be kept.
  bool multiply_by_kept() {
    if (!e_.weight || near_is_a_ || !worth_keeping(left_.extent, right_)) return false;
    const auto packing = packing_of(b_, right_);
    const Lines lines(b_);
    auto kept = kept_copy(packing, lines.whole() && repeatable());
    if (!kept.copy) return false;
    right_.packed = kept.copy->data();
    const auto found = multiply(kept.promised ? &lines : nullptr);
    if (!kept.promised) return true;
    const bool same = found == *kept.promised;
    compared(packing, same);
    if (same) return true;
    kept = kept_copy(packing, false);  // the weight had changed: all over again
    right_.packed = kept.copy ? kept.copy->data() : nullptr;
    multiply();
    return true;
  }

  /// Whether what is read is still there once the result was written.
  bool repeatable() const {
    const auto& out = results_.tensors().out;
    return !results_.overwrites(out) && !a_.is_alias_of(out);
  }

  /// A near operand that several far blocks meet is packed whole first; else panel by panel.
  void multiply_by_packed_once() {
    std::shared_ptr<const PackedCopy> once;
    const auto fars = far().panels();
    if (!near().packed && cut(near().panels(), fars, near().k, most_far_).far * threads_ < fars)
      once = packed_once(near());
    if (once) near().packed = once->data();
    multiply();
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
