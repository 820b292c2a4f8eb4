#include "weft/ops/identity.h"

#include "weft/ops/registry.h"

namespace weft::ops {

static const Register<Identity> identity{"Identity", "y is x itself.", {}};

}  // namespace weft::ops
