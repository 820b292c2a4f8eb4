#include "weft/ops/quantize.h"

#include "weft/ops/registry.h"

namespace weft::ops {

static const Register<Quantize> quantize{
    "Quantize", "Marks where tensors may be quantized. Recipes are not supported, so y is x itself.", {}};

}  // namespace weft::ops
