#pragma once
#include <functional>
#include <string>
#include <vector>

#include "weft/fused/fused_op.h"
#include "weft/fused/plan_key.h"

namespace weft::fused {

enum class Pass { joint, forward, backward };

/// One place of a pattern.
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

/// An operation of a known type at its place in a match; `index` is -1 if it is not there.
template <class T>
struct MatchedOp {
  int index = -1;
  std::shared_ptr<const T> op;

  explicit operator bool() const { return index >= 0; }
  const T* operator->() const { return op.get(); }
};

/// The operations a pattern found, in order.
class Match {
 public:
  /// How the first extra tensor of a part is wired.
  struct Wire {
    int from = -1;         // extra input: the part that feeds it, or -1: somebody outside the match
    bool outside = false;  // extra output: somebody outside the match reads it
  };

  Match(int first, std::vector<ops::OpPtr> ops, std::vector<Wire> wires, ops::OpPtr before)
      : first_(first), ops_(std::move(ops)), wires_(std::move(wires)), before_(std::move(before)) {}

  int first() const { return first_; }  // index in the pipeline
  int size() const { return static_cast<int>(ops_.size()); }
  const ops::OpPtr& op(int index) const { return ops_[index]; }
  const Wire& wire(int index) const { return wires_[index]; }
  /// The operation before the first part, if it has type T; else null. Its context is `StepContext::op(-1)`.
  template <class T>
  std::shared_ptr<const T> before() const {
    return std::dynamic_pointer_cast<const T>(before_);
  }

  /// The first operation of type T at position `from` or behind.
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
  ops::OpPtr before_;
};

/// A stretch of the pipeline in a plan: one basic operation (`fused` empty) or a fused one. With fewer rows than
/// `min_rows` the parts run one by one.
struct Step {
  FusedPtr fused;
  int first = 0, count = 1;
  int64_t min_rows = 0;
  std::string rule;  // name of the rule that made it
  int own_base = 0;  // first own saved slot of a joint operation
};

/// A fusion as a row: what it looks for, when it declines and why, what it makes, and a pipeline that shows it.
struct FusionRule {
  std::string name;
  Pass pass = Pass::forward;
  std::vector<Element> pattern;
  /// Empty: fuse. Otherwise the reason, a sentence without its subject, as `explain()` prints it.
  std::function<std::string(const Match&, const PlanView&)> reject;
  std::function<FusedPtr(const Match&)> make;
  std::function<std::vector<ops::OpPtr>()> sample;
  int64_t min_rows = 0;
  bool opt_in = false;  // in force only after `enable_rules`
  /// Instead of a pattern: rewrites the whole list of steps (fusion functions written in Python).
  std::function<std::vector<Step>(const std::vector<Step>&, const PlanView&)> rewrite;
};

template <class T>
FusedPtr make_fused(const Match& match) {
  return std::make_shared<T>(match);
}

}  // namespace weft::fused
