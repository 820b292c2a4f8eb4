#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <memory>
#include <utility>
#include <vector>

#include "weft/ops/call_report.h"
#include "weft/quant/recipe.h"

namespace weft::kernels {
struct QuantizedMatrix;
}

namespace weft::ops {

using Params = c10::ArrayRef<at::Tensor>;

/// How the compute dtype of an operation is determined.
enum class DtypeRule {
  autocast,       // the autocast dtype, else that of x
  weight,         // the autocast dtype, else that of the first parameter
  promote,        // torch's type promotion of x and the other operand
  input,          // that of x, which must be a compute dtype
  opmath_output,  // that of x, which must be a compute dtype; the output has its opmath dtype
  any,            // that of x, which may be any dtype
  unknown,        // known only after the operation ran
};

/// What one call requires of one operation. Determined by the plan key; holds no tensor.
struct OpPlan {
  bool needs_input_grad = false;          // gradient of x
  std::vector<uint8_t> needs_param_grad;  // gradient of each parameter
  std::vector<uint8_t> needs_extra_grad;  // gradient of each extra input
  bool needs_grad = false;                // any of the above: forward saves what backward reads
  bool training = true;
  at::ScalarType autocast = at::ScalarType::Undefined;                        // Undefined: off
  const quant::Recipe* recipe = nullptr;                                      // of a quantized operation, else nullptr
  int param_base = 0, saved_base = 0, extra_in_base = 0, extra_out_base = 0;  // first slot in the call's flat lists

  /// The compute dtype: the autocast dtype if autocast is on, else `otherwise`.
  at::ScalarType dtype(at::ScalarType otherwise) const {
    return autocast == at::ScalarType::Undefined ? otherwise : autocast;
  }
};

/// The Parameters of a backward call; other code in backward sees only their values.
class LeafParams {
 public:
  LeafParams() = default;
  LeafParams(const LeafParams&) = delete;
  LeafParams& operator=(const LeafParams&) = delete;
  virtual ~LeafParams() = default;
  /// Parameter `p` of the call if it is a leaf; undefined if it was computed from other tensors.
  virtual at::Tensor leaf(int p) const = 0;
  /// Identifies the backward call; unique within the process.
  virtual int64_t graph_task_id() const = 0;
};

/// What the caller passes for operation `op`: buffers for its results (undefined: allocate); the state of delayed
/// scaling, of input and weight and of the output gradient, which it reads and updates; the weight as the caller
/// quantized it (null: the operation quantizes it).
struct Buffers {
  int op = 0;
  at::Tensor output = {}, grad_input = {};
  at::Tensor forward_scaling = {}, backward_scaling = {};
  std::shared_ptr<const kernels::QuantizedMatrix> weight = {};
};

/// The gradient that one backward step passes to the next. `packed` is its packed transpose, the operand layout of the
/// wgrad GEMM (GemmResult::packed_transpose), if the step kept it.
struct Gradient {
  at::Tensor value, packed;

  Gradient() = default;
  Gradient(at::Tensor v, at::Tensor p = {}) : value(std::move(v)), packed(std::move(p)) {}
};

/// Flat tensor lists of one call. The extra slots hold values in forward and the gradients of those values in backward.
struct Frame {
  at::Tensor* saved = nullptr;
  at::Tensor* extra_in = nullptr;
  at::Tensor* extra_out = nullptr;
  at::Tensor* param_grads = nullptr;  // backward only
  const at::Tensor* params = nullptr;
  std::vector<at::Tensor>* dynamic_saved = nullptr;      // saved by Python operations, whose count is not known ahead
  std::vector<std::shared_ptr<void>>* states = nullptr;  // one per operation: the contexts of Python operations
  const LeafParams* leaf_params = nullptr;   // backward only; nullptr in a functional call without Parameters
  std::vector<int> added_to_main_grad = {};  // operations whose weight gradient was added to main_grad
  c10::ArrayRef<Buffers> buffers = {};       // for operations with takes_buffers()
  PassReport* report = nullptr;              // run-time decisions; nullptr in a functional call
};

/// An operation's view of a call. Cheap to construct; not stored.
class OpContext {
 public:
  /// `saves` flags the slots of the call that backward reads; null: all. `packed_dy` belongs to the dy of `backward`;
  /// null: none.
  OpContext(const OpPlan& plan, Frame& frame, int index, const uint8_t* saves = nullptr,
            const at::Tensor* packed_dy = nullptr)
      : plan_(plan), frame_(frame), index_(index), saves_(saves), packed_dy_(packed_dy) {}

