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

/// A part of K: the operands of its multiplications.
struct KPart {
  Operand resident, streamed;
};

/// One GEMM: A B with its epilogue. Threads form a grid over the resident panels, the streamed panels and K.
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
        outputs_(a_, e, left_.extent, right_.extent, /*with_out=*/true),
        args_(outputs_.epilogue_args()) {
    if (packed_a.defined()) left_.packed = checked_packed_data(packed_a, left_);
    if (outputs_.gated()) right_.half = right_.extent / 2;
    if (streamed_is_a_) std::swap(args_.prefetch_columns, args_.prefetch_rows);
    if (!streamed_is_a_) max_resident_panels_ = outputs_.max_resident_panels(args_);
    if (e.keep_packed_transpose && !streamed_is_a_) args_.packed_transpose = outputs_.allocate_packed_transpose();
  }

  GemmResult run() {
    std::shared_ptr<const PackedCopy> frozen;
    if (e_.b_is_weight && !streamed_is_a_) frozen = packed_if_frozen(b_, right_);
    if (frozen) right_.packed = frozen->data();
    grid_ = choose_grid(work(), threads_);
    for (int i = 0; i < grid_.k; ++i) parts_.push_back(make_part(share_of(k_steps_of(left_), i, grid_.k)));
    share_operands();
    if (grid_.k > 1) allocate_partial_sums();
    multiply();
    return outputs_.finish();
  }

 private:
  const Operand& streamed() const { return streamed_is_a_ ? left_ : right_; }
  const Operand& resident() const { return streamed_is_a_ ? right_ : left_; }

  GemmWork work() const {
    auto work = dense_gemm_work(left_.extent, right_.extent, left_.k, streamed_is_a_);
    work.streamed_panels = streamed().panels(), work.panels_per_unit = streamed().panels_per_unit();
    work.block_panels = std::min(work.block_panels, max_resident_panels_);
    work.splits_k &= !e_.act && !e_.act_grad && !e_.keep_column_sums && !e_.keep_pre_act;
    return work;
  }
  Blocking blocking(int64_t streamed_panels, int64_t resident_panels, int64_t k) const {
    return choose_blocking(streamed_panels, resident_panels, k, max_resident_panels_);
  }

  /// The operands of some k-steps.
  KPart make_part(const Range& steps) const {
    const auto begin = steps.begin * kKStep, end = std::min(steps.end * kKStep, left_.k);
    return {.resident = resident().k_slice(begin, end), .streamed = streamed().k_slice(begin, end)};
  }

  /// Lets all threads together pack what several threads or several resident blocks need.
  void share_operands() {
    const auto panels = ceil_div(resident().panels(), grid_.resident),
               streamed_panels = streamed().panels() / grid_.streamed;
    const auto b = blocking(streamed_panels, panels, parts_[0].streamed.k);
    const bool shares_resident = grid_.streamed > 1 && !resident().packed && left_.k > 0;
    const bool shares_streamed = (grid_.resident > 1 || b.resident < panels) && !streamed().packed && left_.k > 0;
    const auto share = [&](Operand& m, int64_t needed, int threads) {
      const auto k = blocking(1, 1, m.k);
      m.shared = shared_.add(m, PackingPieces::choose(m, k.k_steps, k.kc_steps, needed, threads));
    };
    for (auto& part : parts_) {
      if (shares_resident) share(part.resident, b.resident, grid_.streamed);
      if (shares_streamed) share(part.streamed, streamed_panels, grid_.resident);
    }
    shared_.allocate();
  }

  void multiply() {
    auto sums = outputs_.allocate_column_sums(grid_.threads());
    const auto caller = std::this_thread::get_id();
    on_threads(grid_.threads(), [&](int t) {
      const auto* const progress = std::this_thread::get_id() == caller ? e_.progress : nullptr;
      const auto cell = grid_.cell(t);
      auto args = grid_.k == 1 ? args_ : partial_args(cell.k);
      args.column_sums = e_.keep_column_sums ? sums[t].data() : nullptr;
      if (args.packed_transpose) args.transpose_scratch = Scratch::current().transpose_scratch;
      multiply_cell(cell, args, progress);
      if (grid_.k > 1 && is_last_part(cell)) add_partial_sums(cell);
    });
    outputs_.reduce_column_sums(sums);
  }

  Range resident_share(const GemmGrid::Cell& cell) const {
    return share_of(resident().panels(), cell.resident, grid_.resident);
  }
  Range streamed_share(const GemmGrid::Cell& cell) const {
    const auto unit = streamed().panels_per_unit();
    const auto units = share_of(streamed().panels() / unit, cell.streamed, grid_.streamed);
    return {units.begin * unit, units.end * unit};
  }

  /// Runs the multiplications of one thread.
  void multiply_cell(const GemmGrid::Cell& cell, const EpilogueArgs& args, const std::function<void()>* progress) {
    const auto& part = parts_[cell.k];
    const auto variant = select_variant(args, e_.act, e_.act_grad);
    const auto panels = resident_share(cell), all = streamed_share(cell);
    const auto b = blocking(all.size(), panels.size(), part.streamed.k);
    for (int64_t i = panels.begin; i < panels.end; i += b.resident) {
      const auto count = std::min(b.resident, panels.end - i);
      ResidentPanels block(b, share_of(count, cell.streamed, grid_.streamed).begin);
      block.append(part.resident, args, i * kBlockDim, count);
      gemm_macrokernel({part.streamed, all.begin, all.end, cell.resident, grid_.resident}, block, b, variant, e_,
                       progress);
    }
  }

  // ---- parts of K ----

  void allocate_partial_sums() {
    partial_sums_ = empty_cpu({grid_.k, left_.extent, right_.extent}, at::kFloat);
    parts_done_ = std::make_unique<std::atomic<int>[]>(static_cast<size_t>(grid_.resident) * grid_.streamed);
  }
  /// The epilogue that stores the sums of a part.
  EpilogueArgs partial_args(int part) const {
    EpilogueArgs w;
    w.rows = left_.extent;
    w.columns = w.full_panel_limit = right_.extent;
    w.out = {reinterpret_cast<char*>(partial_sums_.mutable_data_ptr<float>() + part * left_.extent * right_.extent),
             right_.extent, at::kFloat};
    w.prefetch_rows = args_.prefetch_rows, w.prefetch_columns = args_.prefetch_columns;
    w.row = row_function({}, {});
    return w;
  }
  /// Whether the other parts of the cell's panels are done.
  bool is_last_part(const GemmGrid::Cell& cell) {
    auto& done = parts_done_[cell.resident * grid_.streamed + cell.streamed];
    return done.fetch_add(1, std::memory_order_acq_rel) + 1 == grid_.k;
  }
  /// Adds up the parts in order and runs the epilogue.
  void add_partial_sums(const GemmGrid::Cell& cell) const {
    const auto panels = resident_share(cell), all = streamed_share(cell);
    const auto rows = streamed_is_a_ ? all : panels, columns = streamed_is_a_ ? panels : all;
    auto* const block = Scratch::current().block[0];
    for (auto row = rows.begin; row < rows.end; ++row)
      for (auto column = columns.begin; column < columns.end; ++column)
        add_block(row * kBlockDim, column * kBlockDim, block);
    _mm_sfence();
  }
  void add_block(int64_t row, int64_t column, float* block) const {
    for (int64_t i = 0; i < std::min<int64_t>(kBlockDim, left_.extent - row); ++i) {
      float* const c = block_row(block, i);
      for (const int64_t half : {0, 1}) {
        const auto mask = lane_mask(right_.extent - column - 16 * half);
        const auto* sums = partial_sums_.const_data_ptr<float>() + (row + i) * right_.extent + column + 16 * half;
        auto total = _mm512_setzero_ps();
        for (int part = 0; part < grid_.k; ++part, sums += left_.extent * right_.extent)
          total = _mm512_add_ps(total, _mm512_maskz_loadu_ps(mask, sums));
        _mm512_store_ps(c + half * kRightTile, total);
      }
      args_.row(args_, c, row + i, column);
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
  GemmGrid grid_;
  std::vector<KPart> parts_;
  SharedOperands shared_;
  at::Tensor partial_sums_;                         // [part, row, column]; undefined with one part
  std::unique_ptr<std::atomic<int>[]> parts_done_;  // of each cell
};

}  // namespace
}  // namespace weft::kernels::CPU_CAPABILITY

namespace weft::kernels::amx {
GemmResult gemm(const at::Tensor& a, const at::Tensor& b, const Epilogue& epilogue, const at::Tensor& packed_a) {
  return CPU_CAPABILITY::AmxGemm(a, b, epilogue, packed_a).run();
}
}  // namespace weft::kernels::amx
