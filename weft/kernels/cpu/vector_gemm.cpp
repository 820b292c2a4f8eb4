#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <limits>

#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/opmath.h"
#include "weft/kernels/tiers.h"

#ifdef __x86_64__
// MKL, which LibTorch contains and exports: C = alpha·op(A) op(B) + beta·C with float32 C.
extern "C" {
void cblas_gemm_bf16bf16f32(int layout, int trans_a, int trans_b, int m, int n, int k, float alpha, const void* a,
                            int lda, const void* b, int ldb, float beta, float* c, int ldc);
void cblas_gemm_f16f16f32(int layout, int trans_a, int trans_b, int m, int n, int k, float alpha, const void* a,
                          int lda, const void* b, int ldb, float beta, float* c, int ldc);
}
#endif

namespace weft::kernels {

bool aten_gemm_is_native(at::ScalarType dtype) {
  static const bool bf16 = cpu_has("avx512_bf16") || cpu_has("bf16"),
                    fp16 = cpu_has("avx512_fp16") || cpu_has("amx_fp16") || cpu_has("fp16_arith");
  if (machine_tier() == Tier::avx2 && isReducedFloatingType(dtype)) return false;
  if (dtype == at::kBFloat16) return bf16;
  return dtype == at::kHalf ? fp16 : true;
}

namespace {

constexpr int64_t kRowsPerBlock = 1024;  // MKL and oneDNN pack B in each call, which a small block does not amortize

#ifdef __x86_64__
constexpr int kCblasRowMajor = 101, kCblasNoTrans = 111, kCblasTrans = 112;

/// A matrix with contiguous rows or columns, as BLAS requires; copied if it has neither.
struct BlasMatrix {
  at::Tensor t;
  int trans, ld;
  explicit BlasMatrix(const at::Tensor& given) : t(given) {
    const auto contiguous_along = [&](int dim) {
      return t.stride(dim) == 1 && t.stride(1 - dim) >= std::max<int64_t>(1, t.size(dim));
    };
    if (!contiguous_along(1) && !contiguous_along(0)) t = t.contiguous();
    const bool contiguous_rows = contiguous_along(1);
    trans = contiguous_rows ? kCblasNoTrans : kCblasTrans;
    ld = static_cast<int>(std::max<int64_t>(1, t.stride(contiguous_rows ? 0 : 1)));
  }
};

bool fits_blas(const at::Tensor& t) {
  constexpr int64_t kIntMax = std::numeric_limits<int>::max();
  return t.size(0) < kIntMax && t.size(1) < kIntMax && t.stride(0) < kIntMax && t.stride(1) < kIntMax;
}

at::Tensor reused_operand(const at::Tensor& b) { return b; }

/// c = alpha·A B + beta·c with bfloat16 or float16 A and B and float32 c.
void gemm_f32(const at::Tensor& a, const at::Tensor& b, double alpha, double beta, const at::Tensor& c) {
  if (c.numel() == 0) return;
  if (a.size(1) == 0) return static_cast<void>(beta == 0 ? c.zero_() : c.mul_(beta));
  const BlasMatrix x(a), y(b);
  const auto call = a.scalar_type() == at::kBFloat16 ? cblas_gemm_bf16bf16f32 : cblas_gemm_f16f16f32;
  call(kCblasRowMajor, x.trans, y.trans, static_cast<int>(a.size(0)), static_cast<int>(b.size(1)),
       static_cast<int>(a.size(1)), static_cast<float>(alpha), x.t.const_data_ptr(), x.ld, y.t.const_data_ptr(), y.ld,
       static_cast<float>(beta), c.mutable_data_ptr<float>(), static_cast<int>(c.stride(0)));
}
#else
bool fits_blas(const at::Tensor&) { return true; }
/// The right operand of several calls of gemm_f32.
at::Tensor reused_operand(const at::Tensor& b) { return b.to(at::kFloat); }

/// The same on converted operands, where LibTorch has no MKL. An operand may have been converted before.
void gemm_f32(const at::Tensor& a, const at::Tensor& b, double alpha, double beta, at::Tensor c) {
  at::addmm_out(c, c, a.to(at::kFloat), b.to(at::kFloat), beta, alpha);
}
#endif

bool row_contiguous(const at::Tensor& t) { return t.stride(1) == 1 || t.size(1) <= 1; }

/// A view of a matrix with contiguous rows, for the loops.
RowMajorView rows_of(const at::Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.scalar_type()};  // the loops write only to outputs
}
RowMajorView from_row(const RowMajorView& rows, int64_t row) {
  if (!rows) return rows;
  const auto size = static_cast<int64_t>(c10::elementSize(rows.dtype));
  return {static_cast<char*>(rows.data) + row * rows.ld * size, rows.ld, rows.dtype};
}
EpilogueCall from_row(EpilogueCall call, int64_t row) {
  for (auto* rows : {&call.pre_act, &call.act_input, &call.act_output, &call.addend, &call.out})
    *rows = from_row(*rows, row);
  return call;
}

StridedMatrix strided_matrix(const Matrix& m) {
  const auto strides = m.t.strides();
  return {m.t.const_data_ptr(), m.rows(), m.columns(), strides[m.transposed ? 1 : 0], strides[m.transposed ? 0 : 1]};
}

/// An epilogue: its results, and views of them for the loops.
struct VectorEpilogue {
  Tier tier;
  const at::Tensor& like;  // on the device of the results
  const Epilogue& e;
  at::ScalarType dtype;                // of the operands, pre_act, and the result unless the epilogue has another
  int64_t m, n, columns;               // columns: of the result
  at::Tensor bias, act_input, addend;  // of the epilogue, with contiguous rows
  GemmResult result;
  EpilogueCall call;

