#include "weft/ops/leading_dims.h"

#include <c10/util/accumulate.h>

#include "weft/kernels/rows.h"

namespace weft::ops {

at::Tensor share_version_counter(at::Tensor view, const at::Tensor& t) {
  const bool alias = view.storage().unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl();
  if (alias && !view.is_same(t) && !view.is_inference() && !t.is_inference())
    view.unsafeGetTensorImpl()->set_version_counter(t.unsafeGetTensorImpl()->version_counter());
  return view;
}

at::Tensor as_matrix(const at::Tensor& t) {
  if (t.dim() == 2) return t;
  const auto rows = c10::multiply_integers(t.sizes().slice(0, t.dim() - 1));
  return share_version_counter(t.reshape({rows, t.size(-1)}), t);
}

at::Tensor restore_leading_dims(const at::Tensor& matrix, at::IntArrayRef sizes) {
  if (sizes.size() == 2) return matrix;
  at::DimVector all(sizes);
  all.back() = matrix.size(1);
  return share_version_counter(matrix.view(all), matrix);
}

at::Tensor sum_rows(const at::Tensor& t) {
  if (t.dim() == 1) return t;
  return kernels::sum_rows(as_matrix(t));
}

}  // namespace weft::ops
