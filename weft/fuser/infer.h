#pragma once
#include <string>
#include <vector>

#include "weft/fuser/plan.h"

namespace weft::fuser {

/// What a call leaves in one saved slot.
struct SavedSlot {
  int op;
  std::string name;
  std::optional<ops::Spec> spec;  // empty: the slot stays empty
  /// If it keeps x as it came to the operation: the operation that made that value, or -1 for the caller's input itself
  /// (or a view of it); -2 if it is memory of its own.
  int alias_of = -2;
};

/// Sizes and dtypes of a call, known without tensors. Sizes may be symbolic.
struct CallShapes {
  std::vector<ops::Spec> outputs;  // the main one, then the extra ones
  std::vector<SavedSlot> saved;    // in the order of the slots
  ops::Flops flops;                // of the GEMMs
};

/// Raises ValueError if tensors are missing or of sizes that an operation does not take, NotImplementedError if an
/// operation cannot tell (one written in Python).
CallShapes infer(const Pipeline& pipeline, const Plan& plan, ops::Spec x, const std::vector<ops::Spec>& params,
                 const std::vector<ops::Spec>& extras);

/// The same for tensors that exist.
CallShapes infer(const Pipeline& pipeline, const Plan& plan, const at::Tensor& x, c10::ArrayRef<at::Tensor> params,
                 c10::ArrayRef<at::Tensor> extras);

/// The value that operation i reads, as the operation that made it: -1 is the pipeline's input.
std::vector<int> value_origins(const Pipeline& pipeline, const Plan& plan);

}  // namespace weft::fuser
