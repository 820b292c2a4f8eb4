#pragma once
#include <ATen/core/Tensor.h>

namespace weft {

/// True if `t` is the only handle on its tensor and that tensor the only user of its storage: nobody else can read what
/// a write into it would change. Views, saved copies and Python names all show up in one of the two counts.
inline bool sole_owner(const at::Tensor& t) {
  return t.defined() && t.use_count() == 1 && t.has_storage() && t.storage().use_count() == 1;
}

}  // namespace weft
