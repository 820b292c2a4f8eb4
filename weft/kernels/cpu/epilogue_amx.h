#pragma once
#include "weft/kernels/cpu/epilogue_fast_amx.h"

// Selects the epilogue of a GEMM and runs it, a block behind the tile multiplications.

namespace weft::kernels::CPU_CAPABILITY {

/// Any epilogue. Nothing runs inside the loop; `DeferredEpilogue::start` finishes each block at once.
class GenericRows {
 public:
  GenericRows(const EpilogueArgs&, int64_t, int64_t) {}
  void row(const float*) {}
  void end(const EpilogueArgs&, int64_t, int64_t) {}
};

/// The epilogue of a block. It is deferred into the loop of the next block if the block is full and has a fast path.
template <class RowKernel>
class DeferredEpilogue {
 public:
  static constexpr bool kHasFastPath = !std::is_same_v<RowKernel, GenericRows>;

  DeferredEpilogue(const EpilogueArgs& w, const float* block, int64_t row, int64_t column)
      : kernel_(w, row, column), c_(block), row_(row), column_(column) {}

  /// Finishes one row, if any is left.
  [[gnu::always_inline]] void step() {
    if (rows_left_ == 0) return;
    kernel_.row(c_);
    c_ += 16;
    if (--rows_left_ == 16) c_ += 256;
  }
  void finish(const EpilogueArgs& w) {
    while (rows_left_ > 0) step();
    if (full_block_) kernel_.end(w, row_, column_);
  }
  /// Defers a full block with a fast path; finishes any other block at once.
  void start(const EpilogueArgs& w) {
    const int64_t rows = std::min<int64_t>(kBlockDim, w.rows - row_);
    const bool unmasked = kHasFastPath && column_ + kBlockDim <= w.full_panel_limit;
    full_block_ = unmasked && rows == kBlockDim;
    if (full_block_) {
      rows_left_ = kBlockDim;
      return;
    }
    if (unmasked) {
      for (int64_t i = 0; i < rows; ++i) kernel_.row(block_row(c_, i));
      return kernel_.end(w, row_, column_);
    }
    for (int64_t i = 0; i < rows; ++i) w.row(w, block_row(c_, i), row_ + i, column_);
  }

