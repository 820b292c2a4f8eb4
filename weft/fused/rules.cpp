#include "weft/fused/rules.h"

#include <array>
#include <atomic>
#include <mutex>
#include <set>

namespace weft::fused {

// Built-in rules. The order matters: within a pass, the first rule that fuses an operation keeps it.
FusionRule joint_grouped_mlp();
FusionRule joint_mlp_block();
FusionRule joint_norm_linear();
FusionRule forward_overlapped_column();
FusionRule forward_overlapped_row();
FusionRule forward_overlapped_row_inside();
FusionRule forward_linear_bias_activation();
FusionRule forward_linear_bias_add();
FusionRule forward_linear_scale_add();
FusionRule forward_linear_bias();
FusionRule forward_dropout_add();
FusionRule backward_overlapped_column();
FusionRule backward_overlapped_row();
FusionRule backward_overlapped_row_inside();
FusionRule backward_activation_linear();
FusionRule backward_linear_add();
FusionRule backward_linear_scale();
FusionRule backward_activation_bias();
FusionRule backward_add_rms_norm();
FusionRule backward_add_layer_norm();

namespace {

std::vector<FusionRule> builtin() {
  return {joint_grouped_mlp(),
          joint_mlp_block(),
          joint_norm_linear(),
          forward_overlapped_column(),
          forward_overlapped_row(),
          forward_overlapped_row_inside(),
          forward_linear_bias_activation(),
          forward_linear_bias_add(),
          forward_linear_scale_add(),
          forward_linear_bias(),
          forward_dropout_add(),
          backward_overlapped_column(),
          backward_overlapped_row(),
          backward_overlapped_row_inside(),
          backward_activation_linear(),
          backward_linear_add(),
          backward_linear_scale(),
          backward_activation_bias(),
          backward_add_rms_norm(),
          backward_add_layer_norm()};
}

struct Registry {
  std::mutex mutex;
  std::atomic<uint32_t> version{0};
  int64_t next_id = 0;
  std::shared_ptr<const RuleList> all, list;  // all rules; the enabled ones
  std::multiset<int64_t> disabled;

  Registry() {
    RuleList rules;
    for (auto& rule : builtin()) {
      if (rule.opt_in) disabled.insert(next_id);
      rules.emplace_back(next_id++, std::move(rule));
    }
    set_rules(std::make_shared<const RuleList>(std::move(rules)));
  }

  void set_rules(std::shared_ptr<const RuleList> rules) {
    all = std::move(rules);
    auto kept = *all;
    std::erase_if(kept, [this](const auto& entry) { return disabled.contains(entry.first); });
    list = std::make_shared<const RuleList>(std::move(kept));
    ++version;
  }
};

Registry& registry() {
  static Registry instance;
  return instance;
}

/// Old rule lists, released after the lock: destroying a Python rule acquires the GIL.
using Retired = std::array<std::shared_ptr<const RuleList>, 2>;

}  // namespace

Rules current_rules() {
  auto& r = registry();
  const std::lock_guard lock(r.mutex);
  return {r.list, r.version.load()};
}

uint32_t rules_version() { return registry().version.load(std::memory_order_acquire); }

int64_t add_rule(FusionRule rule, bool prepend) {
  auto& r = registry();
  Retired retired;
  const std::lock_guard lock(r.mutex);
  retired = {r.all, r.list};
  auto rules = *r.all;
  const auto id = r.next_id++;
  rules.emplace(prepend ? rules.begin() : rules.end(), id, std::move(rule));
  r.set_rules(std::make_shared<const RuleList>(std::move(rules)));
  return id;
}

void remove_rule(int64_t id) {
  auto& r = registry();
  Retired retired;
  const std::lock_guard lock(r.mutex);
  retired = {r.all, r.list};
  auto rules = *r.all;
  std::erase_if(rules, [id](const auto& entry) { return entry.first == id; });
  r.set_rules(std::make_shared<const RuleList>(std::move(rules)));
}

std::shared_ptr<const RuleList> all_rules() {
  auto& r = registry();
  const std::lock_guard lock(r.mutex);
  return r.all;
}

void disable_rules(const std::vector<int64_t>& ids) {
  auto& r = registry();
  Retired retired;
  const std::lock_guard lock(r.mutex);
  retired = {r.all, r.list};
  r.disabled.insert(ids.begin(), ids.end());
  r.set_rules(r.all);
}

std::vector<int64_t> enable_rules(const std::vector<int64_t>& ids) {
  auto& r = registry();
  Retired retired;
  const std::lock_guard lock(r.mutex);
  retired = {r.all, r.list};
  std::vector<int64_t> reenabled;
  for (const auto id : ids) {
    const auto found = r.disabled.find(id);
    if (found == r.disabled.end()) continue;
    r.disabled.erase(found);
    reenabled.push_back(id);
  }
  r.set_rules(r.all);
  return reenabled;
}

}  // namespace weft::fused
