#include "weft/kernels/row_chunks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "weft/core/value.h"
#include "weft/kernels/cpu/blocking.h"
#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/opmath.h"
#include "weft/kernels/rows.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

bool is_blocked(const at::Tensor& t) { return t.defined() && t.dim() == 4; }

/// Row chunks in which the addends of each chunk are replaced by their sum, in float32 (float64 for float64), computed
/// as they become ready.
class PresummedAddends {
 public:
  explicit PresummedAddends(const RowChunks& given) : chunks_(given), given_(given), done_(given.list.size()) {
    for (auto& chunk : chunks_.list) {
      if (chunk.addends.size() < 2) continue;
      const auto& first = chunk.addends[0];
      chunk.addends = {at::empty(first.sizes(), first.options().dtype(at::toOpMathType(first.scalar_type())))};
    }
    if (!given.ready) chunks_.min_block_rows = given.rows;
    chunks_.ready = [this](int chunk, int64_t from) { return ready(chunk, from); };
  }
  PresummedAddends(const PresummedAddends&) = delete;
  PresummedAddends& operator=(const PresummedAddends&) = delete;

  const RowChunks& chunks() const { return chunks_; }

 private:
  int64_t ready(int chunk, int64_t from) {
    const auto& terms = given_.list[chunk].addends;
    const auto rows = row_count(given_.list[chunk]), to = given_.ready ? given_.ready(chunk, from) : rows;
    auto& done = done_[chunk];
    if (terms.size() < 2 || to <= done) return to;
    const auto part = [&](const at::Tensor& t) {
      if (!is_blocked(t)) return t.narrow(0, done, to - done);
      const auto begin = done / kBlockDim, end = to == rows ? t.size(1) : to / kBlockDim;
      return t.flatten(1).narrow(1, begin * kBlockDim * kBlockDim, (end - begin) * kBlockDim * kBlockDim);
    };
    std::vector<at::Tensor> parts;
    for (const auto& t : terms) parts.push_back(part(t));
    sum_terms(parts, part(chunks_.list[chunk].addends[0]));
    done = to;
    return to;
  }

  RowChunks chunks_;
  const RowChunks& given_;
  std::vector<int64_t> done_;  // rows summed so far, per chunk
};

int64_t panels_for(int64_t values) { return (values + kBlockDim - 1) / kBlockDim; }

/// Whether `a` has contiguous rows of length k, or on AMX is packed.
bool fits_a(const RowChunk& chunk, int64_t k, bool on_amx) {
  const auto& a = chunk.a;
  if (a.dim() == 2) return a.size(1) == k && (a.stride(1) == 1 || k <= 1);
  return on_amx && a.is_contiguous() &&
         a.sizes() == at::IntArrayRef({panels_for(chunk.packed_rows), 2 * panels_for(k), kBlockDim / 2, kBlockDim});
}

/// Whether `t` has contiguous rows, or on AMX the blocked layout.
bool fits_result(const at::Tensor& t, int64_t rows, int64_t n, bool on_amx) {
  if (t.dim() == 2) return t.size(0) == rows && (t.stride(1) == 1 || t.size(1) <= 1);
  return on_amx && t.is_contiguous() &&
         t.sizes() == at::IntArrayRef({panels_for(n), panels_for(rows), kBlockDim, kBlockDim});
}

void check(const RowChunks& a, const Matrix& b, const Epilogue& e, bool on_amx) {
  for (size_t i = 0; i < a.list.size(); ++i) {
    const auto& chunk = a.list[i];
    TORCH_CHECK_VALUE(fits_a(chunk, b.rows(), on_amx), "gemm: A of row chunk ", i, " has shape ", chunk.a.sizes(),
                      " and strides ", chunk.a.strides(), ", expected contiguous rows of ", b.rows(), " elements",
                      on_amx ? ", or rows packed by pack_rows." : ".");
    const auto rows = row_count(chunk);
    TORCH_CHECK_VALUE(chunk.row >= 0 && chunk.row + rows <= a.rows, "gemm: row chunk ", i, " has rows ", chunk.row,
                      " to ", chunk.row + rows, ", expected rows within 0 to ", a.rows, ".");
    const auto check_result = [&](const at::Tensor& t, const char* what) {
      TORCH_CHECK_VALUE(fits_result(t, rows, b.columns(), on_amx), "gemm: ", what, " of row chunk ", i, " has shape ",
                        t.sizes(), ", expected ", rows, " contiguous rows", on_amx ? ", or the blocked layout." : ".");
    };
    if (chunk.out.defined()) check_result(chunk.out, "`out`");
    for (const auto& t : chunk.addends) check_result(t, "an addend");
  }
  TORCH_CHECK_VALUE(!e.out.defined() || e.out.size(0) == a.rows, "gemm: `out` has ", e.out.size(0), " rows, expected ",
                    a.rows, ".");
}

/// Whether the AMX tier can read and write every tensor.
bool amx_supports(const RowChunks& a, const Matrix& b, const Epilogue& e) {
  const auto fits = [](const at::Tensor& t) { return !t.defined() || vector_tier(t) != Tier::ref; };
  return a.rows > 0 && std::all_of(a.list.begin(), a.list.end(), [&](const RowChunk& chunk) {
           return row_count(chunk) == 0 ||
                  (fits(chunk.out) && std::all_of(chunk.addends.begin(), chunk.addends.end(), fits) &&
                   gemm_tier(chunk.a, b, e) == Tier::amx);
         });
}

