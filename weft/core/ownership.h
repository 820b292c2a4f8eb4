#pragma once
#include <ATen/core/Tensor.h>

namespace weft {

/// True if `t` is the only reference to its TensorImpl and that is the only user of its storage, so that a write into
/// `t` is not observable elsewhere. Views, saved copies and Python references raise one of the two counts.
inline bool sole_owner(const at::Tensor& t) {
  return t.defined() && t.use_count() == 1 && t.has_storage() && t.storage().use_count() == 1;
}

}  // namespace weft
