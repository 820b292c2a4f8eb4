#include "weft/fuser/matcher.h"

namespace weft::fuser {

using fused::FusionRule;
using fused::Match;
using fused::Step;

std::vector<Step> Matcher::apply(fused::Pass pass, std::vector<Step> steps) {
  for (const auto& [id, rule] : rules_) {
    if (rule.pass != pass) continue;
    steps = rule.rewrite ? rule.rewrite(steps, view_) : scan(rule, steps);
  }
  return steps;
}

std::vector<Step> Matcher::scan(const FusionRule& rule, const std::vector<Step>& steps) {
  std::vector<Step> out;
  for (size_t at = 0; at < steps.size();) {
    const auto found = match(rule, steps, at);
    const auto reason = found ? refusal(rule, *found) : std::string{};
    if (!found || !reason.empty()) {
      if (found) refusals_.push_back({rule.name, rule.pass, found->first(), found->size(), reason});
      out.push_back(steps[at++]);
      continue;
    }
    out.push_back({.fused = rule.make(*found),
                   .first = found->first(),
                   .count = found->size(),
                   .min_rows = rule.min_rows,
                   .rule = rule.name});
    at += found->size();
  }
  return out;
}

std::optional<Match> Matcher::match(const FusionRule& rule, const std::vector<Step>& steps, size_t at) const {
  std::vector<ops::OpPtr> taken;
  for (const auto& element : rule.pattern) {
    const size_t next = at + taken.size();
    const bool here = next < steps.size() && !steps[next].fused && element.matches(pipeline_.op(steps[next].first));
    if (here) taken.push_back(pipeline_.stages()[steps[next].first].op);
    if (!here && !element.optional) return std::nullopt;
  }
  if (taken.empty()) return std::nullopt;
  return Match(steps[at].first, std::move(taken));
}

std::string Matcher::refusal(const FusionRule& rule, const Match& match) const {
  if (rule.refuse) {
    if (auto reason = rule.refuse(match, view_); !reason.empty()) return reason;
  }
  if (has_inner_channel(match.first(), match.size()) &&
      (rule.min_rows > 0 || !rule.make(match)->routes_inner_channels()))
    return "a channel connects two of its parts";
  return {};
}

bool Matcher::has_inner_channel(int first, int count) const {
  for (int slot = pipeline_.extra_in_base(first); slot < pipeline_.extra_in_base(first + count); ++slot)
    if (const int from = pipeline_.source(slot); from >= 0 && pipeline_.producer(from) >= first) return true;
  return false;
}

}  // namespace weft::fuser