/// Runs one `gemm` per ready range of rows and collects the results.
class SequentialGemm {
 public:
  SequentialGemm(const RowChunks& a, const Matrix& b, const Epilogue& e) : a_(a), b_(b), e_(e), out_(e.out) {}

  GemmResult run() {
    for (size_t i = 0; i < a_.list.size(); ++i) {
      const auto rows = a_.list[i].a.size(0);
      for (int64_t from = 0; from < rows;) {
        const auto to = wait(static_cast<int>(i), from, rows);
        multiply(a_.list[i], from, to);
        if (a_.on_done) a_.on_done(static_cast<int>(i), to);
        if (a_.progress) a_.progress();
        from = to;
      }
    }
    if (a_.rows == 0) return gemm(at::empty({0, b_.rows()}, b_.t.options()), b_, e_);
    all_.out = out_;
    return std::move(all_);
  }

 private:
  /// Waits for `min_block_rows` rows from `from` on, or for all that are left. Returns the end of the ready rows.
  int64_t wait(int chunk, int64_t from, int64_t rows) const {
    const auto target_rows = std::min(rows, from + std::max<int64_t>(a_.min_block_rows, 1));
    int64_t to = a_.ready ? from : rows;
    while (to < target_rows) to = a_.ready(chunk, to);
    return a_.max_block_rows > 0 ? std::min(to, from + a_.max_block_rows) : to;
  }

  void multiply(const RowChunk& chunk, int64_t from, int64_t to) {
    const auto row = chunk.row + from, count = to - from;
    const auto chunk_rows = [&](const at::Tensor& t) { return t.defined() ? t.narrow(0, row, count) : t; };
    Epilogue e = e_;
    e.act_input = chunk_rows(e_.act_input);
    e.addend = chunk_rows(e_.addend);
    if (!chunk.addends.empty()) {
      const auto chunk_addend = chunk.addends[0].narrow(0, from, count);
      e.addend = e.addend.defined() ? sum_of(e.addend, chunk_addend) : chunk_addend;
    }
    e.out = chunk.out.defined() ? chunk.out.narrow(0, from, count) : chunk_rows(out_);
    auto r = gemm(chunk.a.narrow(0, from, count), b_, e);
    if (!chunk.out.defined()) store_rows(r.out, out_, row);
    store_rows(r.pre_act, all_.pre_act, row);
    store_rows(r.act_output, all_.act_output, row);
    if (r.column_sums.defined())
      all_.column_sums = all_.column_sums.defined() ? all_.column_sums.add_(r.column_sums) : r.column_sums;
  }
  static at::Tensor sum_of(const at::Tensor& x, const at::Tensor& y) {
    const auto sum = at::empty(x.sizes(), x.options().dtype(at::toOpMathType(x.scalar_type())));
    sum_terms({x, y}, sum);
    return sum;
  }
  /// Copies `rows` to rows `row` and up of `all`, allocating `all` on first use.
  void store_rows(const at::Tensor& rows, at::Tensor& all, int64_t row) const {
    if (!rows.defined()) return;
    if (!all.defined()) all = at::empty({a_.rows, rows.size(1)}, rows.options());
    auto dst = all.narrow(0, row, rows.size(0));
    if (dst.const_data_ptr() != rows.const_data_ptr()) dst.copy_(rows);
  }

  const RowChunks& a_;
  const Matrix& b_;
  const Epilogue& e_;
  at::Tensor out_;
  GemmResult all_;
};

}  // namespace

bool supports_blocked_layout(at::ScalarType dtype, int64_t n, int64_t k) {
  return amx_supports(c10::DeviceType::CPU, dtype, n, k);
}

void pack_rows(const at::Tensor& a, const at::Tensor& to) {
  TORCH_CHECK_VALUE(machine_tier() == Tier::amx && a.dim() == 2 && a.scalar_type() == at::kBFloat16 &&
                        to.scalar_type() == at::kBFloat16 &&
                        fits_a({.a = to, .packed_rows = a.size(0)}, a.size(1), true),
                    "pack_rows: got ", dtype_name(a.scalar_type()), " ", a.sizes(), " to pack into ",
                    dtype_name(to.scalar_type()), " ", to.sizes(), " in the ", tier_name(machine_tier()),
                    " tier, expected bfloat16 [rows, K], a contiguous bfloat16 destination "
                    "[ceil(rows/32), 2*ceil(K/32), 16, 32] and the amx tier.");
  if (a.numel() > 0) amx::pack_rows(a, to);
}

GemmResult gemm(const RowChunks& a, const Matrix& b, const Epilogue& epilogue) {
  const bool on_amx = amx_supports(a, b, epilogue);
  check(a, b, epilogue, on_amx);
  const size_t max_addends = on_amx ? amx::max_addends() - (epilogue.addend.defined() ? 1 : 0) : 1;
  const bool many =
      std::any_of(a.list.begin(), a.list.end(), [&](const RowChunk& p) { return p.addends.size() > max_addends; });
  const auto run = [&](const RowChunks& chunks) {
    return on_amx ? amx::gemm(chunks, b.tensor(), epilogue) : SequentialGemm(chunks, b, epilogue).run();
  };
  if (!many) return run(a);
  const PresummedAddends presummed(a);
  return run(presummed.chunks());
}

}  // namespace weft::kernels
