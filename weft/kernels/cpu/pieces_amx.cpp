#include <numeric>
#include <thread>

#include "weft/kernels/cpu/product_amx.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels::CPU_CAPABILITY {
namespace {

/// A piece that has rows, as the loops see it.
struct Part {
  int index;  // among the pieces
  Operand rows;
  Bf16* tiles;    // where they are to be packed to, or null
  int64_t there;  // rows that are known to be ready
};

/// Panels of one part, in a block.
struct Run {
  size_t part;
  int64_t first, panels;  // first: a row
};

/// One call: A B with its epilogue, A in pieces. B is near; rows of A make up the far blocks.
class PieceProduct {
 public:
  PieceProduct(const Pieces& pieces, at::Tensor b, const Epilogue& e)
      : pieces_(pieces),
        b_(std::move(b)),
        e_(e),
        right_(operand(b_, false)),
        threads_(at::in_parallel_region() ? 1 : at::get_num_threads()),
        results_(e, pieces.rows, right_.extent, needs_out(pieces)),
        sums_(results_.column_sums(threads_)),
        works_(threads_) {
    if (results_.gated()) right_.half = right_.extent / 2;
    for (int t = 0; t < threads_; ++t)
      for (const auto& piece : pieces.list) {
        works_[t].push_back(work_of(piece));
        works_[t].back().sums = e.keep_sums ? sums_[t].data() : nullptr;
      }
    for (size_t i = 0; i < pieces.list.size(); ++i) {
      const auto rows = rows_in(pieces.list[i]);
      if (rows == 0) continue;
      const auto& tiles = pieces.list[i].tiles;
      parts_.push_back({.index = static_cast<int>(i),
                        .rows = rows_of(pieces.list[i], right_.k),
                        .tiles = tiles.defined() ? reinterpret_cast<Bf16*>(tiles.data_ptr()) : nullptr,
                        .there = pieces.ready ? 0 : rows});
      panels_ += parts_.back().rows.panels();
    }
    cut_ = cut(right_.panels(), panels_, right_.k, results_.most_far(results_.work()));
    limit_ = cut_.far * threads_;
    if (pieces.most > 0) limit_ = std::min(limit_, (pieces.most + kPanel - 1) / kPanel);
    if (panels_ > 0) limit_ = shared_evenly(panels_, limit_);
  }

  GemmResult run() {
    together_ = one_block();
    const auto packed = packed_right();
    right_.packed = packed ? packed->data() : nullptr;
    if (threads_ > 1 || (!cut_.whole && together_)) pack_first();
    multiply();
    results_.sum_up(sums_);
    return results_.finish();
  }

 private:
  static bool needs_out(const Pieces& pieces) {
    return std::any_of(pieces.list.begin(), pieces.list.end(), [](const Piece& p) { return !p.out.defined(); });
  }
  static Operand rows_of(const Piece& piece, int64_t k) {
    Operand m;
    (is_packed(piece) ? m.packed : m.data) = reinterpret_cast<const Bf16*>(piece.a.const_data_ptr());
    m.ld = piece.a.stride(0);
    m.extent = rows_in(piece);
    m.k = k;
    return m;
  }

  /// A frozen weight's copy, or packed for this call if several blocks meet it; else null.
  std::shared_ptr<const PackedCopy> packed_right() const {
    std::shared_ptr<const PackedCopy> kept;
    if (e_.weight) kept = packed_if_frozen(b_, right_);
    return kept || together_ ? kept : packed_once(right_);
  }

  /// The epilogue of a piece, which counts its own rows.
  Work work_of(const Piece& piece) const {
    Work w = results_.work();
    w.rows = rows_in(piece);
    const auto move = [&](Place& place) {
      if (place.data) place.data = place.at(piece.row, 0);
    };
    for (auto* place : {&w.out, &w.pre, &w.again, &w.at}) move(*place);
    for (int i = 0; i < w.adds; ++i) move(w.add[i]);
    if (piece.out.defined()) {
      w.out = place(piece.out);
      w.out.store = results_.store_of(piece.out, pieces_.rows * results_.columns() * 2);
    }
    for (const auto& t : piece.add) w.add[w.adds++] = place(t);
    for (int i = 0; i < w.adds; ++i)
      if (w.add[i].data == w.out.data) w.out.store = Store::keep;
    return w;
  }
  Form form(const Run& run) const { return form(parts_[run.part]); }
  Form form(const Part& part) const { return form_of(works_[0][part.index], e_.act, e_.slope); }

  /// Whether all rows will be multiplied together.
  bool one_block() const {
    const auto same = [&](const Part& p) { return form(p) == form(parts_[0]); };
    return panels_ <= limit_ && (!pieces_.ready || pieces_.least >= pieces_.rows) &&
           std::all_of(parts_.begin(), parts_.end(), same);
  }

  /// All blocks in turn.
  void multiply() {
    while (part_ < parts_.size()) {
      FarBlock mine(cut_);
      const auto runs = take_block(mine);
      const int64_t panels = std::transform_reduce(runs.begin(), runs.end(), int64_t{0}, std::plus<>(),
                                                   [](const Run& r) { return r.panels; });
      multiply_block_of(runs, panels, mine);
      for (const auto& run : runs) tell_packed(run);
      if (pieces_.done)
        for (const auto& run : runs) pieces_.done(parts_[run.part].index, end_of(run));
    }
  }

