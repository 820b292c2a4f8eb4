#pragma once
#include <optional>
#include <vector>

#include "weft/fuser/plan.h"

namespace weft::fuser {

/// Who wrote a rule: a caller of `fused::add_rule`, or the library.
enum class RuleOwner { user, library };

/// Applies rules to a list of steps. A rule matches only basic operations; within a pass, the first rule that fuses an
/// operation keeps it.
class Matcher {
 public:
  Matcher(const Pipeline& pipeline, const fused::PlanView& view, const fused::RuleList& rules,
          std::vector<Rejection>& rejections)
      : pipeline_(pipeline), view_(view), rules_(rules), rejections_(rejections), reserved_(pipeline.size(), 0) {}

  std::vector<fused::Step> apply(fused::Pass pass, RuleOwner owner, std::vector<fused::Step> steps);
  /// Keeps the operations that these steps fuse from joint rules applied later.
  void reserve(const std::vector<fused::Step>& steps);

 private:
  /// Fuses all matches of one rule.
  std::vector<fused::Step> scan(const fused::PatternRule& rule, const std::vector<fused::Step>& steps);
  /// The match that starts at step `begin`.
  std::optional<fused::Match> match(const fused::PatternRule& rule, const std::vector<fused::Step>& steps,
                                    size_t begin) const;
  /// The channels of operations `first` to `first + count - 1`, seen from a match of these.
  std::vector<fused::Match::Wire> wiring(int first, int count) const;
  void add_rejection(Rejection rejection);
  /// Empty if the match is fused.
  std::string rejection_reason(const fused::PatternRule& rule, const fused::Match& match) const;
  /// Whether a recipe quantizes one of these operations.
  bool is_quantized(int first, int count) const;
  /// Whether a channel connects two of these operations.
  bool has_inner_channel(int first, int count) const;

  const Pipeline& pipeline_;
  const fused::PlanView& view_;
  const fused::RuleList& rules_;
  std::vector<Rejection>& rejections_;
  std::vector<uint8_t> reserved_;  // per operation
};

}  // namespace weft::fuser
