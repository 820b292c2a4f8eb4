#include "weft/kernels/norm.h"

#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

using Sizes = c10::SmallVector<int64_t, 5>;

/// The sizes of x with those of the row replaced by 1.
Sizes statistic_sizes(const at::Tensor& x, int64_t row_dims) {
  Sizes sizes(x.sizes().begin(), x.sizes().end());
  std::fill(sizes.end() - row_dims, sizes.end(), 1);
  return sizes;
}

/// The arguments of a loop, with contiguous inputs.
struct PreparedNorm {
  at::Tensor x, gamma, beta, mean, rstd, dy, addend;
  int64_t rows = 1, row_dims;
  NormCall call;

  /// The row is the last `row_dims` dimensions of x.
  PreparedNorm(const at::Tensor& input, int64_t row_dims)
      : x(contiguous(input, input.numel(), "the input")), row_dims(row_dims) {
    call.columns = 1;
    const auto leading = x.dim() - row_dims;
    for (int64_t i = 0; i < x.dim(); ++i) (i < leading ? rows : call.columns) *= x.sizes()[i];
    call.divisor = static_cast<double>(std::max<int64_t>(call.columns, 1));
    call.dtype = x.scalar_type();
    call.x = x.const_data_ptr();
  }
  void set_params(const at::Tensor& g, const at::Tensor& b) {
    gamma = contiguous(g, call.columns, "the weight");
    call.gamma = gamma.const_data_ptr<float>();
    if (b.defined()) beta = contiguous(b, call.columns, "the bias"), call.beta = beta.const_data_ptr<float>();
  }
  /// Returns y. With `keep`, stores the statistics in `mean` and `rstd`.
  at::Tensor forward(Tier tier, bool centered, double eps, bool keep) {
    auto y = new_empty(x, x.sizes(), call.dtype);
    call.out = y.mutable_data_ptr();
    call.centered = centered, call.eps = eps;
    if (keep) {
      const auto sizes = statistic_sizes(x, row_dims);
      rstd = new_empty(x, sizes, at::kFloat), call.rstd = rstd.mutable_data_ptr<float>();
      if (centered) mean = new_empty(x, sizes, at::kFloat), call.mean = mean.mutable_data_ptr<float>();
    }
    parallel_rows(rows, call.columns, [&](int64_t begin, int64_t end) { norm_loops(tier).forward(call, begin, end); });
    return y;
  }
  void set_grad(const at::Tensor& grad, const at::Tensor& inverse, const at::Tensor& residual) {
    dy = contiguous(grad, x.numel(), "the gradient"), rstd = contiguous(inverse, rows, "the saved statistic");
    call.dy = dy.const_data_ptr(), call.dy_dtype = dy.scalar_type();
    call.rstd = const_cast<float*>(rstd.const_data_ptr<float>());  // backward only reads it
    if (!residual.defined()) return;
    addend = contiguous(residual, x.numel(), "the gradient to add");
    call.addend = addend.const_data_ptr(), call.addend_dtype = addend.scalar_type();
  }
  void set_mean(const at::Tensor& m) {
    mean = contiguous(m, rows, "the saved mean");
    call.centered = true;
    call.mean = const_cast<float*>(mean.const_data_ptr<float>());
  }
  NormGrads backward(Tier tier, std::array<bool, 3> output_mask, bool reuse) {
    NormGrads out;
    if (output_mask[0]) {
      // With short rows, loads of a row would wait for the stores of the row before it.
      constexpr int64_t kMinInPlaceColumns = 64;
      const bool in_place = reuse && call.dy_dtype == call.dtype && call.columns >= kMinInPlaceColumns;
      out.dx = in_place ? dy : new_empty(x, x.sizes(), call.dtype);
      call.out = out.dx.mutable_data_ptr();
    }
    if (!output_mask[1] && !output_mask[2]) {
      if (output_mask[0])
        parallel_rows(rows, call.columns,
                      [&](int64_t begin, int64_t end) { norm_loops(tier).backward(call, begin, end); });
      return out;
    }
    // Sums of dγ, then of dβ; or of the only one that is needed.
    const auto n = call.columns, both = static_cast<int64_t>(output_mask[1]) + static_cast<int64_t>(output_mask[2]);
    c10::SmallVector<float, 256> sums(static_cast<size_t>(both * n), 0.F);
    parallel_reduce_rows(rows, both * n, sums.data(), [&](int64_t begin, int64_t end, float* partial) {
      NormCall part = call;
      if (output_mask[1]) part.dgamma = partial;
      if (output_mask[2]) part.dbeta = partial + (both - 1) * n;
      norm_loops(tier).backward(part, begin, end);
    });
    const auto stored = [&](int64_t first) {
      auto t = new_empty(gamma, gamma.sizes(), at::kFloat);
      std::copy_n(sums.data() + first, n, t.mutable_data_ptr<float>());
      return t;
    };
    if (output_mask[1]) out.dgamma = stored(0);
    if (output_mask[2]) out.dbeta = stored((both - 1) * n);
    return out;
  }
};