  VectorEpilogue(Tier tier, const at::Tensor& like, const Epilogue& e, at::ScalarType dtype, int64_t m, int64_t n)
      : tier(tier), like(like), e(e), dtype(dtype), m(m), n(n), columns(n) {
    if (e.act && e.act->gated()) columns = n / 2;
    if (e.act_grad && e.act_grad->gated()) columns = 2 * n;
  }
  /// Uses `out`, or allocates.
  void allocate_result() {
    const bool direct = e.out.defined() && row_contiguous(e.out);
    result.out = direct ? e.out : new_empty(like, {m, columns}, e.result_dtype(dtype));
  }
  /// Fills `call` and allocates the outputs that the epilogue keeps.
  void prepare() {
    call.columns = n, call.scale = static_cast<float>(e.scale), call.act = e.act, call.act_grad = e.act_grad;
    call.out = rows_of(result.out);
    if (e.bias.defined()) {
      bias = contiguous(e.bias);
      call.bias = {const_cast<void*>(bias.const_data_ptr()), 0, bias.scalar_type()};
    }
    if (e.keep_pre_act) result.pre_act = new_empty(like, {m, n}, dtype), call.pre_act = rows_of(result.pre_act);
    if (e.act_grad) {
      act_input = row_contiguous(e.act_input) ? e.act_input : e.act_input.contiguous();
      call.act_input = rows_of(act_input);
      if (e.keep_act_output)
        result.act_output = new_empty(like, {m, n}, act_input.scalar_type()),
        call.act_output = rows_of(result.act_output);
    }
    if (e.addend.defined()) {
      addend = row_contiguous(e.addend) ? e.addend : e.addend.contiguous();
      call.addend = rows_of(addend);
    }
    if (e.keep_column_sums) {
      result.column_sums = new_zeros_f32(like, columns);
      call.column_sums = result.column_sums.mutable_data_ptr<float>();
    }
  }
  /// Applies the epilogue to `rows` rows.
  void apply(const EpilogueCall& part, int64_t rows) const {
    const auto& loops = epilogue_loops(tier);
    if (!part.column_sums) {
      return parallel_rows(rows, columns, [&](int64_t begin, int64_t end) { loops.apply(part, begin, end); });
    }
    parallel_reduce_rows(rows, columns, part.column_sums, [&](int64_t begin, int64_t end, float* partial) {
      EpilogueCall local = part;
      local.column_sums = partial;
      loops.apply(local, begin, end);
    });
  }
  GemmResult finish() {
    if (e.out.defined() && !e.out.is_same(result.out)) result.out = e.out.copy_(result.out);
    return std::move(result);
  }

  /// The whole epilogue of P, which becomes the result where it can.
  GemmResult run(const at::Tensor& product) {
    if (!e.out.defined() && columns == n && e.result_dtype(dtype) == at::kFloat)
      result.out = product;
    else
      allocate_result();
    prepare();
    if (e.act || e.act_grad) call.step_dtype = dtype;
    call.product = rows_of(product);
    apply(call, m);
    return finish();
  }
};

/// One GEMM with its epilogue.
struct VectorGemm : VectorEpilogue {
  const Matrix &a, &b;

  VectorGemm(Tier tier, const Matrix& a, const Matrix& b, const Epilogue& e)
      : VectorEpilogue(tier, a.t, e, a.t.scalar_type(), a.rows(), b.columns()), a(a), b(b) {
    allocate_result();
  }

  /// Whether the epilogue is scale·P + addend and nothing else.
  bool plain_epilogue() const {
    return !e.act && !e.act_grad && !e.keep_column_sums && !e.keep_pre_act && !e.bias.defined();
  }

