#include <ATen/ops/empty.h>

#include <mutex>

#include "weft/kernels/cpu/multiply_amx.h"
#include "weft/kernels/cpu/packed.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels::CPU_CAPABILITY {
namespace {

/// A [M, K] or B [K, N] as an operand; copied if neither direction is contiguous.
Operand operand(at::Tensor& t, bool left) {
  const int across = left ? 0 : 1, along = 1 - across;
  if (t.stride(along) != 1 && t.stride(across) != 1) t = t.contiguous();
  const bool along_k = t.stride(along) == 1 && (t.stride(across) != 1 || t.size(across) == 1 || !left);
  Operand out;
  out.data = reinterpret_cast<const Bf16*>(t.const_data_ptr());
  out.k_contiguous = along_k;
  out.ld = along_k ? t.stride(across) : t.stride(along);
  out.extent = t.size(across);
  out.k = t.size(along);
  out.left = left;
  return out;
}

/// The memory of a weight as lines that follow each other; padded if its rows do not end with a line.
struct Lines {
  const char* data;
  int64_t rows, bytes, ld;  // rows that lie `ld` bytes apart

  explicit Lines(const at::Tensor& weight) : data(static_cast<const char*>(weight.const_data_ptr())) {
    const bool by_rows = weight.stride(1) == 1;
    rows = weight.size(by_rows ? 0 : 1);
    bytes = weight.size(by_rows ? 1 : 0) * 2;
    ld = weight.stride(by_rows ? 0 : 1) * 2;
  }
  int64_t per_row() const { return (bytes + 63) / 64; }
  /// One run of whole lines.
  bool whole() const { return ld == bytes && bytes % 64 == 0; }
};

Checksum checksum_of(const Lines& lines) {
  LineSum all;
  std::mutex mutex;
  at::parallel_for(0, lines.rows, 256, [&](int64_t begin, int64_t end) {
    LineSum part(begin * lines.per_row());
    if (lines.whole())
      part.add(lines.data + begin * lines.ld, (end - begin) * lines.bytes);
    else
      for (int64_t i = begin; i < end; ++i) part.add(lines.data + i * lines.ld, lines.bytes);
    const std::lock_guard lock(mutex);
    all.add(part);
  });
  return all.finish();
}

/// How to pack `weight`, which is operand `m`, whole.
Packing packing_of(const at::Tensor& weight, const Operand& m) {
  const int steps = static_cast<int>((m.k + kStep - 1) / kStep);
  return {.source = weight,
          .half = m.half,
          .bytes = m.panels() * steps * 2 * kTile * 2,
          .checksum = [lines = Lines(weight)] { return checksum_of(lines); },
          .pack =
              [m, steps](uint16_t* to) {
                at::parallel_for(0, m.panels(), kStrip, [&](int64_t begin, int64_t end) {
                  pack_panels(m, begin * kPanel, end - begin, 0, steps, to + begin * steps * 2 * kTile);
                });
              }};
}

/// Memory for an operand that is packed whole for one call. The last one is kept, since fresh pages cost as much as
/// packing; a call that finds it taken gets its own.
std::shared_ptr<PackedCopy> borrow(int64_t bytes) {
  constexpr int64_t kMostKept = 64 << 20;
  static std::mutex mutex;
  static std::shared_ptr<PackedCopy> last;
  const std::lock_guard lock(mutex);
  if (last && last.use_count() == 1 && last->bytes() >= bytes) return last;
  auto fresh = std::make_shared<PackedCopy>(bytes);
  if (bytes <= kMostKept && (!last || last.use_count() == 1)) last = fresh;
  return fresh;
}

/// All of `m` in tiles, for this call only.
std::shared_ptr<const PackedCopy> packed_once(const Operand& m) {
  const int steps = static_cast<int>((m.k + kStep - 1) / kStep);
  auto copy = borrow(m.panels() * steps * 2 * kTile * 2);
  at::parallel_for(0, m.panels(), kStrip, [&](int64_t begin, int64_t end) {
    pack_panels(m, begin * kPanel, end - begin, 0, steps, copy->data() + begin * steps * 2 * kTile);
  });
  return copy;
}

Place place(const at::Tensor& t) {
  return t.defined() ? Place{static_cast<char*>(t.data_ptr()), t.stride(0), t.scalar_type()} : Place{};
}

/// Whether stores may go past the caches: whole aligned lines, and more of them than L2 would hold anyway.
bool streams(const at::Tensor& t) {
  const auto address = reinterpret_cast<uintptr_t>(t.data_ptr());
  return t.scalar_type() == at::kBFloat16 && address % 64 == 0 && t.stride(0) % kPanel == 0 && t.nbytes() > (1 << 20);
}

/// A matrix that rows can be stored to; `given` if it can, else fresh.
at::Tensor writable(const at::Tensor& given, int64_t rows, int64_t columns, at::ScalarType dtype) {
  if (given.defined() && given.stride(1) == 1) return given;
  return at::empty({rows, columns}, at::TensorOptions().dtype(dtype));
}

at::Tensor readable(const at::Tensor& t) { return !t.defined() || t.stride(1) == 1 ? t : t.contiguous(); }

/// `t` as float32 with room for reading beyond its end.
std::vector<float> padded(const at::Tensor& t) {
  if (!t.defined()) return {};
  const auto wide = t.to(at::kFloat).contiguous();
  std::vector<float> out(wide.const_data_ptr<float>(), wide.const_data_ptr<float>() + wide.numel());
  out.resize(out.size() + kPanel);
  return out;
}

/// One call: A B with its epilogue.
class Product {
 public:
  Product(at::Tensor a, at::Tensor b, const Epilogue& e)
      : a_(std::move(a)),
        b_(std::move(b)),
        e_(e),
        left_(operand(a_, true)),
        right_(operand(b_, false)),
        // Walk along a transposed A, which is a weight gradient's, so that its squares lie side by side in memory.
        near_is_a_(!left_.k_contiguous),
        threads_(at::in_parallel_region() ? 1 : at::get_num_threads()),
        bias_(padded(e.bias)) {
    allocate();
    describe();
  }

