#include "weft/ops/identity.h"

#include "weft/ops/registry.h"

namespace weft::ops {

static const Register<Identity> identity{
    "Identity", {.summary = "Returns the input itself: y = x.", .shape = kSameShape}, {}};

}  // namespace weft::ops
