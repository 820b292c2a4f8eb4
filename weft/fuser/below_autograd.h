#pragma once
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace weft::fuser {

/// Inside a pipeline torch's autograd and autocast are off: weft differentiates and casts itself.
struct BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::autocast_dispatch_keyset};
};

}  // namespace weft::fuser
