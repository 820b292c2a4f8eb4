#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "weft/fused/rule.h"

namespace weft::fused {

using RuleList = std::vector<std::pair<int64_t, FusionRule>>;  // id and rule, in the order they are tried

/// The rules in force and a number that changes with them.
struct Rules {
  std::shared_ptr<const RuleList> list;
  uint32_t version;
};
Rules current_rules();
/// Only the number, for the call path.
uint32_t rules_version();

/// Adds a rule behind (or before) those of its pass and returns its id. Takes effect at the next call of every
/// pipeline.
int64_t add_rule(FusionRule rule, bool prepend = false);
void remove_rule(int64_t id);

/// Also those that are set aside.
std::shared_ptr<const RuleList> all_rules();
/// Sets rules aside; as often as a rule is set aside it must be resumed.
void disable_rules(const std::vector<int64_t>& ids);
/// Puts rules back in force, and such that are `opt_in`. Returns those that were aside.
std::vector<int64_t> enable_rules(const std::vector<int64_t>& ids);

}  // namespace weft::fused
