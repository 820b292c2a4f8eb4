#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <limits>

#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/operand.h"
#include "weft/kernels/precision.h"
#include "weft/kernels/tiers.h"

// MKL, which LibTorch carries and exports: C = alpha·op(A) op(B) + beta·C with a float32 C.
extern "C" {
void cblas_gemm_bf16bf16f32(int layout, int trans_a, int trans_b, int m, int n, int k, float alpha, const void* a,
                            int lda, const void* b, int ldb, float beta, float* c, int ldc);
void cblas_gemm_f16f16f32(int layout, int trans_a, int trans_b, int m, int n, int k, float alpha, const void* a,
                          int lda, const void* b, int ldb, float beta, float* c, int ldc);
}

namespace weft::kernels {
namespace {

constexpr int64_t kRows = 1024;  // of a block. The engine packs B in each call: with 64 rows it runs at a third.

/// Whether the engine multiplies matrices of this dtype with instructions of their own. If not, it is several times
/// slower than MKL, which converts to float32.
bool engine_is_native(at::ScalarType dtype) {
  static const bool bf16 = cpu_has("avx512_bf16"), fp16 = cpu_has("avx512_fp16") || cpu_has("amx_fp16");
  return dtype == at::kFloat || (dtype == at::kBFloat16 ? bf16 : fp16);
}

/// A matrix as MKL wants it: rows or columns without gaps.
struct Blas {
  at::Tensor t;
  int trans, ld;
  explicit Blas(const at::Tensor& given) : t(given) {
    const auto by_rows = [](const at::Tensor& m) {
      return m.stride(1) == 1 && m.stride(0) >= std::max<int64_t>(1, m.size(1));
    };
    const auto by_columns = [](const at::Tensor& m) {
      return m.stride(0) == 1 && m.stride(1) >= std::max<int64_t>(1, m.size(0));
    };
    if (!by_rows(t) && !by_columns(t)) t = t.contiguous();
    const bool rows = by_rows(t);
    trans = rows ? 111 : 112;
    ld = static_cast<int>(std::max<int64_t>(1, t.stride(rows ? 0 : 1)));
  }
};

bool fits_blas(const at::Tensor& t) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  return t.size(0) < kMost && t.size(1) < kMost && t.stride(0) < kMost && t.stride(1) < kMost;
}

/// c = alpha·A B + beta·c in float32, from low precision.
void wide_product(const at::Tensor& a, const at::Tensor& b, double alpha, double beta, const at::Tensor& c) {
  if (c.numel() == 0) return;
  if (a.size(1) == 0) return static_cast<void>(beta == 0 ? c.zero_() : c.mul_(beta));
  const Blas x(a), y(b);
  const auto call = a.scalar_type() == at::kBFloat16 ? cblas_gemm_bf16bf16f32 : cblas_gemm_f16f16f32;
  call(101, x.trans, y.trans, static_cast<int>(a.size(0)), static_cast<int>(b.size(1)), static_cast<int>(a.size(1)),
       static_cast<float>(alpha), x.t.const_data_ptr(), x.ld, y.t.const_data_ptr(), y.ld, static_cast<float>(beta),
       c.mutable_data_ptr<float>(), static_cast<int>(c.stride(0)));
}

bool by_rows(const at::Tensor& t) { return t.stride(1) == 1 || t.size(1) <= 1; }

/// A matrix whose rows have no gaps, as memory for the loops.
Rows rows_of(const at::Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.scalar_type()};  // they write only what is theirs
}
Rows from(const Rows& rows, int64_t row) {
  if (!rows) return rows;
  const auto size = static_cast<int64_t>(c10::elementSize(rows.dtype));
  return {static_cast<char*>(rows.data) + row * rows.ld * size, rows.ld, rows.dtype};
}
RowBlock from(RowBlock block, int64_t row) {
  for (auto* rows : {&block.pre, &block.at, &block.again, &block.add, &block.out}) *rows = from(*rows, row);
  return block;
}

Strided strided(const Matrix& m) {
  const auto strides = m.t.strides();
  return {m.t.const_data_ptr(), m.rows(), m.columns(), strides[m.transposed ? 1 : 0], strides[m.transposed ? 0 : 1]};
}

/// A product with its epilogue: the results, and the same as memory for the loops.
struct Run {
  Tier tier;
  const Matrix &a, &b;
  const Epilogue& e;
  at::ScalarType dtype;
  int64_t m, n, columns;     // columns: of the result
  at::Tensor bias, at, add;  // of the epilogue, as the loops can read them
  GemmResult result;
  RowBlock block;

