#pragma once
#include <string>
#include <vector>

#include "weft/fuser/plan.h"

namespace weft::fuser {

/// What a call saves in one slot.
struct SavedSlot {
  int op;                                        // the operation that saves it
  std::string name;                              // from BasicOp::saved_names
  std::optional<ops::Spec> spec = std::nullopt;  // empty: the slot stays empty
  ops::SavedFrom from = ops::SavedFrom::own_memory;
  /// SavedFrom::input: the operation that produced the input, -1 if it is the caller's input or a view of it.
  /// SavedFrom::parameter: index in the parameters of the call.
  int index = -1;

  bool is_caller_input() const { return from == ops::SavedFrom::input && index == -1; }
  /// False if the slot is empty, or if backward has its tensor anyway: as the caller's input or as a parameter.
  bool is_stored() const { return spec && from != ops::SavedFrom::parameter && !is_caller_input(); }
};

/// Sizes and dtypes of a call, inferred without running it. Sizes may be symbolic.
struct CallShapes {
  std::vector<ops::Spec> outputs;  // the main output, then the extra outputs
  std::vector<SavedSlot> saved;    // in slot order
  ops::Flops flops;                // of the GEMMs
};

/// Raises ValueError if tensors are missing or have sizes that an operation does not support, NotImplementedError if an
/// operation cannot infer its sizes (written in Python).
CallShapes infer(const Pipeline& pipeline, const Plan& plan, ops::Spec x, const std::vector<ops::Spec>& params,
                 const std::vector<ops::Spec>& extras);

/// The same from tensors.
CallShapes infer(const Pipeline& pipeline, const Plan& plan, const at::Tensor& x, c10::ArrayRef<at::Tensor> params,
                 c10::ArrayRef<at::Tensor> extras);

/// For each operation, the operation that produced its input, skipping those that return their own input or a view of
/// it; -1: the pipeline's input. The last entry, at `size()`, is that of the pipeline's output.
std::vector<int> value_origins(const Pipeline& pipeline, const Plan& plan);

}  // namespace weft::fuser
