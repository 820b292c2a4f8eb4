// The error bound of the GEMM tests accepts a correct result and rejects what a faulty kernel would store.
#include "tests/cpp/kernels/gemm_bound.h"

#include <ATen/ops/randn.h>
#include <gtest/gtest-spi.h>

namespace weft::kernels {
namespace {

struct BoundCase {
  at::Tensor a = at::randn({40, 70}).to(at::kBFloat16), b = at::randn({70, 50}).to(at::kBFloat16);
  at::Tensor exact = at::mm(in_float64(a), in_float64(b));
  Bounded want = bounded_gemm(a, b);
};

TEST(KernelsGemmBound, AcceptsCorrectlyRoundedResult) {
  at::manual_seed(1);
  const BoundCase c;
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) expect_within(c.exact.to(dtype), c.want, "rounded");
}

TEST(KernelsGemmBound, RejectsZeros) {
  static BoundCase c;
  EXPECT_NONFATAL_FAILURE(expect_within(at::zeros_like(c.exact).to(at::kBFloat16), c.want, ""), "elements are wrong");
}

TEST(KernelsGemmBound, RejectsElementTwoUlpsOff) {
  static BoundCase c;
  static auto got = c.exact.to(at::kBFloat16);
  got[39][49].mul_(1 + 0x1p-6);
  EXPECT_NONFATAL_FAILURE(expect_within(got, c.want, ""),
                          "1 of 2000 elements are wrong, the first in row 39, column 49");
}

TEST(KernelsGemmBound, RejectsMissingTerm) {
  static BoundCase c;
  static auto got = at::mm(in_float64(c.a).narrow(1, 0, 69), in_float64(c.b).narrow(0, 0, 69)).to(at::kFloat);
  EXPECT_NONFATAL_FAILURE(expect_within(got, c.want, ""), "elements are wrong");
}

TEST(KernelsGemmBound, RejectsFloat32RoundedToBfloat16) {
  static BoundCase c;
  static auto got = c.exact.to(at::kBFloat16).to(at::kFloat);
  EXPECT_NONFATAL_FAILURE(expect_within(got, c.want, ""), "elements are wrong");
}

TEST(KernelsGemmBound, RejectsNan) {
  static BoundCase c;
  static auto got = c.exact.to(at::kFloat);
  got[0][0] = std::nan("");
  EXPECT_NONFATAL_FAILURE(expect_within(got, c.want, ""), "1 of 2000 elements are wrong");
}

}  // namespace
}  // namespace weft::kernels
