#include "weft/kernels/grouped.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>

#include <algorithm>

#include "weft/core/value.h"
#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/launch.h"
#include "weft/kernels/opmath.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {

GroupedMatrix::GroupedMatrix(const at::Tensor& stacked) : list_{stacked} {
  TORCH_CHECK_VALUE(stacked.dim() == 3 && stacked.is_contiguous(), "GroupedMatrix: got a tensor of shape ",
                    stacked.sizes(), " and strides ", stacked.strides(),
                    ", expected a contiguous tensor of shape [groups, rows, columns].");
  groups_ = stacked.sizes()[0], rows_ = stacked.sizes()[1], columns_ = stacked.sizes()[2];
}

GroupedMatrix::GroupedMatrix(c10::ArrayRef<at::Tensor> list, int64_t rows, int64_t columns)
    : list_(list.begin(), list.end()), groups_(static_cast<int64_t>(list.size())), rows_(rows), columns_(columns) {
  for (const auto& t : list)
    TORCH_CHECK_VALUE(t.numel() == rows * columns && t.is_contiguous() && t.scalar_type() == list[0].scalar_type(),
                      "GroupedMatrix: got a tensor of shape ", t.sizes(), ", strides ", t.strides(), " and dtype ",
                      dtype_name(t.scalar_type()), ", expected a contiguous tensor of ", rows, " x ", columns, " ",
                      dtype_name(list[0].scalar_type()), " elements.");
}

void* GroupedMatrix::data(int64_t g) const {
  if (list_.size() > 1) return list_[g].data_ptr();
  return static_cast<char*>(first().data_ptr()) + g * rows_ * columns_ * static_cast<int64_t>(first().element_size());
}

at::Tensor GroupedMatrix::matrix(int64_t g) const {
  const auto& t = list_.size() > 1 ? list_[g] : first();
  return t.dim() == 3 ? t.select(0, list_.size() > 1 ? 0 : g) : t.view({rows_, columns_});
}

namespace {

/// Whether the vector loops can read and write the tensors. Undefined ones are ignored.
bool vector_accessible(const at::Tensor& t) { return !t.defined() || vector_tier(t) != Tier::ref; }
bool vector_accessible(const GroupedMatrix& m) {
  return std::all_of(m.tensors().begin(), m.tensors().end(), [](const at::Tensor& t) { return vector_accessible(t); });
}

bool has_contiguous_rows(const at::Tensor& t) { return t.strides()[1] == 1 || t.sizes()[1] <= 1; }

/// Whether the grouped GEMM uses AMX: for small matrices packing costs more than it saves.
bool grouped_on_amx(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k) {
  return n * k >= 1024 && amx_supports(device, dtype, n, k);
}

enum class GroupedKernel { split, vector, amx };

/// The kernel for x and the matrices m; `fits`: the loops can read and write every other tensor.
GroupedKernel choose_kernel(GroupedPath path, const std::optional<GroupedQuantization>& quantization,
                            const at::Tensor& x, bool fits, const GroupedMatrix& m) {
  if (path == GroupedPath::split || quantization || !fits || vector_tier(x) == Tier::ref) return GroupedKernel::split;
  return grouped_on_amx(x.device().type(), x.scalar_type(), m.rows(), m.columns()) ? GroupedKernel::amx
                                                                                   : GroupedKernel::vector;
}

bool on_meta(const at::Tensor& t) { return t.device().type() == c10::DeviceType::Meta; }

at::Tensor empty(const at::Tensor& like, at::IntArrayRef sizes, at::ScalarType dtype) {
  return vector_accessible(like) ? new_empty(like, sizes, dtype) : at::empty(sizes, like.options().dtype(dtype));
}

/// Zeroes the rows after the last group.
void zero_tail(const GroupOffsets& offsets, const at::Tensor& t) {
  const auto rows = t.size(0) - offsets.total_rows();
  if (rows > 0) t.narrow(0, offsets.total_rows(), rows).zero_();
}

void check(const GroupIndex& index, const at::Tensor& x, const GroupedMatrix& m, int64_t columns) {
  TORCH_CHECK_VALUE(m.groups() == index.groups(), "grouped: got ", m.groups(), " matrices and ", index.groups(),
                    " splits, expected one split per matrix.");
  TORCH_CHECK_VALUE(x.dim() == 2 && (m.groups() == 0 || x.sizes()[1] == columns), "grouped: input has shape ",
                    x.sizes(), ", expected [rows, ", columns, "].");
}

}  // namespace

