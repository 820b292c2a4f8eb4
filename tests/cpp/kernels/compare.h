#pragma once
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/isclose.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <vector>

#include "weft/kernels/activation.h"
#include "weft/kernels/tier.h"

// Shared by the tests of the vector kernels: dtypes, odd sizes, and comparison with float64.

namespace weft::kernels {

inline const std::vector<at::ScalarType> kVectorDtypes{at::kFloat, at::kBFloat16, at::kHalf};
inline const std::vector<int64_t> kOddSizes{0, 1, 7, 17, 33, 100};

inline std::vector<Act> every_act() {
  std::vector<Act> acts;
  for (auto kind = ActKind::gelu; kind <= ActKind::clamped_swiglu; kind = static_cast<ActKind>(int(kind) + 1))
    acts.push_back({.kind = kind, .limit = 0.75, .alpha = 1.3, .offset = 0.5, .beta1 = 3, .beta2 = 12});
  return acts;
}

/// ATen rounds intermediate results, and its GELU cancels at -5.
inline double slack() { return vector_tier(c10::DeviceType::CPU, at::kFloat) == Tier::ref ? 4 : 1; }

/// One ulp; for float32 the error of a few operations.
inline double tolerance(at::ScalarType dtype) {
  return slack() * (dtype == at::kFloat ? 2e-6 : dtype == at::kBFloat16 ? 0x1p-8 + 1e-5 : 0x1p-11 + 1e-5);
}

/// Expects `got` to be `truth` (float64) within about one rounding; `scale` is the magnitude of the summed terms.
inline void expect_near(const at::Tensor& got, const at::Tensor& truth, double scale = 1) {
  ASSERT_EQ(got.sizes(), truth.sizes());
  const auto rtol = tolerance(got.scalar_type());
  const auto close =
      at::isclose(got.to(at::kDouble), truth, rtol, 1e-6 * slack() * slack() * scale, /*equal_nan=*/true);
  EXPECT_TRUE(close.all().item<bool>()) << "largest difference " << (got.to(at::kDouble) - truth).abs().max() << "\n"
                                        << got << truth;
}

/// Random values of a dtype; with `gaps`, the last dimension has stride 2.
inline at::Tensor values(at::IntArrayRef sizes, at::ScalarType dtype, bool gaps = false) {
  auto wider = sizes.vec();
  if (gaps) wider.back() = 2 * wider.back() + 1;
  auto t = (at::randn(wider) * 2).to(dtype);
  return gaps ? t.narrow(-1, 1, 2 * sizes.back()).slice(-1, 0, 2 * sizes.back(), 2) : t;
}

inline at::Tensor exact(const at::Tensor& t) { return t.defined() ? t.to(at::kDouble) : t; }

}  // namespace weft::kernels
