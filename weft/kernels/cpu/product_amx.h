#pragma once
#include <ATen/ops/from_blob.h>

#include <array>
#include <memory>
#include <vector>

#include "weft/kernels/cpu/multiply_amx.h"
#include "weft/kernels/cpu/packed.h"
#include "weft/kernels/operand.h"

// What all products of tiles share: tensors as operands and as places for results, and packed copies. Included by
// *_amx.cpp only.

namespace weft::kernels::CPU_CAPABILITY {

/// A [M, K] or B [K, N] as an operand; copied if neither direction is contiguous.
inline Operand operand(at::Tensor& t, bool left) {
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

inline int steps_of(const Operand& m) { return static_cast<int>((m.k + kStep - 1) / kStep); }

/// Packs all of `m`, on all threads.
inline void pack_whole(const Operand& m, Bf16* to) {
  const int steps = steps_of(m);
  at::parallel_for(0, m.panels(), kStrip, [&](int64_t begin, int64_t end) {
    pack_panels(m, begin * kPanel, end - begin, 0, steps, to + begin * steps * 2 * kTile);
  });
}
inline int64_t packed_size(const Operand& m) { return m.panels() * steps_of(m) * 2 * kTile * 2; }

/// The packed copy of `weight`, which is operand `m`, if it is frozen; else null.
inline std::shared_ptr<const PackedCopy> packed_if_frozen(const at::Tensor& weight, const Operand& m) {
  return frozen_copy(
      {.source = weight, .half = m.half, .bytes = packed_size(m), .pack = [&m](uint16_t* to) { pack_whole(m, to); }});
}

/// Tiles of a matrix with `panels` panels, `steps` steps long.
inline at::Tensor borrow_tiles(int64_t panels, int64_t steps) {
  auto copy = borrow(panels * steps * 2 * kTile * 2);
  return at::from_blob(copy->data(), {panels, 2 * steps, 16, kStep}, [copy](void*) {}, at::kBFloat16);
}

/// All of `m` in tiles, for this call only.
inline std::shared_ptr<const PackedCopy> packed_once(const Operand& m) {
  auto copy = borrow(packed_size(m));
  pack_whole(m, copy->data());
  return copy;
}

/// A matrix, or squares of 32 x 32 as a tensor of four dimensions.
inline Place place(const at::Tensor& t) {
  if (!t.defined()) return {};
  Place p{static_cast<char*>(t.data_ptr()), t.stride(0), t.scalar_type()};
  if (t.dim() == 2) return p;
  p.ld = kPanel;
  p.squares = t.size(1);  // [columns of squares, rows of squares, 32, 32]
  return p;
}

/// Whether stores to `t` may go past the caches: whole aligned lines, of a result of so many bytes that half of L2
/// would not hold it.
inline bool streams(const at::Tensor& t, int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(t.data_ptr());
  return t.scalar_type() == at::kBFloat16 && address % 64 == 0 && t.stride(0) % kPanel == 0 && bytes >= (1 << 20);
}

/// A matrix that rows can be stored to; `given` if it can, else fresh.
inline at::Tensor writable(const at::Tensor& given, int64_t rows, int64_t columns, at::ScalarType dtype) {
  if (given.defined() && given.stride(1) == 1) return given;
  return fresh({rows, columns}, dtype);
}

inline at::Tensor readable(const at::Tensor& t) { return !t.defined() || t.stride(1) == 1 ? t : t.contiguous(); }

/// `t` as float32 with room for reading beyond its end.
inline std::vector<float> padded(const at::Tensor& t) {
  if (!t.defined()) return {};
  const auto line = t.stride(0) == 1 ? t : t.contiguous();
  const auto count = t.numel();
  std::vector<float> out(count + kPanel);
  const Place from{static_cast<char*>(line.data_ptr()), 0, t.scalar_type()};
  for (int64_t i = 0; i < count; i += 16) {
    const auto mask = first(count - i);
    _mm512_mask_storeu_ps(out.data() + i, mask, load16(from, 0, i, mask));
  }
  return out;
}

using ColumnSums = std::vector<float>;

/// The results of a product with N columns, and what its epilogue reads, in memory that rows can be read from.
class Results {
 public:
  Results(const Epilogue& e, int64_t rows, int64_t n, bool with_out)
      : e_(e), rows_(rows), n_(n), bias_(padded(e.bias)), at_(readable(e.at)) {
    const auto dtype = e.dtype == at::ScalarType::Undefined ? at::kBFloat16 : e.dtype;
    if (with_out) r_.out = writable(e.out, rows, columns(), e.out.defined() ? e.out.scalar_type() : dtype);
    if (e.keep_pre) r_.pre = writable({}, rows, n, at::kBFloat16);
    if (e.keep_again) r_.again = writable({}, rows, n, at::kBFloat16);
    if (e.keep_sums) r_.sums = fresh({columns()}, at::kFloat);
    add_ = e.add.is_same(e.out) && r_.out.is_same(e.out) ? r_.out : readable(e.add);
  }

  bool gated() const { return e_.act && e_.act->gated(); }
  /// Of the result.
  int64_t columns() const { return gated() ? n_ / 2 : e_.slope && e_.slope->gated() ? 2 * n_ : n_; }

  /// How `t`, all or part of a bfloat16 result of so many bytes, is stored. The second half of a gated one has to begin
  /// with a line, too.
  Store store_of(const at::Tensor& t, int64_t bytes) const {
    const bool slope = e_.slope && e_.slope->gated();
    const bool lines = (!gated() || n_ / 2 % kPanel == 0) && (!slope || n_ % kPanel == 0);
    return lines && streams(t, bytes) ? Store::stream : Store::keep;
  }

  /// The epilogue of all rows.
  Work work() const {
    Work w;
    w.rows = rows_;
    w.columns = n_;
    w.half = n_ / 2;
    w.reach = gated() ? n_ / 2 : n_;
    w.scale = static_cast<float>(e_.scale);
    w.bias = bias_.empty() ? nullptr : bias_.data();
    w.out = place(r_.out);
    w.pre = place(r_.pre);
    w.again = place(r_.again);
    w.at = place(at_);
    if (add_.defined()) w.add[w.adds++] = place(add_);
    const auto bytes = rows_ * columns() * 2;  // of `out`: the others are stored as it is, if they are aligned
    if (r_.out.defined() && !add_.is_same(r_.out)) w.out.store = store_of(r_.out, bytes);
    if (r_.pre.defined()) w.pre.store = store_of(r_.pre, bytes);
    if (r_.again.defined()) w.again.store = store_of(r_.again, bytes);
    w.ahead_rows = kPanel;
    if (const auto& act = e_.act ? e_.act : e_.slope) w.act = ActParams(*act);
    w.row = row_function(e_.act, e_.slope);
    return w;
  }

  /// Far panels in a block: so many that the pages of all matrices a square touches are still in the address cache when
  /// the next columns of the same rows come. Rows of a wide matrix lie on a page each, and a store that has to look its
  /// page up waits.
  int64_t most_far(const Work& w) const {
    constexpr int64_t kPage = 4096, kReach = 1152 * kPage;
    const bool slope = e_.slope && e_.slope->gated();
    const auto bytes = [](const Place& p, bool halves) {
      return p.data ? std::min(p.ld * p.bytes(), halves ? 2 * kPage : kPage) : 0;
    };
    int64_t all = bytes(w.out, slope) + bytes(w.at, slope) + bytes(w.pre, gated()) + bytes(w.again, false);
    for (int i = 0; i < w.adds; ++i)
      if (w.add[i].data != w.out.data) all += bytes(w.add[i], false);
    return std::min(kReach / std::max<int64_t>(all, 1) / kPanel, gated() ? kMostPairs : INT64_MAX);
  }

  /// Memory for the transpose in tiles, if every square of the result is whole and finished under the products.
  Bf16* add_tiles() {
    const bool whole = rows_ % kPanel == 0 && n_ % kPanel == 0;
    if (!whole || !e_.slope || !is_frequent(e_.slope->kind)) return nullptr;
    if (form_of(work(), {}, e_.slope).rows != Form::activation) return nullptr;
    r_.tiles = borrow_tiles(columns() / kPanel, rows_ / kPanel);
    return reinterpret_cast<Bf16*>(r_.tiles.data_ptr());
  }

  /// Room for column sums, one for each thread.
  std::vector<ColumnSums> column_sums(int threads) const {
    return std::vector<ColumnSums>(threads, ColumnSums(e_.keep_sums ? columns() + kPanel : 0));
  }
  /// Adds up the column sums of all threads.
  void sum_up(const std::vector<ColumnSums>& parts) {
    if (!e_.keep_sums) return;
    auto* sums = r_.sums.mutable_data_ptr<float>();
    std::fill_n(sums, columns(), 0.F);
    for (const auto& part : parts)
      for (int64_t i = 0; i < columns(); ++i) sums[i] += part[i];
  }

  GemmResult finish() {
    if (r_.out.defined() && e_.out.defined() && !r_.out.is_same(e_.out)) r_.out = e_.out.copy_(r_.out);
    return std::move(r_);
  }

 private:
  const Epilogue& e_;
  int64_t rows_, n_;
  std::vector<float> bias_;
  at::Tensor at_, add_;
  GemmResult r_;
};

}  // namespace weft::kernels::CPU_CAPABILITY
