#include <thread>

#include "weft/kernels/cpu/gemm_tensors_amx.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels::CPU_CAPABILITY {
namespace {

/// The data of `packed_a`, which the caller packed from `m`; checks its shape.
const Bf16* checked_packed_data(const at::Tensor& packed_a, const Operand& m) {
  const std::array<int64_t, 4> sizes{m.panels(), 2 * k_steps_of(m), 16, kKStep};
  TORCH_CHECK_VALUE(packed_a.sizes() == at::IntArrayRef(sizes) && packed_a.is_contiguous(), "gemm: A has ", m.extent,
                    " rows of ", m.k, " elements, its packed copy has shape ", packed_a.sizes(),
                    ", expected a contiguous tensor of shape ", at::IntArrayRef(sizes), ".");
  return reinterpret_cast<const Bf16*>(packed_a.const_data_ptr());
}

/// One GEMM: A B with its epilogue.
class AmxGemm {
 public:
  AmxGemm(at::Tensor a, at::Tensor b, const Epilogue& e, const at::Tensor& packed_a)
      : a_(std::move(a)),
        b_(std::move(b)),
        e_(e),
        left_(operand(a_, true)),
        right_(operand(b_, false)),
        // Stream a transposed A, as in a weight gradient, so that consecutive blocks are adjacent in the result.
        streamed_is_a_(!left_.k_contiguous && !(e.act && e.act->gated())),
        threads_(thread_count()),
        outputs_(e, left_.extent, right_.extent, /*with_out=*/true),
        args_(outputs_.epilogue_args()) {
    if (packed_a.defined()) left_.packed = checked_packed_data(packed_a, left_);
    if (outputs_.gated()) right_.half = right_.extent / 2;
    if (streamed_is_a_) std::swap(args_.prefetch_columns, args_.prefetch_rows);
    if (!streamed_is_a_) max_resident_panels_ = outputs_.max_resident_panels(args_);
    if (e.keep_packed_transpose && !streamed_is_a_) args_.packed_transpose = outputs_.allocate_packed_transpose();
  }

  GemmResult run() {
    const auto packed = packed_streamed();
    if (packed) streamed().packed = packed->data();
    multiply();
    return outputs_.finish();
  }

 private:
  Operand& streamed() { return streamed_is_a_ ? left_ : right_; }
  const Operand& resident() const { return streamed_is_a_ ? right_ : left_; }

  /// The streamed operand packed: the copy of a frozen weight, or a temporary if several resident blocks use it. Null
  /// if it is packed already, or if the macrokernel packs it panel by panel.
  std::shared_ptr<const PackedCopy> packed_streamed() {
    if (streamed().packed) return nullptr;
    std::shared_ptr<const PackedCopy> cached;
    if (e_.b_is_weight && !streamed_is_a_) cached = packed_if_frozen(b_, right_);
    if (cached) return cached;
    const auto resident_panels = resident().panels();
    const bool several =
        choose_blocking(streamed().panels(), resident_panels, streamed().k, max_resident_panels_).resident * threads_ <
        resident_panels;
    return several ? pack_temporary(streamed()) : nullptr;
  }

  void multiply() {
    auto sums = outputs_.allocate_column_sums(threads_);
    const auto caller = std::this_thread::get_id();
    on_threads(threads_, [&](int t) {
      multiply_slice(t, sums[t].data(), std::this_thread::get_id() == caller ? e_.progress : nullptr);
    });
    outputs_.reduce_column_sums(sums);
  }

  /// Runs thread t's share of the resident panels, or of the streamed panels if there are fewer resident panels than
  /// threads.
  void multiply_slice(int t, float* sums, const std::function<void()>* progress) {
    EpilogueArgs args = args_;
    args.column_sums = e_.keep_column_sums ? sums : nullptr;
    if (args.packed_transpose) args.transpose_scratch = Scratch::current().transpose_scratch;
    const auto variant = select_variant(args, e_.act, e_.act_grad);
    const int64_t resident_panels = resident().panels(), unit = streamed().panels_per_unit(),
                  streamed_units = streamed().panels() / unit;
    const bool split_resident = resident_panels >= threads_;
    const auto units = share_of(streamed_units, t, threads_, !split_resident);
    const auto panels = share_of(resident_panels, t, threads_, split_resident);
    const StreamedPanels streamed_panels{streamed(), units.begin * unit, units.end * unit};
    const auto blocking = choose_blocking(streamed_panels.end - streamed_panels.begin, panels.end - panels.begin,
                                          streamed().k, max_resident_panels_);
    for (int64_t i = panels.begin; i < panels.end; i += blocking.resident) {
      ResidentPanels block(blocking);
      block.append(resident(), args, i * kBlockDim, std::min(blocking.resident, panels.end - i));
      gemm_macrokernel(streamed_panels, block, blocking, variant, e_, progress);
    }
  }

  at::Tensor a_, b_;
  const Epilogue& e_;
  Operand left_, right_;
  bool streamed_is_a_;
  int threads_;
  GemmOutputs outputs_;
  EpilogueArgs args_;
  int64_t max_resident_panels_ = INT64_MAX;
};

}  // namespace
}  // namespace weft::kernels::CPU_CAPABILITY

namespace weft::kernels::amx {
GemmResult gemm(const at::Tensor& a, const at::Tensor& b, const Epilogue& epilogue, const at::Tensor& packed_a) {
  return CPU_CAPABILITY::AmxGemm(a, b, epilogue, packed_a).run();
}
}  // namespace weft::kernels::amx