  /// The next rows: as many as fit and are there, all of one form. A single thread packs them into `mine` as they come.
  std::vector<Run> take_block(FarBlock& mine) {
    std::vector<Run> runs;
    int64_t panels = 0;
    while (part_ < parts_.size() && panels < limit_) {
      auto& part = parts_[part_];
      if (!runs.empty() && (form(part) != form(runs[0]) || parts_[runs[0].part].tiles)) break;
      const auto there = panels_there(part, /*wait=*/panels * kPanel < pieces_.least);
      if (there == 0) break;
      const Run run{part_, row_, std::min(there, limit_ - panels)};
      runs.push_back(run);
      if (threads_ == 1) {
        auto rows = part.rows;
        rows.also = part.tiles;
        mine.add(rows, works_[0][part.index], run.first, run.panels);
        if (cut_.whole) tell_packed(run);
      }
      panels += run.panels;
      row_ += run.panels * kPanel;
      if (row_ < part.rows.extent) continue;
      ++part_;
      row_ = 0;
    }
    return runs;
  }

  int64_t end_of(const Run& run) const {
    return std::min(parts_[run.part].rows.extent, run.first + run.panels * kPanel);
  }
  /// Packs what others wait for before the product starts: if that would pack it too late, or on several threads.
  void pack_first() {
    for (size_t i = 0; i < parts_.size(); ++i) {
      const auto& rows = parts_[i].rows;
      if (parts_[i].tiles) pack_whole(rows, parts_[i].tiles);
      tell_packed({i, 0, rows.panels()});
    }
  }
  /// Says that the rows of a run are where they were to be packed to.
  void tell_packed(const Run& run) {
    auto& part = parts_[run.part];
    if (!part.tiles) return;
    _mm_sfence();
    if (pieces_.packed) pieces_.packed(part.index, end_of(run));
    if (end_of(run) == part.rows.extent) part.tiles = nullptr;  // not twice
  }

  /// Panels from `row_` on that are there; waits for one if asked to.
  int64_t panels_there(Part& part, bool wait) {
    const auto rows = part.rows.extent;
    const auto panels = [&] {
      return part.there == rows ? (rows - row_ + kPanel - 1) / kPanel : (part.there - row_) / kPanel;
    };
    while (panels() == 0 && wait) {
      const auto there = pieces_.ready(part.index, part.there);
      TORCH_CHECK(there > part.there && there <= rows, "gemm: piece ", part.index, " has ", rows, " rows, of which ",
                  part.there, " were there; ready() said ", there, ".");
      part.there = there;
    }
    return panels();
  }

  /// Shares the rows of the block out over the threads, or the columns if rows are few.
  void multiply_block_of(const std::vector<Run>& runs, int64_t panels, FarBlock& mine) {
    const auto block_form = form(runs[0]);
    const auto* between = pieces_.between ? &pieces_.between : nullptr;
    const int64_t unit = right_.together(), nears = right_.panels() / unit;
    if (threads_ == 1) return multiply_block({right_, 0, nears * unit}, mine, cut_, block_form, e_, between);
    const auto caller = std::this_thread::get_id();
    const bool by_columns = panels < threads_ && panels <= cut_.far;
    on_threads(threads_, [&](int t) {
      const auto part = [&](int64_t all, bool split, int i) { return split ? all * (t + i) / threads_ : all * i; };
      FarBlock block(cut_);
      add_panels(block, runs, works_[t], part(panels, !by_columns, 0), part(panels, !by_columns, 1));
      multiply_block({right_, part(nears, by_columns, 0) * unit, part(nears, by_columns, 1) * unit}, block, cut_,
                     block_form, e_, std::this_thread::get_id() == caller ? between : nullptr);
    });
  }

  /// Adds panels [begin, end) of the runs to a block.
  void add_panels(FarBlock& block, const std::vector<Run>& runs, const std::vector<Work>& works, int64_t begin,
                  int64_t end) const {
    for (const auto& [index, first, panels] : runs) {
      const auto& part = parts_[index];
      const auto from = std::clamp<int64_t>(begin, 0, panels), to = std::clamp<int64_t>(end, 0, panels);
      if (from < to) block.add(part.rows, works[part.index], first + from * kPanel, to - from);
      begin -= panels;
      end -= panels;
    }
  }

  const Pieces& pieces_;
  at::Tensor b_;
  const Epilogue& e_;
  Operand right_;
  int threads_;
  Results results_;
  std::vector<ColumnSums> sums_;          // of each thread
  std::vector<std::vector<Work>> works_;  // of each thread, for each piece
  std::vector<Part> parts_;
  int64_t panels_ = 0;  // of all parts
  Blocking cut_{};
  int64_t limit_ = 0;      // panels of a block
  bool together_ = false;  // all in one block
  size_t part_ = 0;        // what comes next
  int64_t row_ = 0;
};

}  // namespace
}  // namespace weft::kernels::CPU_CAPABILITY

namespace weft::kernels::amx {
GemmResult gemm(const Pieces& a, const at::Tensor& b, const Epilogue& epilogue) {
  return CPU_CAPABILITY::PieceProduct(a, b, epilogue).run();
}
int most_adds() { return CPU_CAPABILITY::kMostAdds; }
void pack_rows(at::Tensor a, const at::Tensor& to) {
  using CPU_CAPABILITY::Bf16;
  CPU_CAPABILITY::pack_whole(CPU_CAPABILITY::operand(a, true), reinterpret_cast<Bf16*>(to.data_ptr()));
}
}  // namespace weft::kernels::amx
