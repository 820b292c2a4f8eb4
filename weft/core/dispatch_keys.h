#pragma once
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace weft {

/// Python dispatch: tensor subclasses and modes. A mode sees a pipeline as one call, not the inner calls, which write
/// into internal buffers.
constexpr c10::DispatchKeySet kPythonKeys({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});

/// Wrappers of function transforms (vmap, grad, functionalize), whose tensors have no memory of their own.
constexpr c10::DispatchKeySet kFunctorchKeys(
    {c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::BatchedNestedTensor,
     c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::Batched, c10::DispatchKey::Functionalize});

/// Disables torch's autograd, autocast and dispatch modes in its scope: weft differentiates and casts itself.
struct BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                           c10::autocast_dispatch_keyset | kPythonKeys};
};

}  // namespace weft
