#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "weft/fused/rule.h"

namespace weft::fused {

using RuleList = std::vector<std::pair<int64_t, FusionRule>>;  // id and rule, in the order in which they are tried

/// The enabled rules, and a version that changes with them.
struct Rules {
  std::shared_ptr<const RuleList> list;
  uint32_t version;
};
Rules current_rules();
/// The version alone, for the call path.
uint32_t rules_version();

/// Adds a rule after the rules added before (`prepend`: before them) and returns its id. Those of the library are tried
/// last, also its joint rules. Takes effect at the next call of every pipeline.
int64_t add_rule(FusionRule rule, bool prepend = false);
void remove_rule(int64_t id);

/// All rules, including disabled ones.
std::shared_ptr<const RuleList> all_rules();
/// Whether a rule is one of the library's own, which `add_rule` did not add.
bool is_builtin(int64_t id);
/// Disables rules. Calls are counted: a rule disabled twice must be enabled twice.
void disable_rules(const std::vector<int64_t>& ids);
/// Enables disabled and `opt_in` rules. Returns the ids that were disabled.
std::vector<int64_t> enable_rules(const std::vector<int64_t>& ids);

}  // namespace weft::fused
