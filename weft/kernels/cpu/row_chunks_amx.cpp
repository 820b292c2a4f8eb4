#include <numeric>
#include <thread>

#include "weft/kernels/cpu/gemm_tensors_amx.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels::CPU_CAPABILITY {
namespace {

/// A non-empty row chunk.
struct ActiveChunk {
  int index;  // in RowChunks::list
  Operand rows;
  Bf16* pack_dst;  // second pack destination; null: none, or already written
  int64_t ready;   // rows known to be ready
};

/// Panels of one chunk within a block.
struct ChunkRange {
  size_t chunk;
  int64_t first, panels;  // first row in the chunk; number of panels
};

/// One GEMM with A in row chunks. B is streamed; rows of A form the resident blocks.
class ChunkedGemm {
 public:
  ChunkedGemm(const RowChunks& input, at::Tensor b, const Epilogue& e)
      : input_(input),
        b_(std::move(b)),
        e_(e),
        right_(operand(b_, false)),
        threads_(thread_count()),
        outputs_(b_, e, input.rows, right_.extent, needs_out(input)),
        column_sums_(outputs_.allocate_column_sums(threads_)),
        args_(threads_) {
    if (outputs_.gated()) right_.half = right_.extent / 2;
    for (int t = 0; t < threads_; ++t)
      for (const auto& chunk : input.list) {
        args_[t].push_back(args_of(chunk));
        args_[t].back().column_sums = e.keep_column_sums ? column_sums_[t].data() : nullptr;
      }
    for (size_t i = 0; i < input.list.size(); ++i) {
      const auto rows = row_count(input.list[i]);
      if (rows == 0) continue;
      const auto& pack_dst = input.list[i].pack_dst;
      chunks_.push_back({.index = static_cast<int>(i),
                         .rows = rows_of(input.list[i], right_.k),
                         .pack_dst = pack_dst.defined() ? reinterpret_cast<Bf16*>(pack_dst.data_ptr()) : nullptr,
                         .ready = input.ready ? 0 : rows});
      panels_ += chunks_.back().rows.panels();
    }
    blocking_ =
        choose_blocking(right_.panels(), panels_, right_.k, outputs_.max_resident_panels(outputs_.epilogue_args()));
    max_block_panels_ = blocking_.resident * threads_;
    if (input.max_block_rows > 0) max_block_panels_ = std::min(max_block_panels_, panels_of(input.max_block_rows));
    if (panels_ > 0) max_block_panels_ = balanced_block_size(panels_, max_block_panels_);
  }

  GemmResult run() {
    single_block_ = fits_one_block();
    const auto frozen = e_.b_is_weight ? packed_if_frozen(b_, right_) : nullptr;
    if (frozen) right_.packed = frozen->data();
    SharedOperands shared;
    const bool once = single_block_ && (threads_ == 1 || splits_columns(panels_));  // each panel of B is read once
    if (!frozen && right_.k > 0 && !once)
      right_.shared = shared.add(
          right_, PackingPieces::choose(right_, blocking_.k_steps, blocking_.kc_steps, right_.panels(), threads_));
    shared.allocate();
    if (right_.shared && !single_block_) right_.shared->pack_all_free();  // while the first rows arrive
    if (threads_ > 1 || (!blocking_.full_k && single_block_)) pack_first();
    multiply();
    outputs_.reduce_column_sums(column_sums_);
    return outputs_.finish();
  }

 private:
  static bool needs_out(const RowChunks& input) {
    return std::any_of(input.list.begin(), input.list.end(), [](const RowChunk& p) { return !p.out.defined(); });
  }
  static Operand rows_of(const RowChunk& chunk, int64_t k) {
    Operand m;
    (is_packed(chunk) ? m.packed : m.data) = reinterpret_cast<const Bf16*>(chunk.a.const_data_ptr());
    m.ld = chunk.a.stride(0);
    m.extent = row_count(chunk);
    m.k = k;
    return m;
  }