  bool needs_input_grad() const { return plan_.needs_input_grad; }
  bool needs_param_grad(int i) const { return plan_.needs_param_grad[i] != 0; }
  bool needs_extra_grad(int i) const { return plan_.needs_extra_grad[i] != 0; }
  bool needs_grad() const { return plan_.needs_grad; }
  bool training() const { return plan_.training; }
  const OpPlan& plan() const { return plan_; }

  at::ScalarType dtype(at::ScalarType otherwise) const { return plan_.dtype(otherwise); }

  /// Saves `t` for backward in one of the operation's slots, unless a fused backward does not read this slot.
  void save(int slot, at::Tensor t) {
    if (saves(slot)) frame_.saved[plan_.saved_base + slot] = std::move(t);
  }
  /// Whether backward reads what `save` would keep there.
  bool saves(int slot) const { return !saves_ || saves_[plan_.saved_base + slot] != 0; }
  const at::Tensor& saved(int slot) const { return frame_.saved[plan_.saved_base + slot]; }

  /// Forward: extra inputs and outputs.
  const at::Tensor& extra_input(int i) const { return frame_.extra_in[plan_.extra_in_base + i]; }
  at::Tensor take_extra_input(int i) { return std::move(frame_.extra_in[plan_.extra_in_base + i]); }
  /// For a fused operation that routes a channel between the operations it replaces.
  void set_extra_input(int i, at::Tensor t) { frame_.extra_in[plan_.extra_in_base + i] = std::move(t); }
  void set_extra_output(int i, at::Tensor t) { frame_.extra_out[plan_.extra_out_base + i] = std::move(t); }

  /// Backward: dy with its packed transpose.
  Gradient with_packed(const at::Tensor& dy) const { return {dy, packed_dy_ ? *packed_dy_ : at::Tensor()}; }

  /// Backward: gradients of extra outputs, extra inputs and parameters. An undefined gradient is zero.
  at::Tensor take_extra_output_grad(int i) { return std::move(frame_.extra_out[plan_.extra_out_base + i]); }
  void set_extra_input_grad(int i, at::Tensor t) { frame_.extra_in[plan_.extra_in_base + i] = std::move(t); }
  void set_param_grad(int i, at::Tensor t) { frame_.param_grads[plan_.param_base + i] = std::move(t); }

  /// The caller's buffers for this operation, or nullptr.
  const Buffers* buffers() const {
    for (const auto& given : frame_.buffers)
      if (given.op == index_) return &given;
    return nullptr;
  }

  /// Backward: the Parameters; nullptr in a functional call without Parameters.
  const LeafParams* leaf_params() const { return frame_.leaf_params; }

  /// Backward: records that a weight gradient of this operation was added to main_grad, for errors.
  void record_added_to_main_grad() { frame_.added_to_main_grad.push_back(index_); }

  /// Operations written in Python: parameters, the tensors they save and their contexts.
  const at::Tensor& param(int i) const { return frame_.params[plan_.param_base + i]; }
  std::vector<at::Tensor>& dynamic_saved() { return *frame_.dynamic_saved; }
  std::shared_ptr<void>& python_state() { return frame_.states->at(index_); }

  int index() const { return index_; }

 private:
  const OpPlan& plan_;
  Frame& frame_;
  int index_;
  const uint8_t* saves_;
  const at::Tensor* packed_dy_;
};

}  // namespace weft::ops
