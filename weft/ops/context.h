#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <memory>
#include <utility>
#include <vector>

namespace weft::ops {

using Params = c10::ArrayRef<at::Tensor>;

/// Where the compute dtype of an operation comes from: autocast or the dtype of x, autocast or the weight's, torch's
/// promotion of x and weight, always x, or nobody can tell before it ran.
enum class DtypeRule { autocast, weight, promote, input, unknown };

/// What one call asks of one operation. Follows from the plan key, holds no tensor.
struct OpPlan {
  bool needs_input_grad = false;          // gradient of x
  std::vector<uint8_t> needs_param_grad;  // gradient of each parameter
  std::vector<uint8_t> needs_extra_grad;  // gradient of each extra input
  bool needs_grad = false;                // any of them: save what backward needs
  bool training = true;
  at::ScalarType autocast = at::ScalarType::Undefined;                        // Undefined: off
  int param_base = 0, saved_base = 0, extra_in_base = 0, extra_out_base = 0;  // first slot in the call's flat lists

  /// The dtype to compute in: autocast's, else by rule.
  at::ScalarType dtype(at::ScalarType otherwise) const {
    return autocast == at::ScalarType::Undefined ? otherwise : autocast;
  }
};

/// The Parameters behind a backward run, which otherwise sees values only.
class LeafParams {
 public:
  LeafParams() = default;
  LeafParams(const LeafParams&) = delete;
  LeafParams& operator=(const LeafParams&) = delete;
  virtual ~LeafParams() = default;
  /// The leaf that parameter `p` of the call is, or undefined if it was computed from others.
  virtual at::Tensor leaf(int p) const = 0;
  /// Differs between backward runs of the process.
  virtual int64_t graph_task_id() const = 0;
};

/// Memory that the caller gives an operation for its results; undefined: fresh.
struct Buffers {
  int op = 0;
  at::Tensor output = {}, grad_input = {};
};

/// A gradient whose values also lie in the order in which a weight gradient's product takes them
/// (GemmResult::packed_transpose).
struct PackedGradient {
  at::Tensor gradient = {}, packed = {};
};

/// Flat lists of one call. In forward the extra slots hold values, in backward the gradients of those values.
struct Frame {
  at::Tensor* saved = nullptr;
  at::Tensor* extra_in = nullptr;
  at::Tensor* extra_out = nullptr;
  at::Tensor* param_grads = nullptr;  // backward only
  const at::Tensor* params = nullptr;
  std::vector<at::Tensor>* dynamic_saved = nullptr;      // of operations that cannot count in advance (Python)
  std::vector<std::shared_ptr<void>>* states = nullptr;  // one per operation, Python's free attributes
  const LeafParams* leaf_params = nullptr;               // backward under an autograd node only
  std::vector<int> added_to_main_grad = {};              // operations whose weight gradient is in main_grad
  c10::ArrayRef<Buffers> buffers = {};                   // of operations that take them
  PackedGradient packed_grad = {};                       // of the step before, for whoever computes with it next
};

/// An operation's view of a call. Cheap to make, never kept.
class OpContext {
 public:
  OpContext(const OpPlan& plan, Frame& frame, int index) : plan_(plan), frame_(frame), index_(index) {}

  bool needs_input_grad() const { return plan_.needs_input_grad; }
  bool needs_param_grad(int i) const { return plan_.needs_param_grad[i] != 0; }
  bool needs_extra_grad(int i) const { return plan_.needs_extra_grad[i] != 0; }
  bool needs_grad() const { return plan_.needs_grad; }
  bool training() const { return plan_.training; }
  const OpPlan& plan() const { return plan_; }

  at::ScalarType dtype(at::ScalarType otherwise) const { return plan_.dtype(otherwise); }

  /// Keeps `t` for backward in one of the operation's named slots.
  void save(int slot, at::Tensor t) { frame_.saved[plan_.saved_base + slot] = std::move(t); }
  const at::Tensor& saved(int slot) const { return frame_.saved[plan_.saved_base + slot]; }

  /// Forward: extra tensors in and out.
  const at::Tensor& extra_input(int i) const { return frame_.extra_in[plan_.extra_in_base + i]; }
  at::Tensor take_extra_input(int i) { return std::move(frame_.extra_in[plan_.extra_in_base + i]); }
  void set_extra_output(int i, at::Tensor t) { frame_.extra_out[plan_.extra_out_base + i] = std::move(t); }

  /// Backward: their gradients. An undefined gradient is zero.
  at::Tensor take_extra_output_grad(int i) { return std::move(frame_.extra_out[plan_.extra_out_base + i]); }
  void set_extra_input_grad(int i, at::Tensor t) { frame_.extra_in[plan_.extra_in_base + i] = std::move(t); }
  void set_param_grad(int i, at::Tensor t) { frame_.param_grads[plan_.param_base + i] = std::move(t); }

  /// What the caller gave this operation to write into; nullptr: nothing.
  const Buffers* buffers() const {
    for (const auto& given : frame_.buffers)
      if (given.op == index_) return &given;
    return nullptr;
  }

  /// Backward: the Parameters themselves; nullptr where only values exist (the functional pair).
  const LeafParams* leaf_params() const { return frame_.leaf_params; }

  Frame& frame() { return frame_; }
  int index() const { return index_; }

 private:
  const OpPlan& plan_;
  Frame& frame_;
  int index_;
};

}  // namespace weft::ops
