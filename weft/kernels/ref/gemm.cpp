#include "weft/kernels/gemm.h"

#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>

#include <algorithm>

#include "weft/kernels/precision.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels::ref {
namespace {

/// scale·A B + bias in the dtype of A.
at::Tensor product(const at::Tensor& a, const at::Tensor& b, double scale, const at::Tensor& bias) {
  if (bias.defined()) return at::addmm(round_to(bias, a.scalar_type()), a, b, 1, scale);
  auto p = at::mm(a, b);
  return scale == 1 ? p : p.mul_(scale);
}

/// out = add + scale·A B row block by row block: a temporary of the size of `out` would double its memory.
void accumulate(const at::Tensor& a, const at::Tensor& b, const Epilogue& e, const at::Tensor& out) {
  constexpr int64_t kRows = 64;
  for (int64_t m = 0; m < a.size(0); m += kRows) {
    const auto rows = std::min(kRows, a.size(0) - m);
    const auto p = product(a.narrow(0, m, rows), b, e.scale, e.bias);
    auto block = out.narrow(0, m, rows);
    if (!e.add.defined()) {
      block.copy_(p);
    } else if (e.add.is_same(out)) {
      block.add_(p);
    } else {
      at::add_out(block, e.add.narrow(0, m, rows), p);
    }
  }
}

/// `value` in `dtype`, in `out` if that is given.
at::Tensor stored(const at::Tensor& value, const Epilogue& e, at::ScalarType dtype) {
  return e.out.defined() ? e.out.copy_(value) : round_to(value, dtype);
}

}  // namespace

GemmResult gemm(const at::Tensor& a, const at::Tensor& b, Epilogue e) {
  const auto dtype = e.out.defined()                        ? e.out.scalar_type()
                     : e.dtype == at::ScalarType::Undefined ? a.scalar_type()
                                                            : e.dtype;
  GemmResult r;
  const bool plain = !e.act && !e.slope && !e.keep_sums;
  if (plain && !e.keep_pre && e.out.defined()) {
    const bool same = dtype == a.scalar_type();
    if (same && !e.bias.defined() && e.add.is_same(e.out)) {
      e.out.addmm_(a, b, 1, e.scale);
    } else if (same && e.scale == 1 && !e.bias.defined() && !e.add.defined()) {
      at::mm_out(e.out, a, b);
    } else {
      accumulate(a, b, e, e.out);
    }
    r.out = e.out;
    return r;
  }
  if (plain && !e.keep_pre && !e.bias.defined() && e.add.defined() && e.add.scalar_type() == a.scalar_type() &&
      dtype == a.scalar_type()) {
    r.out = at::addmm(e.add, a, b, 1, e.scale);
    return r;
  }
  auto v = product(a, b, e.scale, e.bias);
  if (e.keep_pre) r.pre = v;
  if (e.act) v = activation_forward(*e.act, v);
  if (e.slope) {
    if (e.keep_again) r.again = activation_forward(*e.slope, e.at);
    v = activation_backward(*e.slope, v, e.at);
  }
  if (e.keep_sums) r.sums = at::sum(v, 0, /*keepdim=*/false, wide(v.scalar_type()));
  if (e.add.defined()) v = at::add(v, e.add);
  r.out = stored(v, e, dtype);
  return r;
}

}  // namespace weft::kernels::ref
