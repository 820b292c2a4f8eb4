#include "weft/ops/quantize.h"

#include "weft/ops/registry.h"

namespace weft::ops {

static const Register<Quantize> quantize{
    "Quantize", "Where values may be quantized; without a recipe y is x itself.", {}};

}  // namespace weft::ops