  void run_small() {
    const auto k = b.rows();
    const bool stored =
        plain_epilogue() && !e.addend.defined() && e.scale == 1 && result.out.scalar_type() == at::kFloat;
    c10::SmallVector<float, 512> memory;
    memory.resize_for_overwrite(static_cast<size_t>(k * n + m * n));
    const RowMajorView p = stored ? rows_of(result.out) : RowMajorView{memory.data() + k * n, n, at::kFloat};
    epilogue_loops(tier).small_gemm(dtype, strided_matrix(a), strided_matrix(b), memory.data(), p);
    if (stored) return;
    prepare();
    call.product = p;
    apply(call, m);
  }

  void run_large() {
    const auto left = a.tensor(), right = b.tensor();
    if (!try_single_call(left, right)) multiply_in_blocks(left, right);
  }

  /// Runs the GEMM as one call of ATen or BLAS, if that covers the epilogue; returns whether it did.
  bool try_single_call(const at::Tensor& left, const at::Tensor& right) const {
    if (!plain_epilogue()) return false;
    const auto to = result.out.scalar_type();
    auto out = result.out;
    if (dtype != at::kFloat && to == at::kFloat && fits_blas(left) && fits_blas(right)) {
      if (e.addend.defined() && !e.addend.is_same(out)) out.copy_(e.addend);
      gemm_f32(left, right, e.scale, e.addend.defined() ? 1 : 0, out);
      return true;
    }
    if (dtype != to || !aten_gemm_is_native(dtype)) return false;
    if (e.addend.defined() && e.addend.scalar_type() == dtype) {
      at::addmm_out(out, e.addend, left, right, 1, e.scale);
      return true;
    }
    if (e.addend.defined() || e.scale != 1) return false;
    at::mm_out(out, left, right);
    return true;
  }

  /// An output that can hold P of dtype `p` before the epilogue: it has the shape and dtype of P, and no input of the
  /// epilogue aliases it. Undefined if there is none.
  at::Tensor product_storage(at::ScalarType p) const {
    if (e.keep_pre_act && p == dtype) return result.pre_act;
    const auto read_later = [&](const at::Tensor& t) {
      return t.defined() && t.const_data_ptr() == result.out.const_data_ptr();
    };
    const bool free = !read_later(addend) && !read_later(act_input);
    if (free && columns == n && result.out.scalar_type() == p) return result.out;
    return {};
  }

  void multiply_in_blocks(const at::Tensor& left, const at::Tensor& right) {
    prepare();
    const bool native = aten_gemm_is_native(dtype) || !fits_blas(left) || !fits_blas(right);
    const auto computed = native ? dtype : at::kFloat;
    const auto operand = native ? right : reused_operand(right);
    const auto storage = product_storage(computed);
    const auto scratch = storage.defined() ? at::Tensor{} : new_empty(like, {std::min(m, kRowsPerBlock), n}, computed);
    for (int64_t row = 0; row < m; row += kRowsPerBlock) {
      const auto rows = std::min(kRowsPerBlock, m - row);
      auto p = storage.defined() ? storage.narrow(0, row, rows) : scratch.narrow(0, 0, rows);
      auto part = from_row(call, row);
      part.product = rows_of(p);
      multiply(left.narrow(0, row, rows), operand, p, native, part);
      apply(part, rows);
    }
  }
  /// p = A B for a block of rows. For a low-precision p the GEMM applies scale and bias: the sum is rounded once.
  void multiply(const at::Tensor& rows, const at::Tensor& right, at::Tensor& p, bool native, EpilogueCall& part) const {
    if (!native) return gemm_f32(rows, right, 1, 0, p);
    if (p.scalar_type() == at::kFloat || !e.bias.defined()) return static_cast<void>(at::mm_out(p, rows, right));
    at::addmm_out(p, as_dtype(e.bias, p.scalar_type()), rows, right, 1, e.scale);
    part.scale = 1, part.bias = {};
  }
};

}  // namespace

bool gemm_is_small(int64_t m, int64_t n, int64_t k) { return m * n <= 4096 && n * k <= 4096 && m * n * k <= 32768; }

GemmResult vector_gemm(Tier tier, const Matrix& a, const Matrix& b, const Epilogue& epilogue) {
  VectorGemm call(tier, a, b, epilogue);
  gemm_is_small(call.m, call.n, b.rows()) ? call.run_small() : call.run_large();
  return call.finish();
}

GemmResult vector_epilogue(Tier tier, const at::Tensor& product, const Epilogue& epilogue, at::ScalarType dtype) {
  const auto rows = product.is_contiguous() ? product : product.contiguous();
  return VectorEpilogue(tier, rows, epilogue, dtype, rows.size(0), rows.size(1)).run(rows);
}

}  // namespace weft::kernels