  /// The epilogue of a chunk. Row 0 is the first row of the chunk.
  EpilogueArgs args_of(const RowChunk& chunk) const {
    EpilogueArgs w = outputs_.epilogue_args();
    w.rows = row_count(chunk);
    const auto move = [&](MatrixView& view) {
      if (view.data) view.data = view.at(chunk.row, 0);
    };
    for (auto* view : {&w.out, &w.pre_act, &w.act_output, &w.act_input}) move(*view);
    for (int i = 0; i < w.num_addends; ++i) move(w.addends[i]);
    if (chunk.out.defined()) {
      w.out = view_of(chunk.out);
      w.out.store = outputs_.store_kind(chunk.out, input_.rows * outputs_.columns() * 2);
    }
    for (const auto& t : chunk.addends) w.addends[w.num_addends++] = view_of(t);
    for (int i = 0; i < w.num_addends; ++i)
      if (w.addends[i].data == w.out.data) w.out.store = Store::cached;
    return w;
  }
  KernelVariant variant(const ChunkRange& range) const { return variant(chunks_[range.chunk]); }
  KernelVariant variant(const ActiveChunk& chunk) const {
    return select_variant(args_[0][chunk.index], e_.act, e_.act_grad);
  }

  /// Whether all rows are multiplied in one block.
  bool fits_one_block() const {
    const auto same = [&](const ActiveChunk& p) { return variant(p) == variant(chunks_[0]); };
    return panels_ <= max_block_panels_ && (!input_.ready || input_.min_block_rows >= input_.rows) &&
           std::all_of(chunks_.begin(), chunks_.end(), same);
  }

  void multiply() {
    while (next_chunk_ < chunks_.size()) {
      ResidentPanels resident(blocking_);
      const auto ranges = next_block(resident);
      const int64_t panels = std::transform_reduce(ranges.begin(), ranges.end(), int64_t{0}, std::plus<>(),
                                                   [](const ChunkRange& r) { return r.panels; });
      multiply_ranges(ranges, panels, resident);
      for (const auto& range : ranges) report_packed(range);
      if (input_.on_done)
        for (const auto& range : ranges) input_.on_done(chunks_[range.chunk].index, end_of(range));
    }
  }

  /// The next block: as many rows as fit and are ready, all of the same kernel variant. With one thread, packs them
  /// into `resident` as they become ready.
  std::vector<ChunkRange> next_block(ResidentPanels& resident) {
    std::vector<ChunkRange> ranges;
    int64_t panels = 0;
    while (next_chunk_ < chunks_.size() && panels < max_block_panels_) {
      auto& chunk = chunks_[next_chunk_];
      if (!ranges.empty() && (variant(chunk) != variant(ranges[0]) || chunks_[ranges[0].chunk].pack_dst)) break;
      const auto ready = ready_panels(chunk, /*wait=*/panels * kBlockDim < input_.min_block_rows);
      if (ready == 0) break;
      const ChunkRange range{next_chunk_, next_row_, std::min(ready, max_block_panels_ - panels)};
      ranges.push_back(range);
      if (threads_ == 1) {
        auto rows = chunk.rows;
        rows.second_dst = chunk.pack_dst;
        resident.append(rows, args_[0][chunk.index], range.first, range.panels);
        if (blocking_.full_k) report_packed(range);
      }
      panels += range.panels;
      next_row_ += range.panels * kBlockDim;
      if (next_row_ < chunk.rows.extent) continue;
      ++next_chunk_;
      next_row_ = 0;
    }
    return ranges;
  }

  int64_t end_of(const ChunkRange& range) const {
    return std::min(chunks_[range.chunk].rows.extent, range.first + range.panels * kBlockDim);
  }
  /// Fills every `pack_dst` before the GEMM starts: with several threads, or if the GEMM would fill it too late.
  void pack_first() {
    for (size_t i = 0; i < chunks_.size(); ++i) {
      const auto& rows = chunks_[i].rows;
      if (chunks_[i].pack_dst) pack_operand(rows, chunks_[i].pack_dst);
      report_packed({i, 0, rows.panels()});
    }
  }
  /// Reports that the rows of `range` are in `pack_dst`.
  void report_packed(const ChunkRange& range) {
    auto& chunk = chunks_[range.chunk];
    if (!chunk.pack_dst) return;
    _mm_sfence();
    if (input_.on_packed) input_.on_packed(chunk.index, end_of(range));
    if (end_of(range) == chunk.rows.extent) chunk.pack_dst = nullptr;  // complete
  }

