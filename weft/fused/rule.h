#pragma once
#include <functional>
#include <string>
#include <vector>

#include "weft/fused/fused_op.h"
#include "weft/fused/plan_key.h"

namespace weft::fused {

enum class Pass { joint, forward, backward };

/// One element of a pattern; matches one operation.
struct Element {
  std::function<bool(const ops::BasicOp&)> matches;
  bool optional = false;
};
template <class T>
Element one() {
  return {[](const ops::BasicOp& op) { return dynamic_cast<const T*>(&op) != nullptr; }};
}
template <class T>
Element maybe() {
  return {one<T>().matches, true};
}

/// An operation of a known type and its index in the match; -1 if the match has none.
template <class T>
struct MatchedOp {
  int index = -1;
  std::shared_ptr<const T> op;

  explicit operator bool() const { return index >= 0; }
  const T* operator->() const { return op.get(); }
};

/// The operations that a pattern matched, in order.
class Match {
 public:
  /// How the first extra tensor of a matched operation is connected.
  struct Wire {
    int from = -1;         // extra input: index of the matched operation that produces it; -1: produced outside
    bool outside = false;  // extra output: read outside the match
  };

  Match(int first, std::vector<ops::OpPtr> ops, std::vector<Wire> wires)
      : first_(first), ops_(std::move(ops)), wires_(std::move(wires)) {}

  int first() const { return first_; }  // index in the pipeline
  int size() const { return static_cast<int>(ops_.size()); }
  const ops::OpPtr& op(int index) const { return ops_[index]; }
  const Wire& wire(int index) const { return wires_[index]; }
  /// The first operation of type T at index `from` or later.
  template <class T>
  MatchedOp<T> find(int from = 0) const {
    for (int i = from; i < size(); ++i)
      if (auto op = std::dynamic_pointer_cast<const T>(ops_[i])) return {i, std::move(op)};
    return {};
  }
  template <class T>
  const T& get() const {
    return dynamic_cast<const T&>(*ops_.at(find<T>().index));
  }

 private:
  int first_;
  std::vector<ops::OpPtr> ops_;
  std::vector<Wire> wires_;
};

/// A step of a plan: one basic operation (`fused` is null), or a fused operation for a run of them. With fewer rows
/// than `min_rows` the basic operations run instead.
struct Step {
  FusedPtr fused = {};
  int first = 0, count = 1;
  int64_t min_rows = 0;
  std::string rule = {};  // name of the rule that created it
  int own_base = 0;       // first additional saved slot of a joint operation
};

/// A fusion rule: its pattern, when it is rejected and why, the fused operation it creates, and a sample for tests.
struct FusionRule {
  std::string name;
  Pass pass = Pass::forward;
  std::vector<Element> pattern = {};
  /// Returns the rejection reason that `explain()` prints, or an empty string to fuse.
  std::function<std::string(const Match&, const PlanView&)> reject = {};
  std::function<FusedPtr(const Match&)> make = {};
  std::function<std::vector<ops::OpPtr>()> sample = {};
  int64_t min_rows = 0;
  bool opt_in = false;  // disabled until `enable_rules`
  /// Used instead of a pattern: rewrites the whole list of steps (fusion functions written in Python).
  std::function<std::vector<Step>(const std::vector<Step>&, const PlanView&)> rewrite = {};
};

template <class T>
FusedPtr make_fused(const Match& match) {
  return std::make_shared<T>(match);
}

}  // namespace weft::fused