  GemmResult run() {
    if (!multiply_by_kept()) multiply_by_packed_once();
    if (e_.out.defined() && !r_.out.is_same(e_.out)) r_.out = e_.out.copy_(r_.out);
    return std::move(r_);
  }

 private:
  bool gated() const { return e_.act && e_.act->gated(); }
  int64_t columns() const {
    const int64_t n = right_.extent;
    return gated() ? n / 2 : e_.slope && e_.slope->gated() ? 2 * n : n;
  }

  void allocate() {
    const int64_t m = left_.extent, n = right_.extent;
    const auto fresh = e_.dtype == at::ScalarType::Undefined ? at::kBFloat16 : e_.dtype;
    r_.out = writable(e_.out, m, columns(), e_.out.defined() ? e_.out.scalar_type() : fresh);
    if (e_.keep_pre) r_.pre = writable({}, m, n, at::kBFloat16);
    if (e_.keep_again) r_.again = writable({}, m, n, at::kBFloat16);
    if (e_.keep_sums) r_.sums = at::empty({columns()}, at::TensorOptions().dtype(at::kFloat));
    add_ = e_.add.is_same(e_.out) && r_.out.is_same(e_.out) ? r_.out : readable(e_.add);
    at_ = readable(e_.at);
  }

  void describe() {
    const int64_t n = right_.extent;
    if (gated()) right_.half = n / 2;
    work_.rows = left_.extent;
    work_.columns = n;
    work_.half = n / 2;
    work_.reach = gated() ? n / 2 / 16 * kPanel : n;
    work_.scale = static_cast<float>(e_.scale);
    work_.bias = bias_.empty() ? nullptr : bias_.data();
    work_.out = place(r_.out);
    work_.pre = place(r_.pre);
    work_.again = place(r_.again);
    work_.at = place(at_);
    work_.add = place(add_);
    work_.out.stream = streams(r_.out) && !add_.is_same(r_.out);
    if (r_.pre.defined()) work_.pre.stream = streams(r_.pre);
    if (r_.again.defined()) work_.again.stream = streams(r_.again);
    (near_is_a_ ? work_.ahead_columns : work_.ahead_rows) = kPanel;
    if (const auto& act = e_.act ? e_.act : e_.slope) work_.act = ActParams(*act);
    work_.row = row_function(e_.act, e_.slope);
  }

  /// Multiplies; on the way adds up `lines` lines of memory, if any, and returns their checksum.
  Checksum multiply(const char* memory = nullptr, int64_t lines = 0) {
    std::vector<Share> shares(threads_);
    for (int t = 0; t < threads_; ++t) {
      if (e_.keep_sums) shares[t].sums.resize(columns() + kPanel);
      if (memory) shares[t].verifier = Verifier(memory, lines * t / threads_, lines * (t + 1) / threads_);
    }
    multiply_all(left_, right_, work_, e_, near_is_a_, shares);
    if (e_.keep_sums) r_.sums.zero_();
    LineSum found;
    for (auto& share : shares) {
      for (int64_t i = 0; i < columns() && e_.keep_sums; ++i) r_.sums.mutable_data_ptr<float>()[i] += share.sums[i];
      found.add(share.verifier.finish());
    }
    return found.finish();
  }

  /// By a packed copy of the weight that later calls find again. False if none is to be kept.
  bool multiply_by_kept() {
    constexpr int64_t kLeastRows = 256, kLeastValues = 1 << 18;  // below, a copy gains nothing
    if (!e_.weight || near_is_a_ || left_.extent < kLeastRows || right_.extent * right_.k < kLeastValues) return false;
    const auto packing = packing_of(b_, right_);
    const Lines lines(b_);
    auto kept = kept_copy(packing, lines.whole() && repeatable());
    if (!kept.copy) return false;
    right_.packed = kept.copy->data();
    const auto found = multiply(kept.promised ? lines.data : nullptr, lines.rows * lines.per_row());
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
    const auto overwritten = [&](const at::Tensor& t) { return t.defined() && t.is_alias_of(r_.out); };
    return !overwritten(add_) && !overwritten(at_) && !overwritten(a_);
  }

  /// A near operand that several far blocks meet is packed whole first; else panel by panel.
  void multiply_by_packed_once() {
    auto& near = near_is_a_ ? left_ : right_;
    const auto far = (near_is_a_ ? right_ : left_).panels();
    std::shared_ptr<const PackedCopy> once;
    if (cut(near.panels(), far, near.k).far * threads_ < far) once = packed_once(near);
    if (once) near.packed = once->data();
    multiply();
  }

  at::Tensor a_, b_, add_, at_;
  const Epilogue& e_;
  Operand left_, right_;
  bool near_is_a_;
  int threads_;
  std::vector<float> bias_;
  Work work_;
  GemmResult r_;
};

}  // namespace
}  // namespace weft::kernels::CPU_CAPABILITY

namespace weft::kernels::amx {
GemmResult gemm(const at::Tensor& a, const at::Tensor& b, const Epilogue& epilogue) {
  return CPU_CAPABILITY::Product(a, b, epilogue).run();
}
}  // namespace weft::kernels::amx
