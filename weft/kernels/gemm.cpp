#include "weft/kernels/gemm.h"

#include "weft/kernels/tiers.h"

namespace weft::kernels {

GemmResult gemm(const at::Tensor& a, const at::Tensor& b, Epilogue epilogue) {
  return ref::gemm(a, b, std::move(epilogue));
}

Choice gemm_choice(c10::DeviceType device, at::ScalarType dtype, int64_t, int64_t) {
  return vector_choice(device, dtype);
}

}  // namespace weft::kernels