 private:
  RowKernel kernel_;
  const float* c_;
  int64_t row_, column_;
  int rows_left_ = 0;
  bool full_block_ = false;
};

/// Selects the row kernel of an epilogue. Row chunks of the same variant can share a block.
struct KernelVariant {
  enum Kind { generic, wgrad, value, activation } kind = generic;
  int num_addends = 0;
  bool blocked_addends = false;
  Store store = Store::cached;
  bool operator==(const KernelVariant&) const = default;
};

inline KernelVariant select_variant(const EpilogueArgs& w, const std::optional<Act>& act,
                                    const std::optional<Act>& act_grad) {
  const bool plain = !act && !act_grad && !w.pre_act.data && !w.column_sums;
  if (plain && w.out.dtype == at::kFloat && !w.bias &&
      (w.num_addends == 0 || (w.num_addends == 1 && w.addends[0].data == w.out.data)))
    return {.kind = KernelVariant::wgrad, .num_addends = w.num_addends};
  const bool gated = (act && act->gated()) || (act_grad && act_grad->gated());
  bool unmasked = w.scale == 1 || !(gated || act_grad);
  const auto check_view = [&](const MatrixView& p) {
    if (p.data) unmasked = unmasked && p.dtype == at::kBFloat16 && (gated || p.ld == w.out.ld);
  };
  for (const auto* p : {&w.out, &w.pre_act, &w.act_output, &w.act_input}) check_view(*p);
  const bool blocked_addends = w.num_addends > 0 && w.addends[0].blocks_per_column > 0;
  for (int i = 0; i < w.num_addends; ++i)
    unmasked = unmasked && w.addends[i].dtype == at::kBFloat16 && w.addends[i].ld == w.addends[0].ld &&
               (w.addends[i].blocks_per_column > 0) == blocked_addends;
  if (!unmasked) return {};
  if (plain)
    return {.kind = KernelVariant::value,
            .num_addends = w.num_addends,
            .blocked_addends = blocked_addends,
            .store = w.out.store};
  if ((!act && !act_grad) || w.num_addends > 0 || (act_grad && w.bias) || (act && w.column_sums)) return {};
  // One store kind serves all outputs of a row, so non-temporal stores need every output to allow them.
  const auto non_temporal = [](const MatrixView& p) { return !p.data || p.store == Store::non_temporal; };
  const bool all = non_temporal(w.out) && non_temporal(w.pre_act) && non_temporal(w.act_output);
  return {.kind = KernelVariant::activation, .store = all ? Store::non_temporal : Store::cached};
}

/// Activations with an unmasked fast path; the others use GenericRows.
constexpr bool has_fast_path(ActKind kind) {
  return kind == ActKind::gelu || kind == ActKind::silu || kind == ActKind::relu || kind == ActKind::srelu ||
         kind == ActKind::swiglu || kind == ActKind::geglu;
}

/// Calls run<RowKernel>() with the row kernel of an activation, or of its gradient if `act_grad`.
template <class Fn>
void with_activation(const KernelVariant& variant, const EpilogueArgs& w, const std::optional<Act>& act, bool act_grad,
                     Fn&& run) {
  const auto value = [&]<ActKind kKind, Store kStore>() {
    constexpr int k = static_cast<int>(kKind);
    if (act_grad)
      return w.act_output.data ? run.template operator()<ActGradRows<kKind, true, kStore>>()
                               : run.template operator()<ActGradRows<kKind, false, kStore>>();
    w.pre_act.data ? run.template operator()<ValueRows<k, true, 0, kStore>>()
                   : run.template operator()<ValueRows<k, false, 0, kStore>>();
  };
  const auto gated = [&]<ActKind kKind, Store kStore>() {
    act_grad ? run.template operator()<GatedActGradRows<kKind, kStore>>()
             : run.template operator()<GatedRows<kKind, kStore>>();
  };
  const auto any = [&]<ActKind kKind, Store kStore>() {
    if constexpr (is_gated(kKind))
      gated.template operator()<kKind, kStore>();
    else
      value.template operator()<kKind, kStore>();
  };
  if (!has_fast_path(act->kind)) return run.template operator()<GenericRows>();
  with_kind(act->kind, [&](auto kind) {
    if constexpr (has_fast_path(kind))
      variant.store == Store::non_temporal ? any.template operator()<kind, Store::non_temporal>()
                                           : any.template operator()<kind, Store::cached>();
  });
}

/// Calls run<RowKernel>() with the row kernel of a variant. `kFewVariants` falls back to GenericRows for activations
/// and for more than one addend, to instantiate less code.
template <bool kFewVariants, class Fn>
void with_row_kernel(const KernelVariant& variant, const EpilogueArgs& w, const std::optional<Act>& act,
                     const std::optional<Act>& act_grad, Fn&& run) {
  const auto with_layout = [&]<int kNumAddends, bool kBlockedAddends>() {
    variant.store == Store::non_temporal
        ? run.template operator()<ValueRows<-1, false, kNumAddends, Store::non_temporal, kBlockedAddends>>()
        : run.template operator()<ValueRows<-1, false, kNumAddends, Store::cached, kBlockedAddends>>();
  };
  const auto value = [&]<int kNumAddends>() {
    if constexpr (!kFewVariants && kNumAddends > 0)
      if (variant.blocked_addends) return with_layout.template operator()<kNumAddends, true>();
    with_layout.template operator()<kNumAddends, false>();
  };
  if (variant.kind == KernelVariant::wgrad)
    return variant.num_addends ? run.template operator()<WgradRows<true>>()
                               : run.template operator()<WgradRows<false>>();
  if (variant.kind == KernelVariant::value && variant.num_addends == 0) return value.template operator()<0>();
  if (variant.kind == KernelVariant::value && variant.num_addends == 1) return value.template operator()<1>();
  if constexpr (!kFewVariants) {
    if (variant.kind == KernelVariant::value && variant.num_addends == 2) return value.template operator()<2>();
    if (variant.kind == KernelVariant::value && variant.num_addends == 3) return value.template operator()<3>();
    if (variant.kind == KernelVariant::activation)
      return with_activation(variant, w, act ? act : act_grad, act_grad.has_value(), run);
  }
  run.template operator()<GenericRows>();
}

}  // namespace weft::kernels::CPU_CAPABILITY
