#include "weft/fuser/matcher.h"

#include <algorithm>

namespace weft::fuser {
namespace {
constexpr const char* kQuantized = "a recipe quantizes a matched operation, and the rule is for unquantized ones";
constexpr const char* kQuantizedPipeline =
    "a recipe quantizes an operation of the pipeline, and functions fuse unquantized pipelines only";
constexpr const char* kReserved = "a registered rule fuses one of the matched operations in one pass";
}  // namespace

using fused::Match;
using fused::PatternRule;
using fused::Step;

std::vector<Step> Matcher::apply(fused::Pass pass, RuleOwner owner, std::vector<Step> steps) {
  for (const auto& [id, rule] : rules_) {
    if (fused::pass_of(rule) != pass || fused::is_builtin(id) != (owner == RuleOwner::library)) continue;
    const auto* pattern = std::get_if<PatternRule>(&rule);
    if (!pattern && is_quantized(0, pipeline_.size())) {
      add_rejection({fused::name_of(rule), pass, 0, pipeline_.size(), kQuantizedPipeline});
      continue;
    }
    steps = pattern ? scan(*pattern, steps) : std::get<fused::RewriteRule>(rule).rewrite(steps, view_);
  }
  return steps;
}

std::vector<Step> Matcher::scan(const PatternRule& rule, const std::vector<Step>& steps) {
  std::vector<Step> out;
  for (size_t begin = 0; begin < steps.size();) {
    const auto found = match(rule, steps, begin);
    const auto reason = found ? rejection_reason(rule, *found) : std::string{};
    if (!found || !reason.empty()) {
      if (found) add_rejection({rule.name, rule.make.pass, found->first(), found->size(), reason});
      out.push_back(steps[begin++]);
      continue;
    }
    out.push_back({.fused = rule.make(*found),
                   .first = found->first(),
                   .count = found->size(),
                   .min_rows = rule.min_rows,
                   .rule = rule.name});
    begin += found->size();
  }
  return out;
}

void Matcher::reserve(const std::vector<Step>& steps) {
  for (const auto& step : steps)
    if (step.fused) std::fill_n(reserved_.begin() + step.first, step.count, 1);
}

/// A pattern that begins with an optional element also matches without it; drops the repeated rejection.
void Matcher::add_rejection(Rejection rejection) {
  if (!rejections_.empty()) {
    const auto& last = rejections_.back();
    const bool within = rejection.first > last.first && rejection.first + rejection.count <= last.first + last.count;
    if (within && last.rule == rejection.rule && last.reason == rejection.reason) return;
  }
  rejections_.push_back(std::move(rejection));
}

std::optional<Match> Matcher::match(const PatternRule& rule, const std::vector<Step>& steps, size_t begin) const {
  std::vector<ops::OpPtr> taken;
  for (const auto& element : rule.pattern) {
    const size_t next = begin + taken.size();
    const bool here = next < steps.size() && !steps[next].fused && element.matches(pipeline_.op(steps[next].first));
    if (here) taken.push_back(pipeline_.stages()[steps[next].first].op);
    if (!here && !element.optional) return std::nullopt;
  }
  if (taken.empty()) return std::nullopt;
  const int first = steps[begin].first;
  auto wires = wiring(first, static_cast<int>(taken.size()));
  return Match(first, std::move(taken), std::move(wires));
}

std::vector<Match::Wire> Matcher::wiring(int first, int count) const {
  const auto index = [&](int op) { return op >= first && op < first + count ? op - first : -1; };
  std::vector<Match::Wire> wires(count);
  for (int i = 0; i < count; ++i) {
    const int in = pipeline_.extra_in_base(first + i), out = pipeline_.extra_out_base(first + i);
    if (pipeline_.op(first + i).extra_inputs() > 0 && pipeline_.source(in) >= 0)
      wires[i].from = index(pipeline_.producer(pipeline_.source(in)));
    if (pipeline_.op(first + i).extra_outputs() == 0) continue;
    wires[i].outside = pipeline_.output(out).to_caller;
    for (int slot = 0; slot < pipeline_.num_extra_in(); ++slot)
      if (pipeline_.source(slot) == out && index(pipeline_.consumer(slot)) < 0) wires[i].outside = true;
  }
  return wires;
}

bool Matcher::is_quantized(int first, int count) const {
  for (int i = first; i < first + count; ++i)
    if (view_.plans[i].recipe) return true;
  return false;
}

std::string Matcher::rejection_reason(const PatternRule& rule, const Match& match) const {
  const auto reserved = reserved_.begin() + match.first();
  if (rule.make.pass == fused::Pass::joint &&
      std::find(reserved, reserved + match.size(), 1) != reserved + match.size())
    return kReserved;
  if (!rule.quantized && is_quantized(match.first(), match.size())) return kQuantized;
  if (rule.reject) {
    if (auto reason = rule.reject(match, view_); !reason.empty()) return reason;
  }
  if (has_inner_channel(match.first(), match.size()) &&
      (rule.min_rows > 0 || !rule.make(match)->routes_inner_channels()))
    return "a channel connects two of the matched operations";
  return {};
}

bool Matcher::has_inner_channel(int first, int count) const {
  for (int slot = pipeline_.extra_in_base(first); slot < pipeline_.extra_in_base(first + count); ++slot)
    if (const int from = pipeline_.source(slot); from >= 0 && pipeline_.producer(from) >= first) return true;
  return false;
}

}  // namespace weft::fuser
