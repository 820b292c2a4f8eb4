#pragma once
#include <array>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "weft/fused/fused_op.h"
#include "weft/fused/plan_key.h"

namespace weft::fused {

enum class Pass { joint, forward, backward };
inline constexpr std::array kPassNames{"joint", "forward", "backward"};
inline const char* pass_name(Pass pass) { return kPassNames[static_cast<size_t>(pass)]; }
Pass pass_from_name(std::string_view name);

/// One element of a pattern; matches one operation, or none if `optional`.
struct Element {
  std::function<bool(const ops::BasicOp&)> matches;
  bool optional = false;
};
/// Matches exactly one operation of type T or derived from it.
template <class T>
Element one() {
  return {[](const ops::BasicOp& op) { return dynamic_cast<const T*>(&op) != nullptr; }};
}
/// Matches at most one.
template <class T>
Element maybe() {
  return {one<T>().matches, true};
}

/// An operation of a known type and its index in the match; index -1 if the match has none.
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

  int first() const { return first_; }  // index of the first operation in the pipeline
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
  /// The first operation of type T, which must exist.
  template <class T>
  const T& get() const {
    return dynamic_cast<const T&>(*ops_.at(find<T>().index));
  }

 private:
  int first_;
  std::vector<ops::OpPtr> ops_;
  std::vector<Wire> wires_;
};

/// Creates the fused operation of a match. Its interface determines the pass.
struct FusedMaker {
  Pass pass;
  std::function<FusedPtr(const Match&)> make;

  FusedPtr operator()(const Match& match) const { return make(match); }
};
template <class T>
FusedMaker make_fused() {
  constexpr auto pass = std::derived_from<T, JointFusion>     ? Pass::joint
                        : std::derived_from<T, ForwardFusion> ? Pass::forward
                                                              : Pass::backward;
  return {pass, [](const Match& match) -> FusedPtr { return std::make_shared<const T>(match); }};
}

/// Replaces each match of a pattern by a fused operation.
struct PatternRule {
  std::string name;
  std::vector<Element> pattern;
  /// Returns the rejection reason that `explain()` prints, or an empty string to fuse.
  std::function<std::string(const Match&, const PlanView&)> reject = {};
  FusedMaker make;
  std::function<std::vector<ops::OpPtr>()> sample = {};  // a pipeline that it fuses, for tests
  bool quantized = false;                                // also for quantized operations
  int64_t min_rows = 0;                                  // a call with fewer rows runs the basic operations
  bool opt_in = false;                                   // disabled until `enable_rules` is called
};

/// Rewrites the whole list of steps: a fusion function written in Python.
struct RewriteRule {
  std::string name;
  Pass pass;
  std::function<std::vector<Step>(const std::vector<Step>&, const PlanView&)> rewrite;
};

using FusionRule = std::variant<PatternRule, RewriteRule>;

inline const std::string& name_of(const FusionRule& rule) {
  return std::visit([](const auto& r) -> const std::string& { return r.name; }, rule);
}
inline Pass pass_of(const FusionRule& rule) {
  const auto* pattern = std::get_if<PatternRule>(&rule);
  return pattern ? pattern->make.pass : std::get<RewriteRule>(rule).pass;
}

}  // namespace weft::fused
