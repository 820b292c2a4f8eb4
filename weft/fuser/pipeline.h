#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "weft/ops/operation.h"

namespace weft::fuser {

/// An operation at its place in a pipeline, with the names its extra tensors are known by there.
struct Stage {
  struct Out {
    std::string channel;    // empty: not named
    bool to_caller = true;  // false: not returned, only routed
  };
  ops::OpPtr op;
  std::vector<std::string> in;  // channel of each extra input; empty or missing: given by the caller
  std::vector<Out> out;         // of each extra output
};

/// A sequence of basic operations with its wiring. Holds no tensor; immutable. Extra tensors live in flat slots, in the
/// order of operations and then of their indices.
class Pipeline {
 public:
  explicit Pipeline(std::vector<Stage> stages);

  const std::vector<Stage>& stages() const { return stages_; }
  int size() const { return static_cast<int>(stages_.size()); }
  const ops::BasicOp& op(int i) const { return *stages_[i].op; }

  /// First slot of operation i, and behind the last one the total.
  int param_base(int i) const { return param_base_[i]; }
  int saved_base(int i) const { return saved_base_[i]; }
  int extra_in_base(int i) const { return extra_in_base_[i]; }
  int extra_out_base(int i) const { return extra_out_base_[i]; }
  int num_params() const { return param_base_.back(); }
  int num_saved() const { return saved_base_.back(); }
  int num_extra_in() const { return extra_in_base_.back(); }
  int num_extra_out() const { return extra_out_base_.back(); }

  /// Slots that the caller fills, and slots that are returned, in order.
  const std::vector<int>& caller_inputs() const { return caller_inputs_; }
  const std::vector<int>& caller_outputs() const { return caller_outputs_; }
  /// The extra-output slot that feeds an extra-input slot, or -1 if the caller does.
  int source(int extra_in_slot) const { return sources_[extra_in_slot]; }
  /// Operation of a slot.
  int consumer(int extra_in_slot) const;
  int producer(int extra_out_slot) const;
  const Stage::Out& output(int extra_out_slot) const;

  /// Which bit of the evaluation mask belongs to operation i, or -1.
  int eval_bit(int i) const { return eval_bits_[i]; }

  const std::vector<ops::ParamSpec>& params() const { return params_; }
  /// True if some operation is written in Python.
  bool process_local() const { return process_local_; }

  /// `Name(field=value, …)` per operation, separated by "; ", with ` <"channel"` for a bound extra input (`<-` where
  /// the caller gives it), ` >"channel"` for a named extra output and ` >>"channel"` for one that is not returned.
  std::string text() const;
  static Pipeline parse(std::string_view text);

 private:
  void wire();

  std::vector<Stage> stages_;
  std::vector<int> param_base_{0}, saved_base_{0}, extra_in_base_{0}, extra_out_base_{0};
  std::vector<int> caller_inputs_, caller_outputs_, sources_, eval_bits_;
  std::vector<ops::ParamSpec> params_;
  bool process_local_ = false;
};

}  // namespace weft::fuser
