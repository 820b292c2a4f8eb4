#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "weft/ops/operation.h"

namespace weft::fuser {

/// An operation in a pipeline, with the channels of its extra tensors.
struct Stage {
  struct Out {
    std::string channel;    // empty: no channel
    bool to_caller = true;  // false: only routed, not returned to the caller
  };
  ops::OpPtr op;
  std::vector<std::string> in = {};  // channel of each extra input; empty or missing: passed by the caller
  std::vector<Out> out = {};         // for each extra output
  std::string label = {};            // names it in errors, e.g. "Sequential[2] Linear"; empty: index and operation
};

/// For each extra input, in order: the extra-output slot that feeds it, or -1 if the caller passes it. Raises
/// ValueError with the stages' labels unless each channel that is read has exactly one producer, an earlier operation.
std::vector<int> channel_sources(const std::vector<Stage>& stages);

/// A sequence of basic operations and the channels between them. Immutable; holds no tensor. Extra tensors are in flat
/// slots, ordered by operation and index.
class Pipeline {
 public:
  explicit Pipeline(std::vector<Stage> stages);

  const std::vector<Stage>& stages() const { return stages_; }
  int size() const { return static_cast<int>(stages_.size()); }
  const ops::BasicOp& op(int i) const { return *stages_[i].op; }
  /// What errors call operation i: its label, "operation 2 (GELU)", or its name if there is only one.
  const std::string& label(int i) const { return stages_[i].label; }
  /// The distinct labels of `count` operations from `first` on, joined for an error.
  std::string labels(int first, int count) const;

  /// The index of the first parameter, saved slot, … of operation i in the flat lists of a call; for i = size(), the
  /// total.
  int param_base(int i) const { return param_base_[i]; }
  int saved_base(int i) const { return saved_base_[i]; }
  int extra_in_base(int i) const { return extra_in_base_[i]; }
  int extra_out_base(int i) const { return extra_out_base_[i]; }
  int num_params() const { return param_base_.back(); }
  int num_saved() const { return saved_base_.back(); }
  int num_extra_in() const { return extra_in_base_.back(); }
  int num_extra_out() const { return extra_out_base_.back(); }

  /// Extra-input slots passed by the caller and extra-output slots returned to it, in order.
  const std::vector<int>& caller_inputs() const { return caller_inputs_; }
  const std::vector<int>& caller_outputs() const { return caller_outputs_; }
  /// The extra-output slot that feeds an extra-input slot, or -1 if the caller passes it.
  int source(int extra_in_slot) const { return sources_[extra_in_slot]; }
  /// The operation that reads an extra-input slot; the operation that sets an extra-output slot, and its channel.
  int consumer(int extra_in_slot) const;
  int producer(int extra_out_slot) const;
  const Stage::Out& output(int extra_out_slot) const;

  /// The bit of operation i in the evaluation mask of a call (set: evaluation mode), or -1 if the mode has no effect.
  int eval_bit(int i) const { return eval_bits_[i]; }

  const std::vector<ops::ParamSpec>& params() const { return params_; }
  /// The run-time decisions of the last calls, the only part that calls write; copies of the pipeline share it.
  ops::CallReport& report() const { return *report_; }
  /// True if any operation is written in Python.
  bool process_local() const { return process_local_; }
  /// True if recipes quantize one of its operations.
  bool quantizes() const { return quantizes_; }

  /// `Name(field=value, …)` per operation, separated by "; ". Then ` <"channel"` for each extra input from a channel
  /// (`<-`: from the caller), ` >"channel"` for each extra output, ` >>"channel"` if it is not returned to the caller.
  std::string text() const;
  /// The inverse of `text`.
  static Pipeline parse(std::string_view text);

 private:
  std::vector<Stage> stages_;
  std::vector<int> param_base_{0}, saved_base_{0}, extra_in_base_{0}, extra_out_base_{0};
  std::vector<int> caller_inputs_, caller_outputs_, sources_, eval_bits_;
  std::vector<ops::ParamSpec> params_;
  std::shared_ptr<ops::CallReport> report_ = std::make_shared<ops::CallReport>();
  bool process_local_ = false, quantizes_ = false;
};

}  // namespace weft::fuser
