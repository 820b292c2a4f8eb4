#include "weft/kernels/norm.h"

#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/operand.h"
#include "weft/kernels/precision.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

using Sizes = c10::SmallVector<int64_t, 5>;

/// The sizes of x, those of the row replaced by 1.
Sizes statistic_sizes(const at::Tensor& x, int64_t row_dims) {
  Sizes sizes(x.sizes().begin(), x.sizes().end());
  std::fill(sizes.end() - row_dims, sizes.end(), 1);
  return sizes;
}

/// One call of a loop, and memory that it can read.
struct Problem {
  at::Tensor x, gamma, beta, mean, rstd, dy, add;
  int64_t rows = 1, row_dims;
  NormCall call;

  /// The row is the last `row_dims` dimensions of x.
  Problem(const at::Tensor& input, int64_t row_dims) : x(contiguous(input)), row_dims(row_dims) {
    call.columns = 1;
    const auto leading = x.dim() - row_dims;
    for (int64_t i = 0; i < x.dim(); ++i) (i < leading ? rows : call.columns) *= x.sizes()[i];
    call.divisor = static_cast<double>(std::max<int64_t>(call.columns, 1));
    call.dtype = x.scalar_type();
    call.x = x.const_data_ptr();
  }
  void set_params(const at::Tensor& g, const at::Tensor& b) {
    gamma = contiguous(g);
    call.gamma = gamma.const_data_ptr<float>();
    if (b.defined()) beta = contiguous(b), call.beta = beta.const_data_ptr<float>();
  }
  /// y; the statistics are left in `mean` and `rstd` if they are to be kept.
  at::Tensor forward(Tier tier, bool centred, double eps, bool keep) {
    auto y = fresh(x.sizes(), call.dtype);
    call.out = y.mutable_data_ptr();
    call.centred = centred, call.eps = eps;
    if (keep) {
      const auto sizes = statistic_sizes(x, row_dims);
      rstd = fresh(sizes, at::kFloat), call.rstd = rstd.mutable_data_ptr<float>();
      if (centred) mean = fresh(sizes, at::kFloat), call.mean = mean.mutable_data_ptr<float>();
    }
    in_rows(rows, call.columns, [&](int64_t begin, int64_t end) { norm_loops(tier).forward(call, begin, end); });
    return y;
  }
  void set_grad(const at::Tensor& grad, const at::Tensor& inverse, const at::Tensor& residual) {
    dy = contiguous(grad), rstd = contiguous(inverse);
    call.dy = dy.const_data_ptr(), call.dy_dtype = dy.scalar_type();
    call.rstd = const_cast<float*>(rstd.const_data_ptr<float>());  // backward only reads it
    if (!residual.defined()) return;
    add = contiguous(residual);
    call.add = add.const_data_ptr(), call.add_dtype = add.scalar_type();
  }
  void set_mean(const at::Tensor& m) {
    mean = contiguous(m);
    call.centred = true;
    call.mean = const_cast<float*>(mean.const_data_ptr<float>());
  }
  NormGrads backward(Tier tier, std::array<bool, 3> wanted, bool reuse) {
    NormGrads out;
    if (wanted[0]) {
      // A short row would be read while the one before it is still being stored.
      constexpr int64_t kLong = 64;
      const bool over = reuse && call.dy_dtype == call.dtype && call.columns >= kLong;
      out.dx = over ? dy : fresh(x.sizes(), call.dtype);
      call.out = out.dx.mutable_data_ptr();
    }
    if (!wanted[1] && !wanted[2]) {
      if (wanted[0])
        in_rows(rows, call.columns, [&](int64_t begin, int64_t end) { norm_loops(tier).backward(call, begin, end); });
      return out;
    }
    // dγ and dβ are one row of sums after the other, or one of them alone.
    const auto n = call.columns, both = static_cast<int64_t>(wanted[1]) + static_cast<int64_t>(wanted[2]);
    c10::SmallVector<float, 256> sums(static_cast<size_t>(both * n), 0.F);
    sum_in_rows(rows, both * n, sums.data(), [&](int64_t begin, int64_t end, float* partial) {
      NormCall part = call;
      if (wanted[1]) part.dgamma = partial;
      if (wanted[2]) part.dbeta = partial + (both - 1) * n;
      norm_loops(tier).backward(part, begin, end);
    });
    const auto stored = [&](int64_t first) {
      auto t = fresh(gamma.sizes(), at::kFloat);
      std::copy_n(sums.data() + first, n, t.mutable_data_ptr<float>());
      return t;
    };
    if (wanted[1]) out.dgamma = stored(0);
    if (wanted[2]) out.dbeta = stored((both - 1) * n);
    return out;
  }
};

