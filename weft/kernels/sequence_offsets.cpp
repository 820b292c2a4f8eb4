#include "weft/kernels/sequence_offsets.h"

#include <algorithm>

#include "weft/core/value.h"

namespace weft::kernels {

SequenceOffsets::SequenceOffsets(const at::Tensor& cu_seqlens, int64_t rows, const char* name) {
  const auto dtype = cu_seqlens.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kInt || dtype == at::kLong, name, " is ", dtype_name(dtype),
                   ", expected int32 or int64.");
  TORCH_CHECK_VALUE(cu_seqlens.dim() == 1 && cu_seqlens.numel() > 0, name, " has shape ", cu_seqlens.sizes(),
                    ", expected one dimension with the number of sequences + 1.");
  const auto offsets = cu_seqlens.to(at::kCPU, at::kLong).contiguous();
  const auto* values = offsets.const_data_ptr<int64_t>();
  offsets_.assign(values, values + offsets.numel());
  TORCH_CHECK_VALUE(offsets_[0] == 0, name, " starts with ", offsets_[0], ", expected 0.");
  for (int64_t i = 0; i < sequences(); ++i)
    TORCH_CHECK_VALUE(begin(i) <= end(i), name, " decreases from ", begin(i), " to ", end(i), " at index ", i + 1,
                      ", expected offsets that do not decrease.");
  TORCH_CHECK_VALUE(offsets_.back() == rows, name, " ends with ", offsets_.back(), ", expected ", rows,
                    ", the number of rows: packed sequences have no padding.");
}

int64_t SequenceOffsets::longest() const {
  int64_t most = 0;
  for (int64_t i = 0; i < sequences(); ++i) most = std::max(most, rows(i));
  return most;
}

}  // namespace weft::kernels