  /// Number of ready panels from `next_row_` on. With `wait`, blocks until there is one.
  int64_t ready_panels(ActiveChunk& chunk, bool wait) {
    const auto rows = chunk.rows.extent;
    const auto panels = [&] {
      return chunk.ready == rows ? panels_of(rows - next_row_) : (chunk.ready - next_row_) / kBlockDim;
    };
    while (panels() == 0 && wait) {
      const auto ready = input_.ready(chunk.index, chunk.ready);
      TORCH_CHECK(ready > chunk.ready && ready <= rows, "gemm: ready() returned ", ready, " for row chunk ",
                  chunk.index, ", expected more than the ", chunk.ready, " rows ready so far and at most ", rows, ".");
      chunk.ready = ready;
    }
    return panels();
  }

  bool splits_columns(int64_t panels) const { return panels < threads_ && panels <= blocking_.resident; }

  /// Splits the rows of the block over the threads, or the columns if there are fewer panels than threads.
  void multiply_ranges(const std::vector<ChunkRange>& ranges, int64_t panels, ResidentPanels& resident) {
    const auto block_variant = variant(ranges[0]);
    const auto* progress = input_.progress ? &input_.progress : nullptr;
    const int64_t unit = right_.panels_per_unit(), streamed_units = right_.panels() / unit;
    if (threads_ == 1)
      return gemm_macrokernel({right_, 0, streamed_units * unit}, resident, blocking_, block_variant, e_, progress);
    const auto caller = std::this_thread::get_id();
    const bool by_columns = splits_columns(panels);
    on_threads(threads_, [&](int t) {
      const auto rows = by_columns ? Range{0, panels} : share_of(panels, t, threads_);
      const auto units = by_columns ? share_of(streamed_units, t, threads_) : Range{0, streamed_units};
      ResidentPanels block(blocking_);
      add_panels(block, ranges, args_[t], rows.begin, rows.end);
      const StreamedPanels streamed{right_, units.begin * unit, units.end * unit, by_columns ? 0 : t,
                                    by_columns ? 1 : threads_};
      gemm_macrokernel(streamed, block, blocking_, block_variant, e_,
                       std::this_thread::get_id() == caller ? progress : nullptr);
    });
  }

  /// Appends panels [begin, end) of `ranges` to a block.
  void add_panels(ResidentPanels& block, const std::vector<ChunkRange>& ranges, const std::vector<EpilogueArgs>& args,
                  int64_t begin, int64_t end) const {
    for (const auto& [index, first, panels] : ranges) {
      const auto& chunk = chunks_[index];
      const auto from = std::clamp<int64_t>(begin, 0, panels), to = std::clamp<int64_t>(end, 0, panels);
      if (from < to) block.append(chunk.rows, args[chunk.index], first + from * kBlockDim, to - from);
      begin -= panels;
      end -= panels;
    }
  }

  const RowChunks& input_;
  at::Tensor b_;
  const Epilogue& e_;
  Operand right_;
  int threads_;
  GemmOutputs outputs_;
  std::vector<ColumnSums> column_sums_;          // per thread
  std::vector<std::vector<EpilogueArgs>> args_;  // per thread and chunk
  std::vector<ActiveChunk> chunks_;
  int64_t panels_ = 0;  // of all chunks
  Blocking blocking_{};
  int64_t max_block_panels_ = 0;
  bool single_block_ = false;
  size_t next_chunk_ = 0;  // start of the next block
  int64_t next_row_ = 0;
};

}  // namespace
}  // namespace weft::kernels::CPU_CAPABILITY

namespace weft::kernels::amx {
GemmResult gemm(const RowChunks& a, const at::Tensor& b, const Epilogue& epilogue) {
  return CPU_CAPABILITY::ChunkedGemm(a, b, epilogue).run();
}
int max_addends() { return CPU_CAPABILITY::kMaxAddends; }
void pack_rows(at::Tensor a, const at::Tensor& to) {
  using CPU_CAPABILITY::Bf16;
  CPU_CAPABILITY::pack_operand(CPU_CAPABILITY::operand(a, true), reinterpret_cast<Bf16*>(to.data_ptr()));
}
}  // namespace weft::kernels::amx
