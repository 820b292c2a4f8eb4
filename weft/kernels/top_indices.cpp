#include "weft/kernels/top_indices.h"

#include <cmath>
#include <numeric>

#include "weft/kernels/cpu_tensors.h"

namespace weft::kernels {

at::Tensor top_indices(const at::Tensor& matrix, int64_t k) {
  const auto dense = contiguous(matrix);
  const auto rows = dense.sizes()[0], columns = dense.sizes()[1];
  TORCH_CHECK_VALUE(k >= 0 && k <= columns, "top_indices: k is ", k, ", expected 0 to ", columns, ".");
  auto out = empty_cpu({rows, k}, at::kLong);
  const auto* const values = dense.const_data_ptr<float>();
  auto* const indices = out.mutable_data_ptr<int64_t>();
  parallel_rows(rows, columns * 8, [&](int64_t begin, int64_t end) {  // a comparison costs as much as 8 elements
    std::vector<int32_t> order(static_cast<size_t>(columns));
    for (auto row = begin; row < end; ++row) {
      const auto* const x = values + row * columns;
      std::iota(order.begin(), order.end(), 0);
      std::partial_sort(order.begin(), order.begin() + k, order.end(), [x](int32_t a, int32_t b) {
        if (x[a] > x[b] || (std::isnan(x[a]) && !std::isnan(x[b]))) return true;
        return a < b && (x[a] == x[b] || (std::isnan(x[a]) && std::isnan(x[b])));
      });
      std::copy_n(order.begin(), k, indices + row * k);
    }
  });
  return out;
}

}  // namespace weft::kernels
