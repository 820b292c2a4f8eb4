#include "weft/kernels/group_offsets.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "weft/core/value.h"

namespace weft::kernels {
namespace {

/// offsets[g + 1] = offsets[g] + splits[g]; checks each split.
template <class T>
void prefix_sum(const T* splits, int64_t rows, c10::SmallVectorImpl<int64_t>& offsets) {
  int64_t sum = 0;
  const auto groups = static_cast<int64_t>(offsets.size()) - 1;
  for (int64_t g = 0; g < groups; ++g) {
    const auto split = static_cast<int64_t>(splits[g]);
    TORCH_CHECK_VALUE(split >= 0, "grouped: split ", g, " of ", groups, " is ", split, ", expected 0 or more rows.");
    TORCH_CHECK_VALUE(split <= rows - sum, "grouped: splits 0 to ", g, " sum to ", sum, " + ", split,
                      " rows, the input has ", rows, ". Splits must not sum to more rows than the input has.");
    sum += split;
    offsets[g + 1] = sum;
  }
}

}  // namespace

GroupOffsets::GroupOffsets(const GroupIndex& index, int64_t rows) {
  auto splits = index.splits_;
  if (!splits.device().is_cpu()) splits = splits.to(at::kCPU);
  if (!splits.is_contiguous()) splits = splits.contiguous();
  const auto dtype = splits.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kInt || dtype == at::kLong, "grouped: splits are ", dtype_name(dtype),
                   ", expected int32 or int64.");
  offsets_.resize(static_cast<size_t>(splits.numel()) + 1, 0);
  if (dtype == at::kInt)
    prefix_sum(splits.const_data_ptr<int32_t>(), rows, offsets_);
  else
    prefix_sum(splits.const_data_ptr<int64_t>(), rows, offsets_);
}

}  // namespace weft::kernels
