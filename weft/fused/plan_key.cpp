#include "weft/fused/plan_key.h"

namespace weft::fused {

TensorMeta TensorMeta::unpack(uint32_t word) {
  return {static_cast<at::ScalarType>(word & 0xff), static_cast<c10::DeviceType>(word >> 8 & 0xff),
          (word >> 16 & 1) != 0, (word >> 17 & 1) != 0, (word >> 18 & 1) != 0};
}

TensorMeta TensorMeta::of(const at::Tensor& t, bool grad_mode) {
  if (!t.defined()) return {.defined = false};
  return {t.scalar_type(), t.device().type(), true, grad_mode && t.requires_grad(), t.is_contiguous()};
}

}  // namespace weft::fused
