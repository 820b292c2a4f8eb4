#pragma once
#include <ATen/ops/from_blob.h>

#include <array>
#include <memory>
#include <vector>

#include "weft/kernels/cpu/macrokernel_amx.h"
#include "weft/kernels/cpu/packed_weight_cache.h"
#include "weft/kernels/cpu_tensors.h"

// Shared by the AMX GEMMs: tensors as operands and outputs, and packed copies. Included by *_amx.cpp only.

namespace weft::kernels::CPU_CAPABILITY {

/// A [M, K] or B [K, N] as an operand. Replaces `t` by a contiguous copy if neither dimension is contiguous.
inline Operand operand(at::Tensor& t, bool left) {
  const int k_dim = left ? 1 : 0, other_dim = 1 - k_dim;
  if (t.stride(k_dim) != 1 && t.stride(other_dim) != 1) t = t.contiguous();
  Operand out;
  out.data = reinterpret_cast<const Bf16*>(t.const_data_ptr());
  out.k_contiguous = t.stride(k_dim) == 1 && (t.stride(other_dim) != 1 || t.size(other_dim) == 1 || !left);
  out.ld = t.stride(out.k_contiguous ? other_dim : k_dim);
  out.extent = t.size(other_dim);
  out.k = t.size(k_dim);
  out.left = left;
  return out;
}

inline int k_steps_of(const Operand& m) { return static_cast<int>(ceil_div(m.k, kKStep)); }

/// Packs all of `m`, in parallel.
inline void pack_operand(const Operand& m, Bf16* to) {
  const int steps = k_steps_of(m);
  at::parallel_for(0, m.panels(), kStripPanels, [&](int64_t begin, int64_t end) {
    pack_panels(m, begin * kBlockDim, end - begin, 0, steps, to + begin * steps * 2 * kTileElems);
  });
}
inline int64_t packed_size(const Operand& m) { return m.panels() * k_steps_of(m) * 2 * kTileElems * 2; }

/// The packed copy of `weight`, which is operand `m`; null if it is not frozen or its copy exceeds the limit.
inline std::shared_ptr<const PackedCopy> packed_if_frozen(const at::Tensor& weight, const Operand& m) {
  return packed_frozen_weight(
      {.source = weight, .half = m.half, .bytes = packed_size(m), .pack = [&m](uint16_t* to) { pack_operand(m, to); }});
}

/// An uninitialized tensor for a packed matrix of `panels` panels and `steps` k-steps.
inline at::Tensor acquire_packed_tensor(int64_t panels, int64_t steps) {
  auto copy = acquire_buffer(panels * steps * 2 * kTileElems * 2);
  return at::from_blob(copy->data(), {panels, 2 * steps, 16, kKStep}, [copy](void*) {}, at::kBFloat16);
}

/// A view of a matrix, or of a 4-D tensor in the blocked layout.
inline MatrixView view_of(const at::Tensor& t) {
  if (!t.defined()) return {};
  MatrixView view{static_cast<char*>(t.data_ptr()), t.stride(0), t.scalar_type()};
  if (t.dim() == 2) return view;
  view.ld = kBlockDim;
  view.blocks_per_column = t.size(1);  // [block columns, block rows, 32, 32]
  return view;
}

/// Whether to use non-temporal stores for `t`, part of a result of `bytes` bytes: full aligned cache lines, and a
/// result larger than half of L2.
inline bool allows_non_temporal(const at::Tensor& t, int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(t.data_ptr());
  return t.scalar_type() == at::kBFloat16 && address % 64 == 0 && t.stride(0) % kBlockDim == 0 && bytes >= (1 << 20);
}

/// `given` if its rows are contiguous, otherwise a new tensor on the device of `like`.
inline at::Tensor writable(const at::Tensor& given, const at::Tensor& like, int64_t rows, int64_t columns,
                           at::ScalarType dtype) {
  if (given.defined() && given.stride(1) == 1) return given;
  return new_empty(like, {rows, columns}, dtype);
}

inline at::Tensor readable(const at::Tensor& t) { return !t.defined() || t.stride(1) == 1 ? t : t.contiguous(); }

/// Loads the first row of `from`, `count` elements, as float32.
inline void load_row(const MatrixView& from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += 16) {
    const auto mask = lane_mask(count - i);
    _mm512_mask_storeu_ps(to + i, mask, load16(from, 0, i, mask));
  }
}

/// `t` as float32, padded so that full vectors can be read at its end.
inline std::vector<float> padded(const at::Tensor& t) {
  if (!t.defined()) return {};
  const auto dense = t.stride(0) == 1 ? t : t.contiguous();
  std::vector<float> out(t.numel() + kBlockDim);
  load_row({static_cast<char*>(dense.data_ptr()), 0, t.scalar_type()}, t.numel(), out.data());
  return out;
}

using ColumnSums = std::vector<float>;

