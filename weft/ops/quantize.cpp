#include "weft/ops/quantize.h"

#include "weft/ops/registry.h"

namespace weft::ops {

static const Register<Quantize> quantize{
    "Quantize",
    {.summary = "Marks where Transformer Engine quantizes: y = x.",
     .details = "Linears quantize their operands themselves, so the output is the input itself.",
     .shape = kSameShape},
    {}};

}  // namespace weft::ops
