#include "weft/kernels/grouped.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>

#include <algorithm>

#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/launch.h"
#include "weft/kernels/operand.h"
#include "weft/kernels/precision.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {

GroupedMatrix::GroupedMatrix(const at::Tensor& packed) : list_{packed} {
  TORCH_CHECK_VALUE(packed.dim() == 3 && packed.is_contiguous(), "GroupedMatrix: got a tensor of shape ",
                    packed.sizes(), ", expected [groups, rows, columns] without gaps.");
  groups_ = packed.sizes()[0], rows_ = packed.sizes()[1], columns_ = packed.sizes()[2];
}

GroupedMatrix::GroupedMatrix(c10::ArrayRef<at::Tensor> list, int64_t rows, int64_t columns)
    : list_(list.begin(), list.end()), groups_(static_cast<int64_t>(list.size())), rows_(rows), columns_(columns) {
  for (const auto& t : list)
    TORCH_CHECK_VALUE(t.numel() == rows * columns && t.is_contiguous() && t.scalar_type() == list[0].scalar_type(),
                      "GroupedMatrix: got a tensor of shape ", t.sizes(), " and dtype ", t.scalar_type(), ", expected ",
                      rows, " x ", columns, " values of ", list[0].scalar_type(), " without gaps.");
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

/// Whether loops can read and write all of these; undefined ones do not count.
bool bare(const at::Tensor& t) { return !t.defined() || vector_tier(t) != Tier::ref; }
bool bare(const GroupedMatrix& m) {
  return std::all_of(m.tensors().begin(), m.tensors().end(), [](const at::Tensor& t) { return bare(t); });
}

/// Whether the values of a row follow each other.
bool gapless(const at::Tensor& t) { return t.strides()[1] == 1 || t.sizes()[1] <= 1; }

/// Whether groups are multiplied in tiles: matrices of few values are multiplied sooner than laid out.
bool in_tiles(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k) {
  return n * k >= 1024 && has_tiles(device, dtype, n, k);
}

enum class Way { split, rows, tiles };

/// How a product of matrices [rows, columns] of x's dtype is computed, if `fits`.
Way way_of(GroupedPath path, const at::Tensor& x, bool fits, const GroupedMatrix& m) {
  if (path == GroupedPath::split || !fits || vector_tier(x) == Tier::ref) return Way::split;
  return in_tiles(x.device().type(), x.scalar_type(), m.rows(), m.columns()) ? Way::tiles : Way::rows;
}

bool on_meta(const at::Tensor& t) { return t.device().type() == c10::DeviceType::Meta; }

at::Tensor empty(const at::Tensor& like, at::IntArrayRef sizes, at::ScalarType dtype) {
  return bare(like) ? fresh(sizes, dtype) : at::empty(sizes, like.options().dtype(dtype));
}

/// Rows of no group are 0.
void clear_tail(const OpenIndex& index, const at::Tensor& t) {
  const auto rows = t.size(0) - index.active();
  if (rows > 0) t.narrow(0, index.active(), rows).zero_();
}

void check(const GroupIndex& index, const at::Tensor& x, const GroupedMatrix& m, int64_t columns) {
  TORCH_CHECK_VALUE(m.groups() == index.groups(), "grouped: ", m.groups(), " matrices for ", index.groups(),
                    " splits, expected one for each.");
  TORCH_CHECK_VALUE(x.dim() == 2 && (m.groups() == 0 || x.sizes()[1] == columns), "grouped: input has shape ",
                    x.sizes(), ", expected [rows, ", columns, "].");
}

}  // namespace

Choice grouped_choice(c10::DeviceType device, at::ScalarType dtype, int64_t n, int64_t k) {
  auto choice = gemm_choice(device, dtype, n, k);
  if (choice.tier != Tier::amx || in_tiles(device, dtype, n, k)) return choice;
  return {vector_tier(device, dtype),
          "amx declined: matrices of few values are multiplied sooner than laid out in tiles"};
}

at::Tensor grouped_gemm(const GroupIndex& index, const at::Tensor& x, const GroupedMatrix& w, bool transposed,
                        const GroupedEpilogue& e) {
  check(index, x, w, transposed ? w.columns() : w.rows());
  const auto columns = transposed ? w.rows() : w.columns();
  const bool clear = !e.out.defined();
  const auto out = clear ? empty(x, {x.sizes()[0], columns}, x.scalar_type()) : e.out;
  if (on_meta(x)) return out;
  const bool fits = bare(w) && bare(e.bias) && bare(e.scales) && bare(out) && gapless(x);
  const auto way = way_of(e.path, x, fits, w);
  const GroupedProduct call{x, w, transposed, e.bias, e.scales, out};
  launch([=] {
    const OpenIndex open(index, call.x.sizes()[0]);
    if (clear) clear_tail(open, call.out);
    if (way == Way::tiles) return amx::grouped_gemm(open, call);
    if (way == Way::rows) return grouped_rows(vector_tier(call.x), open, call);
    for (int64_t g = 0; g < open.groups(); ++g) split_gemm(open, call, g);
  });
  return out;
}

void grouped_weight_gradient(const GroupIndex& index, const at::Tensor& dy, const at::Tensor& x,
                             const GroupedMatrix& out, bool add, GroupedPath path) {
  check(index, dy, out, out.rows());
  check(index, x, out, out.columns());
  if (on_meta(x)) return;
  const auto way = way_of(path, x, bare(dy) && bare(out) && gapless(dy) && gapless(x), out);
  const GroupedGradient call{dy, x, out, add};
  launch([=] {
    const OpenIndex open(index, call.x.sizes()[0]);
    if (way == Way::tiles) return amx::grouped_weight_gradient(open, call);
    if (way == Way::rows) return grouped_rows(vector_tier(call.x), open, call);
    for (int64_t g = 0; g < open.groups(); ++g) split_weight_gradient(open, call, g);
  });
}

namespace {

void split_bias_sums(const OpenIndex& index, const GroupedBiasSums& call) {
  for (int64_t g = 0; g < index.groups(); ++g) {
    const auto part = [&](const at::Tensor& t) { return t.narrow(0, index.begin(g), index.rows(g)); };
    const auto dy = widen(part(call.dy));
    if (call.db.defined()) {
      const auto scaled = call.scales.defined() ? at::mul(dy, part(call.scales).unsqueeze(1)) : dy;
      call.db.select(0, g).copy_(at::sum(scaled, 0));
    }
    if (call.ds.defined()) part(call.ds).copy_(at::sum(at::mul(dy, call.bias.matrix(g)), 1));
  }
}

}  // namespace

GroupedBiasGradient grouped_bias_gradient(const GroupIndex& index, const at::Tensor& dy, const at::Tensor& scales,
                                          const GroupedMatrix& bias, bool db_wanted, bool ds_wanted) {
  const auto rows = dy.sizes()[0], columns = dy.sizes()[1];
  GroupedBiasGradient out;
  if (db_wanted) out.db = empty(dy, {index.groups(), columns}, dy.scalar_type());
  if (ds_wanted) out.ds = empty(dy, {rows}, wide(dy.scalar_type()));
  if (on_meta(dy)) return out;
  const GroupedBiasSums call{dy, scales, bias, out.db, out.ds};
  const bool fits = bare(dy) && bare(scales) && bare(bias) && gapless(dy);
  launch([=] {
    const OpenIndex open(index, call.dy.sizes()[0]);
    if (call.ds.defined()) clear_tail(open, call.ds);
    fits ? grouped_rows(vector_tier(call.dy), open, call) : split_bias_sums(open, call);
  });
  return out;
}

}  // namespace weft::kernels
