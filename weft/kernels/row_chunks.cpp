#include "weft/kernels/row_chunks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/opmath.h"
#include "weft/kernels/rows.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

constexpr int64_t kBlockDim = 32;

bool is_blocked(const at::Tensor& t) { return t.defined() && t.dim() == 4; }

/// RowChunks whose addends are added up in float32 (float64 for float64) as they become ready, so that at most one is
/// left for each.
class PresummedAddends {
 public:
  explicit PresummedAddends(const RowChunks& given) : chunks_(given), given_(given), done_(given.list.size()) {
    for (auto& chunk : chunks_.list) {
      if (chunk.addends.size() < 2) continue;
      const auto& first = chunk.addends[0];
      chunk.addends = {at::empty(first.sizes(), first.options().dtype(opmath_dtype(first.scalar_type())))};
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
  std::vector<int64_t> done_;  // rows that are added up
};

int64_t panels_for(int64_t values) { return (values + kBlockDim - 1) / kBlockDim; }

/// Rows of `k` values without gaps, or packed where tiles take them.
bool fits_a(const RowChunk& chunk, int64_t k, bool on_amx) {
  const auto& a = chunk.a;
  if (a.dim() == 2) return a.size(1) == k && (a.stride(1) == 1 || k <= 1);
  return on_amx && a.is_contiguous() &&
         a.sizes() == at::IntArrayRef({panels_for(chunk.packed_rows), 2 * panels_for(k), kBlockDim / 2, kBlockDim});
}

/// Rows without gaps, or squares where tiles make them.
bool fits_result(const at::Tensor& t, int64_t rows, int64_t n, bool on_amx) {
  if (t.dim() == 2) return t.size(0) == rows && (t.stride(1) == 1 || t.size(1) <= 1);
  return on_amx && t.is_contiguous() &&
         t.sizes() == at::IntArrayRef({panels_for(n), panels_for(rows), kBlockDim, kBlockDim});
}

void check(const RowChunks& a, const Matrix& b, const Epilogue& e, bool on_amx) {
  for (size_t i = 0; i < a.list.size(); ++i) {
    const auto& chunk = a.list[i];
    TORCH_CHECK_VALUE(fits_a(chunk, b.rows(), on_amx), "gemm: piece ", i, " of A has sizes ", chunk.a.sizes(),
                      " and strides ", chunk.a.strides(), ", expected rows of ", b.rows(), " values without gaps",
                      on_amx ? ", or packed ones." : ".");
    const auto rows = row_count(chunk);
    TORCH_CHECK_VALUE(chunk.row >= 0 && chunk.row + rows <= a.rows, "gemm: piece ", i, " has rows ", chunk.row, " to ",
                      chunk.row + rows, " of a product of ", a.rows, ".");
    const auto check_result = [&](const at::Tensor& t, const char* what) {
      TORCH_CHECK_VALUE(fits_result(t, rows, b.columns(), on_amx), "gemm: ", what, " piece ", i, " have sizes ",
                        t.sizes(), ", expected ", rows, " rows without gaps", on_amx ? ", or squares." : ".");
    };
    if (chunk.out.defined()) check_result(chunk.out, "the results of");
    for (const auto& t : chunk.addends) check_result(t, "addends of");
  }
  TORCH_CHECK_VALUE(!e.out.defined() || e.out.size(0) == a.rows, "gemm: `out` has ", e.out.size(0),
                    " rows, the product ", a.rows, ".");
}

/// Whether all tensors are fit for tiles.
bool amx_supports(const RowChunks& a, const Matrix& b, const Epilogue& e) {
  const auto fits = [](const at::Tensor& t) { return !t.defined() || vector_tier(t) != Tier::ref; };
  return a.rows > 0 && std::all_of(a.list.begin(), a.list.end(), [&](const RowChunk& chunk) {
           return row_count(chunk) == 0 ||
                  (fits(chunk.out) && std::all_of(chunk.addends.begin(), chunk.addends.end(), fits) &&
                   gemm_tier(chunk.a, b, e) == Tier::amx);
         });
}

/// The results of all rows, filled piece by piece by plain products.
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
  /// How far rows from `from` on are there, at least `min_block_rows` of them if so many are left.
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
    const auto sum = at::empty(x.sizes(), x.options().dtype(opmath_dtype(x.scalar_type())));
    sum_terms({x, y}, sum);
    return sum;
  }
  /// Some rows of a result to their place among all.
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
                    "pack_rows: got ", a.toString(), " ", a.sizes(), " for ", to.toString(), " ", to.sizes(),
                    ", expected a matrix of bfloat16 on the AMX tier, and whole tiles.");
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