  Run(Tier tier, const Matrix& a, const Matrix& b, const Epilogue& e)
      : tier(tier), a(a), b(b), e(e), dtype(a.t.scalar_type()), m(a.rows()), n(b.columns()), columns(n) {
    if (e.act && e.act->gated()) columns = n / 2;
    if (e.slope && e.slope->gated()) columns = 2 * n;
    const auto stored = e.dtype == at::ScalarType::Undefined ? dtype : e.dtype;
    result.out = !e.out.defined() ? fresh({m, columns}, stored)
                 : by_rows(e.out) ? e.out
                                  : fresh({m, columns}, e.out.scalar_type());
  }
  /// Memory for everything that is kept or read besides the product.
  void prepare() {
    block.columns = n, block.scale = static_cast<float>(e.scale), block.act = e.act, block.slope = e.slope;
    block.out = rows_of(result.out);
    if (e.bias.defined()) {
      bias = contiguous(e.bias);
      block.bias = {const_cast<void*>(bias.const_data_ptr()), 0, bias.scalar_type()};
    }
    if (e.keep_pre) result.pre = fresh({m, n}, dtype), block.pre = rows_of(result.pre);
    if (e.slope) {
      at = by_rows(e.at) ? e.at : e.at.contiguous();
      block.at = rows_of(at);
      if (e.keep_again) result.again = fresh({m, n}, at.scalar_type()), block.again = rows_of(result.again);
    }
    if (e.add.defined()) {
      add = by_rows(e.add) ? e.add : e.add.contiguous();
      block.add = rows_of(add);
    }
    if (e.keep_sums) {
      result.sums = fresh_zeros(columns);
      block.sums = result.sums.mutable_data_ptr<float>();
    }
  }
  /// The epilogue of `rows` rows.
  void apply(const RowBlock& part, int64_t rows) const {
    const auto& loops = epilogue_loops(tier);
    if (!part.sums) {
      return in_rows(rows, columns, [&](int64_t begin, int64_t end) { loops.apply(part, begin, end); });
    }
    sum_in_rows(rows, columns, part.sums, [&](int64_t begin, int64_t end, float* partial) {
      RowBlock mine = part;
      mine.sums = partial;
      loops.apply(mine, begin, end);
    });
  }
  GemmResult finish() {
    if (e.out.defined() && !e.out.is_same(result.out)) result.out = e.out.copy_(result.out);
    return std::move(result);
  }

  /// scale·P + add and nothing else.
  bool linear() const { return !e.act && !e.slope && !e.keep_sums && !e.keep_pre && !e.bias.defined(); }

  void small() {
    const auto k = b.rows();
    const bool stored = linear() && !e.add.defined() && e.scale == 1 && result.out.scalar_type() == at::kFloat;
    c10::SmallVector<float, 512> memory;
    memory.resize_for_overwrite(static_cast<size_t>(k * n + m * n));
    const Rows p = stored ? rows_of(result.out) : Rows{memory.data() + k * n, n, at::kFloat};
    epilogue_loops(tier).small_product(dtype, strided(a), strided(b), memory.data(), p);
    if (stored) return;
    prepare();
    block.product = p;
    apply(block, m);
  }

  void large() {
    const auto left = a.tensor(), right = b.tensor();
    if (!alone(left, right)) in_blocks(left, right);
  }

  /// Where the engine or MKL can do all of it.
  bool alone(const at::Tensor& left, const at::Tensor& right) const {
    if (!linear()) return false;
    const auto to = result.out.scalar_type();
    auto out = result.out;
    if (dtype != at::kFloat && to == at::kFloat && fits_blas(left) && fits_blas(right)) {
      if (e.add.defined() && !e.add.is_same(out)) out.copy_(e.add);
      wide_product(left, right, e.scale, e.add.defined() ? 1 : 0, out);
      return true;
    }
    if (dtype != to || !engine_is_native(dtype)) return false;
    if (e.add.defined() && e.add.scalar_type() == dtype) {
      at::addmm_out(out, e.add, left, right, 1, e.scale);
      return true;
    }
    if (e.add.defined() || e.scale != 1) return false;
    at::mm_out(out, left, right);
    return true;
  }

  /// Where a block of the product may lie: where the result will be, if that has its shape and dtype and nothing there
  /// is still to be read.
  at::Tensor home(at::ScalarType p) const {
    if (e.keep_pre && p == dtype) return result.pre;
    const auto read_later = [&](const at::Tensor& t) {
      return t.defined() && t.const_data_ptr() == result.out.const_data_ptr();
    };
    const bool free = !read_later(add) && !read_later(at);
    if (free && columns == n && result.out.scalar_type() == p) return result.out;
    return {};
  }

  void in_blocks(const at::Tensor& left, const at::Tensor& right) {
    prepare();
    const bool native = engine_is_native(dtype) || !fits_blas(left) || !fits_blas(right);
    const auto computed = native ? dtype : at::kFloat;
    const auto place = home(computed);
    const auto scratch = place.defined() ? at::Tensor{} : fresh({std::min(m, kRows), n}, computed);
    for (int64_t row = 0; row < m; row += kRows) {
      const auto rows = std::min(kRows, m - row);
      auto p = place.defined() ? place.narrow(0, row, rows) : scratch.narrow(0, 0, rows);
      auto part = from(block, row);
      part.product = rows_of(p);
      multiply(left.narrow(0, row, rows), right, p, native, part);
      apply(part, rows);
    }
  }
  /// p = A B for a block. A low-precision p takes scale and bias with it, so that they are rounded once.
  void multiply(const at::Tensor& rows, const at::Tensor& right, at::Tensor& p, bool native, RowBlock& part) const {
    if (!native) return wide_product(rows, right, 1, 0, p);
    if (p.scalar_type() == at::kFloat || !e.bias.defined()) return static_cast<void>(at::mm_out(p, rows, right));
    at::addmm_out(p, as_dtype(e.bias, p.scalar_type()), rows, right, 1, e.scale);
    part.scale = 1, part.bias = {};
  }
};

}  // namespace

bool gemm_is_small(int64_t m, int64_t n, int64_t k) { return m * n <= 4096 && n * k <= 4096 && m * n * k <= 32768; }

GemmResult gemm_rows(Tier tier, const Matrix& a, const Matrix& b, const Epilogue& epilogue) {
  Run run(tier, a, b, epilogue);
  gemm_is_small(run.m, run.n, b.rows()) ? run.small() : run.large();
  return run.finish();
}

}  // namespace weft::kernels