/// Whether both are float32; `b` may be undefined.
bool are_float(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == at::kFloat && (!b.defined() || b.scalar_type() == at::kFloat);
}

}  // namespace

LayerNormForward layer_norm_forward(const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, double eps,
                                    bool keep) {
  const auto tier = are_float(gamma, beta) ? vector_tier(x, gamma, beta) : Tier::ref;
  if (tier == Tier::ref) return ref::layer_norm_forward(x, gamma, beta, eps);
  PreparedNorm prepared(x, gamma.dim());
  prepared.set_params(gamma, beta);
  auto y = prepared.forward(tier, /*centered=*/true, eps, keep);
  return {std::move(y), std::move(prepared.mean), std::move(prepared.rstd)};
}

NormGrads layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& mean, const at::Tensor& rstd,
                              const at::Tensor& gamma, std::array<bool, 3> output_mask, const at::Tensor& addend,
                              bool reuse) {
  const auto tier = are_float(gamma, rstd) ? vector_tier(x, dy, gamma, mean, rstd, addend) : Tier::ref;
  if (tier == Tier::ref) return ref::layer_norm_backward(dy, x, mean, rstd, gamma, output_mask, addend);
  PreparedNorm prepared(x, gamma.dim());
  prepared.set_params(gamma, {});
  prepared.set_grad(dy, rstd, addend);
  prepared.set_mean(mean);
  return prepared.backward(tier, output_mask, reuse);
}

RmsNormForward rms_norm_forward(const at::Tensor& x, const at::Tensor& gamma, double eps, bool keep) {
  const auto tier = are_float(gamma, {}) ? vector_tier(x, gamma) : Tier::ref;
  if (tier == Tier::ref) return ref::rms_norm_forward(x, gamma, eps);
  PreparedNorm prepared(x, gamma.dim());
  prepared.set_params(gamma, {});
  auto y = prepared.forward(tier, /*centered=*/false, eps, keep);
  return {std::move(y), std::move(prepared.rstd)};
}

NormGrads rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rstd, const at::Tensor& gamma,
                            std::array<bool, 2> output_mask, const at::Tensor& addend, bool reuse) {
  const auto tier = are_float(gamma, rstd) ? vector_tier(x, dy, gamma, rstd, addend) : Tier::ref;
  if (tier == Tier::ref) return ref::rms_norm_backward(dy, x, rstd, gamma, output_mask, addend);
  PreparedNorm prepared(x, gamma.dim());
  prepared.set_params(gamma, {});
  prepared.set_grad(dy, rstd, addend);
  return prepared.backward(tier, {output_mask[0], output_mask[1], false}, reuse);
}

L2NormForward l2_norm_forward(const at::Tensor& x, double eps) {
  const auto tier = x.dim() > 0 ? vector_tier(x) : Tier::ref;
  if (tier == Tier::ref) return ref::l2_norm_forward(x, eps);
  PreparedNorm prepared(x, 1);
  prepared.call.divisor = 1;
  auto y = prepared.forward(tier, /*centered=*/false, eps, /*keep=*/true);
  return {std::move(y), std::move(prepared.rstd)};
}

at::Tensor l2_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rnorm,
                            const at::Tensor& addend) {
  const auto tier = x.dim() > 0 ? vector_tier(x, dy, rnorm, addend) : Tier::ref;
  if (tier == Tier::ref) return ref::l2_norm_backward(dy, x, rnorm, addend);
  PreparedNorm prepared(x, 1);
  prepared.call.divisor = 1;
  prepared.set_grad(dy, rnorm, addend);
  return prepared.backward(tier, {true, false, false}, /*reuse=*/false).dx;
}

}  // namespace weft::kernels
