// Runs a program that AOTInductor packaged: load_package <file>. The input is linspace(-1, 1) of shape [40, 32]; prints
// the sum of the absolute values of the result. Linkers drop a library whose symbols nobody uses, so it uses one.
#include <ATen/ops/linspace.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>

#include "weft/ops/registry.h"

int main(int argc, char** argv) {
  if (argc != 2 || weft::ops::op_types().empty()) {
    std::fprintf(stderr, "usage: load_package <file>\n");
    return 2;
  }
  torch::inductor::AOTIModelPackageLoader loader(argv[1]);
  const auto results = loader.run({at::linspace(-1, 1, 40 * 32).view({40, 32})});
  std::printf("%.6f\n", results.at(0).abs().sum().item<double>());
  return 0;
}
