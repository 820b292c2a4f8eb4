#pragma once
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace weft::fuser {

/// Dispatch modes of Python. They see a pipeline as one call, not the calls inside, which write into buffers of weft's.
constexpr c10::DispatchKeySet kPythonModes({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});

/// Inside a pipeline torch's autograd and autocast are off, since weft differentiates and casts itself, and dispatch
/// modes are hidden.
struct BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::autocast_dispatch_keyset | kPythonModes};
};

}  // namespace weft::fuser