bool are_float(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == at::kFloat && b.scalar_type() == at::kFloat;
}

}  // namespace

LayerNormForward layer_norm_forward(const at::Tensor& x, const at::Tensor& gamma, const at::Tensor& beta, double eps,
                                    bool keep) {
  const auto tier = are_float(gamma, beta) ? vector_tier(x, gamma, beta) : Tier::ref;
  if (tier == Tier::ref) return ref::layer_norm_forward(x, gamma, beta, eps);
  Problem problem(x, gamma.dim());
  problem.set_params(gamma, beta);
  auto y = problem.forward(tier, /*centred=*/true, eps, keep);
  return {std::move(y), std::move(problem.mean), std::move(problem.rstd)};
}

NormGrads layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& mean, const at::Tensor& rstd,
                              const at::Tensor& gamma, std::array<bool, 3> wanted, const at::Tensor& add, bool reuse) {
  const auto tier = are_float(gamma, rstd) ? vector_tier(x, dy, gamma, mean, rstd, add) : Tier::ref;
  if (tier == Tier::ref) return ref::layer_norm_backward(dy, x, mean, rstd, gamma, wanted, add);
  Problem problem(x, gamma.dim());
  problem.set_params(gamma, {});
  problem.set_grad(dy, rstd, add);
  problem.set_mean(mean);
  return problem.backward(tier, wanted, reuse);
}

RmsNormForward rms_norm_forward(const at::Tensor& x, const at::Tensor& gamma, double eps, bool keep) {
  const auto tier = are_float(gamma, gamma) ? vector_tier(x, gamma) : Tier::ref;
  if (tier == Tier::ref) return ref::rms_norm_forward(x, gamma, eps);
  Problem problem(x, gamma.dim());
  problem.set_params(gamma, {});
  auto y = problem.forward(tier, /*centred=*/false, eps, keep);
  return {std::move(y), std::move(problem.rstd)};
}

NormGrads rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rstd, const at::Tensor& gamma,
                            std::array<bool, 2> wanted, const at::Tensor& add, bool reuse) {
  const auto tier = are_float(gamma, rstd) ? vector_tier(x, dy, gamma, rstd, add) : Tier::ref;
  if (tier == Tier::ref) return ref::rms_norm_backward(dy, x, rstd, gamma, wanted, add);
  Problem problem(x, gamma.dim());
  problem.set_params(gamma, {});
  problem.set_grad(dy, rstd, add);
  return problem.backward(tier, {wanted[0], wanted[1], false}, reuse);
}

L2NormForward l2_norm_forward(const at::Tensor& x, double eps) {
  const auto tier = x.dim() > 0 ? vector_tier(x) : Tier::ref;
  if (tier == Tier::ref) return ref::l2_norm_forward(x, eps);
  Problem problem(x, 1);
  problem.call.divisor = 1;
  auto y = problem.forward(tier, /*centred=*/false, eps, /*keep=*/true);
  return {std::move(y), std::move(problem.rstd)};
}

at::Tensor l2_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& rnorm, const at::Tensor& add) {
  const auto tier = x.dim() > 0 ? vector_tier(x, dy, rnorm, add) : Tier::ref;
  if (tier == Tier::ref) return ref::l2_norm_backward(dy, x, rnorm, add);
  Problem problem(x, 1);
  problem.call.divisor = 1;
  problem.set_grad(dy, rnorm, add);
  return problem.backward(tier, {true, false, false}, /*reuse=*/false).dx;
}

}  // namespace weft::kernels