TierChoice choose_grouped_tier(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k) {
  auto choice = choose_gemm_tier(device, dtype, n, k);
  if (choice.tier != Tier::amx || grouped_on_amx(device, dtype, n, k)) return choice;
  return {vector_tier(device, dtype),
          c10::str("amx: not used for grouped weights of ", n * k, " elements (packing pays from 1024 on).")};
}

at::Tensor grouped_gemm(const GroupIndex& index, const at::Tensor& x, const GroupedMatrix& w, bool transposed,
                        const GroupedEpilogue& e) {
  check(index, x, w, transposed ? w.columns() : w.rows());
  const auto columns = transposed ? w.rows() : w.columns();
  const bool clear = !e.out.defined();
  const auto out = clear ? empty(x, {x.sizes()[0], columns}, x.scalar_type()) : e.out;
  if (on_meta(x)) return out;
  const bool fits = vector_accessible(w) && vector_accessible(e.bias) && vector_accessible(e.scales) &&
                    vector_accessible(out) && has_contiguous_rows(x);
  const auto kernel = choose_kernel(e.path, e.quantization, x, fits, w);
  const GroupedGemmCall call{x, w, transposed, e.bias, e.scales, out, e.quantization};
  launch([=] {
    const GroupOffsets offsets(index, call.x.sizes()[0]);
    if (clear) zero_tail(offsets, call.out);
    if (kernel == GroupedKernel::amx) return amx::grouped_gemm(offsets, call);
    if (kernel == GroupedKernel::vector) return vector_grouped_gemm(vector_tier(call.x), offsets, call);
    for (int64_t g = 0; g < offsets.groups(); ++g) split_gemm(offsets, call, g);
  });
  return out;
}

void grouped_weight_gradient(const GroupIndex& index, const at::Tensor& dy, const at::Tensor& x,
                             const GroupedMatrix& out, bool accumulate, GroupedPath path,
                             const std::optional<GroupedQuantization>& quantization) {
  check(index, dy, out, out.rows());
  check(index, x, out, out.columns());
  if (on_meta(x)) return;
  const auto kernel = choose_kernel(
      path, quantization, x,
      vector_accessible(dy) && vector_accessible(out) && has_contiguous_rows(dy) && has_contiguous_rows(x), out);
  const GroupedWgradCall call{dy, x, out, accumulate, quantization};
  launch([=] {
    const GroupOffsets offsets(index, call.x.sizes()[0]);
    if (kernel == GroupedKernel::amx) return amx::grouped_weight_gradient(offsets, call);
    if (kernel == GroupedKernel::vector) return vector_grouped_wgrad(vector_tier(call.x), offsets, call);
    for (int64_t g = 0; g < offsets.groups(); ++g) split_wgrad(offsets, call, g);
  });
}

namespace {

void split_bias_grad(const GroupOffsets& offsets, const GroupedBiasGradCall& call) {
  for (int64_t g = 0; g < offsets.groups(); ++g) {
    const auto part = [&](const at::Tensor& t) { return t.narrow(0, offsets.begin(g), offsets.rows(g)); };
    const auto dy = to_opmath(part(call.dy));
    if (call.db.defined()) {
      const auto scaled = call.scales.defined() ? at::mul(dy, part(call.scales).unsqueeze(1)) : dy;
      call.db.select(0, g).copy_(at::sum(scaled, 0));
    }
    if (call.ds.defined()) part(call.ds).copy_(at::sum(at::mul(dy, call.bias.matrix(g)), 1));
  }
}

}  // namespace

GroupedBiasGradient grouped_bias_gradient(const GroupIndex& index, const at::Tensor& dy, const at::Tensor& scales,
                                          const GroupedMatrix& bias, bool needs_db, bool needs_ds) {
  const auto rows = dy.sizes()[0], columns = dy.sizes()[1];
  GroupedBiasGradient out;
  if (needs_db) out.db = empty(dy, {index.groups(), columns}, dy.scalar_type());
  if (needs_ds) out.ds = empty(dy, {rows}, at::toOpMathType(dy.scalar_type()));
  if (on_meta(dy)) return out;
  const GroupedBiasGradCall call{dy, scales, bias, out.db, out.ds};
  const bool fits =
      vector_accessible(dy) && vector_accessible(scales) && vector_accessible(bias) && has_contiguous_rows(dy);
  launch([=] {
    const GroupOffsets offsets(index, call.dy.sizes()[0]);
    if (call.ds.defined()) zero_tail(offsets, call.ds);
    fits ? vector_grouped_bias_grad(vector_tier(call.dy), offsets, call) : split_bias_grad(offsets, call);
  });
  return out;
}

}  // namespace weft::kernels
