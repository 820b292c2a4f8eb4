#pragma once
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace weft::fuser {

/// Python dispatch modes. They see a pipeline as one call, not the inner calls, which write into internal buffers.
constexpr c10::DispatchKeySet kPythonModes({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});

/// Disables torch's autograd, autocast and dispatch modes inside a pipeline: weft differentiates and casts itself.
struct BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::autocast_dispatch_keyset | kPythonModes};
};

}  // namespace weft::fuser