/// The outputs of a GEMM with N columns, on the device of `like`, and the inputs of its epilogue, all with contiguous
/// rows.
class GemmOutputs {
 public:
  GemmOutputs(const at::Tensor& like, const Epilogue& e, int64_t rows, int64_t n, bool with_out)
      : e_(e), rows_(rows), n_(n), bias_(padded(e.bias)), act_input_(readable(e.act_input)) {
    if (with_out) r_.out = writable(e.out, like, rows, columns(), e.result_dtype(at::kBFloat16));
    if (e.keep_pre_act) r_.pre_act = writable({}, like, rows, n, at::kBFloat16);
    if (e.keep_act_output) r_.act_output = writable({}, like, rows, n, at::kBFloat16);
    if (e.keep_column_sums) r_.column_sums = new_empty(like, {columns()}, at::kFloat);
    addend_ = e.addend.is_same(e.out) && r_.out.is_same(e.out) ? r_.out : readable(e.addend);
  }

  bool gated() const { return e_.act && e_.act->gated(); }
  /// Columns of the result.
  int64_t columns() const { return gated() ? n_ / 2 : e_.act_grad && e_.act_grad->gated() ? 2 * n_ : n_; }

  /// How to store `t`, part of a result of `bytes` bytes. The second half of a gated result must start on a cache line,
  /// too, to allow non-temporal stores.
  Store store_kind(const at::Tensor& t, int64_t bytes) const {
    const bool gated_grad = e_.act_grad && e_.act_grad->gated();
    const bool line_aligned = (!gated() || n_ / 2 % kBlockDim == 0) && (!gated_grad || n_ % kBlockDim == 0);
    return line_aligned && allows_non_temporal(t, bytes) ? Store::non_temporal : Store::cached;
  }

  /// The epilogue of all rows.
  EpilogueArgs epilogue_args() const {
    EpilogueArgs w;
    w.rows = rows_;
    w.columns = n_;
    w.half = n_ / 2;
    w.full_panel_limit = gated() ? n_ / 2 : n_;
    w.scale = static_cast<float>(e_.scale);
    w.bias = bias_.empty() ? nullptr : bias_.data();
    w.out = view_of(r_.out);
    w.pre_act = view_of(r_.pre_act);
    w.act_output = view_of(r_.act_output);
    w.act_input = view_of(act_input_);
    if (addend_.defined()) w.addends[w.num_addends++] = view_of(addend_);
    const auto bytes = rows_ * columns() * 2;  // of `out`; decides for all outputs
    if (r_.out.defined() && !addend_.is_same(r_.out)) w.out.store = store_kind(r_.out, bytes);
    if (r_.pre_act.defined()) w.pre_act.store = store_kind(r_.pre_act, bytes);
    if (r_.act_output.defined()) w.act_output.store = store_kind(r_.act_output, bytes);
    w.prefetch_rows = kBlockDim;
    if (const auto& act = e_.act ? e_.act : e_.act_grad) w.act = ActParams(*act);
    w.row = row_function(e_.act, e_.act_grad);
    return w;
  }

  /// Maximum number of resident panels in a block: the pages of all matrices that its epilogue touches must stay in the
  /// TLB until the next columns of the same rows. Each row of a wide matrix lies on its own page, and a store that
  /// misses the TLB stalls.
  int64_t max_resident_panels(const EpilogueArgs& w) const {
    constexpr int64_t kPage = 4096, kTlbReach = 1152 * kPage;
    const bool gated_grad = e_.act_grad && e_.act_grad->gated();
    const auto bytes = [](const MatrixView& view, bool two_halves) {
      return view.data ? std::min(view.ld * view.element_size(), two_halves ? 2 * kPage : kPage) : 0;
    };
    int64_t row_bytes = bytes(w.out, gated_grad) + bytes(w.act_input, gated_grad) + bytes(w.pre_act, gated()) +
                        bytes(w.act_output, false);
    for (int i = 0; i < w.num_addends; ++i)
      if (w.addends[i].data != w.out.data) row_bytes += bytes(w.addends[i], false);
    return std::min(kTlbReach / std::max<int64_t>(row_bytes, 1) / kBlockDim, gated() ? kMaxGatedPairs : INT64_MAX);
  }

  /// Allocates the packed transpose if every block of the result is full and takes the unmasked fast path; else null.
  Bf16* allocate_packed_transpose() {
    const bool full_blocks = rows_ % kBlockDim == 0 && n_ % kBlockDim == 0;
    if (!full_blocks || !e_.act_grad || !has_fast_path(e_.act_grad->kind)) return nullptr;
    if (select_variant(epilogue_args(), {}, e_.act_grad).kind != KernelVariant::activation) return nullptr;
    r_.packed_transpose = acquire_packed_tensor(columns() / kBlockDim, rows_ / kBlockDim);
    return reinterpret_cast<Bf16*>(r_.packed_transpose.data_ptr());
  }

  /// Column sums of each thread.
  std::vector<ColumnSums> allocate_column_sums(int threads) const {
    return std::vector<ColumnSums>(threads, ColumnSums(e_.keep_column_sums ? columns() + kBlockDim : 0));
  }
  /// Adds up the column sums of all threads.
  void reduce_column_sums(const std::vector<ColumnSums>& parts) {
    if (!e_.keep_column_sums) return;
    auto* sums = r_.column_sums.mutable_data_ptr<float>();
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
  at::Tensor act_input_, addend_;
  GemmResult r_;
};

}  // namespace weft::kernels::CPU_CAPABILITY
