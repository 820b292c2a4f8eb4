#include "weft/kernels/gemm.h"

#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>

#include <algorithm>

#include "weft/kernels/opmath.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels::ref {
namespace {

/// scale·A B + bias in the dtype of A.
at::Tensor scaled_gemm(const at::Tensor& a, const at::Tensor& b, double scale, const at::Tensor& bias) {
  if (bias.defined()) return at::addmm(as_dtype(bias, a.scalar_type()), a, b, 1, scale);
  auto p = at::mm(a, b);
  return scale == 1 ? p : p.mul_(scale);
}

/// out = addend + scale·A B + bias, one row block at a time: a temporary of the size of `out` would double its memory.
void accumulate(const at::Tensor& a, const at::Tensor& b, const Epilogue& e, const at::Tensor& out) {
  constexpr int64_t kAccumulateRows = 64;
  for (int64_t m = 0; m < a.size(0); m += kAccumulateRows) {
    const auto rows = std::min(kAccumulateRows, a.size(0) - m);
    const auto p = scaled_gemm(a.narrow(0, m, rows), b, e.scale, e.bias);
    auto block = out.narrow(0, m, rows);
    if (!e.addend.defined()) {
      block.copy_(p);
    } else if (e.addend.is_same(out)) {
      block.add_(p);
    } else {
      at::add_out(block, e.addend.narrow(0, m, rows), p);
    }
  }
}

/// out = scale·A B, or out += scale·A B with `add`, where `out` has the opmath dtype of A and B. Converts A and B one
/// K-block at a time, so that nothing is rounded in between and no temporary has the size of `out`.
void accumulate_opmath(const at::Tensor& a, const at::Tensor& b, double scale, bool add, const at::Tensor& out) {
  constexpr int64_t kDepth = 256;
  if (a.size(1) == 0 && !add) out.zero_();
  for (int64_t k = 0; k < a.size(1); k += kDepth) {
    const auto depth = std::min(kDepth, a.size(1) - k);
    out.addmm_(to_opmath(a.narrow(1, k, depth)), to_opmath(b.narrow(0, k, depth)), add || k > 0 ? 1 : 0, scale);
  }
}

/// Copies `value` to `e.out` if it is defined, otherwise converts it to `dtype`.
at::Tensor stored(const at::Tensor& value, const Epilogue& e, at::ScalarType dtype) {
  return e.out.defined() ? e.out.copy_(value) : as_dtype(value, dtype);
}

/// The epilogue of v = scale·A B + bias, with a result of `dtype`.
GemmResult finish(at::Tensor v, const Epilogue& e, at::ScalarType dtype) {
  GemmResult r;
  if (e.keep_pre_act) r.pre_act = v;
  if (e.act) v = ref::activation_forward(*e.act, v);
  if (e.act_grad) {
    if (e.keep_act_output) r.act_output = ref::activation_forward(*e.act_grad, e.act_input);
    v = ref::activation_backward(*e.act_grad, v, e.act_input);
  }
  if (e.keep_column_sums) r.column_sums = at::sum(v, 0, /*keepdim=*/false, at::toOpMathType(v.scalar_type()));
  if (e.addend.defined()) v = at::add(v, e.addend);
  r.out = stored(v, e, dtype);
  return r;
}

}  // namespace

GemmResult gemm(const at::Tensor& a, const at::Tensor& b, Epilogue e) {
  const auto dtype = e.result_dtype(a.scalar_type());
  GemmResult r;
  const bool plain = !e.act && !e.act_grad && !e.keep_column_sums;
  if (plain && !e.keep_pre_act && e.out.defined()) {
    const bool same = dtype == a.scalar_type(), in_place = e.addend.is_same(e.out);
    const bool direct = !e.bias.defined() && (in_place || !e.addend.defined());
    if (direct && same && !in_place && e.scale == 1) {
      at::mm_out(e.out, a, b);
    } else if (direct && same) {
      e.out.addmm_(a, b, in_place ? 1 : 0, e.scale);
    } else if (direct && dtype == at::toOpMathType(a.scalar_type())) {
      accumulate_opmath(a, b, e.scale, in_place, e.out);
    } else {
      accumulate(a, b, e, e.out);
    }
    r.out = e.out;
    return r;
  }
  if (plain && !e.keep_pre_act && !e.bias.defined() && e.addend.defined() &&
      e.addend.scalar_type() == a.scalar_type() && dtype == a.scalar_type()) {
    r.out = at::addmm(e.addend, a, b, 1, e.scale);
    return r;
  }
  return finish(scaled_gemm(a, b, e.scale, e.bias), e, dtype);
}

GemmResult apply_epilogue(const at::Tensor& product, const Epilogue& e, at::ScalarType dtype) {
  auto v = e.scale == 1 ? product : product.mul(e.scale);
  if (e.bias.defined()) v = v.add(e.bias);
  if (e.act || e.act_grad || e.keep_pre_act) v = as_dtype(v, dtype);
  return finish(v, e, e.result_dtype(dtype));
}

}  // namespace weft::kernels::ref
