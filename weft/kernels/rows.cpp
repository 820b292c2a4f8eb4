#include "weft/kernels/rows.h"

#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {

at::Tensor sum_rows(const at::Tensor& matrix) {
  const auto tier = vector_tier(matrix);
  if (tier == Tier::ref) return ref::sum_rows(matrix);
  const auto m = contiguous(matrix);
  const auto rows = m.sizes()[0], columns = m.sizes()[1];
  const auto dtype = m.scalar_type();
  auto sums = new_zeros_f32(m, columns);
  parallel_reduce_rows(rows, columns, sums.mutable_data_ptr<float>(), [&](int64_t begin, int64_t end, float* partial) {
    row_loops(tier).add_rows(dtype, m.const_data_ptr(), columns, partial, begin, end);
  });
  return rounded(sums, dtype);
}

at::Tensor rounded(const at::Tensor& t, at::ScalarType dtype) {
  const auto from = t.scalar_type();
  if (from == dtype) return t;
  const auto tier = from == at::kFloat && at::isReducedFloatingType(dtype) ? vector_tier(t) : Tier::ref;
  if (tier == Tier::ref || !t.is_contiguous()) return t.to(dtype);
  auto out = new_empty(t, t.sizes(), dtype);
  row_loops(tier).round(dtype, t.const_data_ptr<float>(), out.mutable_data_ptr(), t.numel());
  return out;
}

at::Tensor scaled_mask_add(const at::Tensor& x, const at::Tensor& mask, double scale, const at::Tensor& addend) {
  const auto tier = is_plain_strided(mask) && mask.scalar_type() == at::kBool ? vector_tier(x, addend) : Tier::ref;
  if (tier == Tier::ref) return ref::scaled_mask_add(x, mask, scale, addend);
  const auto dense_x = contiguous(x, x.numel(), "the input"), dense_mask = contiguous(mask, x.numel(), "the mask");
  const auto dense_addend = addend.defined() ? contiguous(addend, x.numel(), "the tensor to add") : addend;
  auto out = new_empty(x, x.sizes(), x.scalar_type());
  const MaskCall call{.dtype = x.scalar_type(),
                      .addend_dtype = addend.defined() ? addend.scalar_type() : at::kFloat,
                      .x = dense_x.const_data_ptr(),
                      .addend = data_or_null(dense_addend),
                      .mask = dense_mask.const_data_ptr<bool>(),
                      .out = out.mutable_data_ptr(),
                      .scale = static_cast<float>(scale)};
  parallel_rows(x.numel(), 1, [&](int64_t begin, int64_t end) { row_loops(tier).scaled_mask_add(call, begin, end); });
  return out;
}

void sum_terms(const std::vector<at::Tensor>& terms, const at::Tensor& out) {
  const auto fits = [](const at::Tensor& t) {
    return vector_tier(t) != Tier::ref && (t.sizes()[1] <= 1 || t.strides()[1] == 1);
  };
  if (!fits(out) || !std::all_of(terms.begin(), terms.end(), fits)) return ref::sum_terms(terms, out);
  const auto rows_of = [](const at::Tensor& t) {
    return RowMajorView{const_cast<void*>(t.const_data_ptr()), t.strides()[0], t.scalar_type()};
  };
  SumCall call{.columns = out.sizes()[1], .out = rows_of(out)};
  for (const auto& t : terms) call.terms.push_back(rows_of(t));
  parallel_rows(out.sizes()[0], call.columns,
                [&](int64_t begin, int64_t end) { row_loops(vector_tier(out)).sum_terms(call, begin, end); });
}

}  // namespace weft::kernels
