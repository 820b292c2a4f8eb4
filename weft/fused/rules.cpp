#include "weft/fused/rules.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <set>

namespace weft::fused {

// Defined in joint/, forward/ and backward/.
PatternRule joint_grouped_mlp(), joint_mlp_block(), joint_norm_linear(), joint_linear_cross_entropy();
PatternRule forward_overlapped_column(), forward_overlapped_row(), forward_overlapped_row_inside(),
    forward_linear_bias_activation(), forward_linear_bias_add(), forward_linear_scale_add(), forward_linear_bias(),
    forward_dropout_add();
PatternRule backward_overlapped_column(), backward_overlapped_row(), backward_overlapped_row_inside(),
    backward_activation_linear(), backward_linear_add(), backward_linear_scale(), backward_activation_bias(),
    backward_add_rms_norm(), backward_add_layer_norm();

namespace {

/// In the order in which they are tried: within a pass, the first rule that fuses an operation keeps it.
std::vector<PatternRule> builtin() {
  return {joint_grouped_mlp(),
          joint_mlp_block(),
          joint_norm_linear(),
          joint_linear_cross_entropy(),
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
  int64_t next_id = 0, num_builtin = 0;
  std::shared_ptr<const RuleList> all, enabled;
  std::multiset<int64_t> disabled;  // ids; one entry per `disable_rules` that was not undone

  Registry() {
    RuleList rules;
    for (auto& rule : builtin()) {
      if (rule.opt_in) disabled.insert(next_id);
      rules.emplace_back(next_id++, std::move(rule));
    }
    num_builtin = next_id;
    set_rules(std::make_shared<const RuleList>(std::move(rules)));
  }

  void set_rules(std::shared_ptr<const RuleList> rules) {
    all = std::move(rules);
    auto rest = *all;
    std::erase_if(rest, [this](const auto& entry) { return disabled.contains(entry.first); });
    enabled = std::make_shared<const RuleList>(std::move(rest));
    ++version;
  }
};

Registry& registry() {
  static Registry instance;
  return instance;
}

/// Sets the rules that `change` returns. The old lists are released after the lock, because destroying a Python rule
/// acquires the GIL.
template <class Change>
void update(const Change& change) {
  auto& r = registry();
  std::array<std::shared_ptr<const RuleList>, 2> retired;
  const std::lock_guard lock(r.mutex);
  retired = {r.all, r.enabled};
  r.set_rules(change(r));
}

}  // namespace

Pass pass_from_name(std::string_view name) {
  const auto* found = std::find(kPassNames.begin(), kPassNames.end(), name);
  TORCH_CHECK_VALUE(found != kPassNames.end(), "Unknown pass '", name, "'; expected joint, forward or backward.");
  return static_cast<Pass>(found - kPassNames.begin());
}

Rules current_rules() {
  auto& r = registry();
  const std::lock_guard lock(r.mutex);
  return {r.enabled, r.version.load()};
}

uint32_t rules_version() { return registry().version.load(std::memory_order_acquire); }

int64_t add_rule(FusionRule rule, bool prepend) {
  int64_t id = 0;
  update([&](Registry& r) {
    auto rules = *r.all;
    id = r.next_id++;
    const auto own = std::find_if(rules.begin(), rules.end(), [&](const auto& e) { return e.first < r.num_builtin; });
    rules.emplace(prepend ? rules.begin() : own, id, std::move(rule));
    return std::make_shared<const RuleList>(std::move(rules));
  });
  return id;
}

void remove_rule(int64_t id) {
  update([id](Registry& r) {
    auto rules = *r.all;
    std::erase_if(rules, [id](const auto& entry) { return entry.first == id; });
    return std::make_shared<const RuleList>(std::move(rules));
  });
}

std::shared_ptr<const RuleList> all_rules() {
  auto& r = registry();
  const std::lock_guard lock(r.mutex);
  return r.all;
}

bool is_builtin(int64_t id) { return id < registry().num_builtin; }

void disable_rules(const std::vector<int64_t>& ids) {
  update([&](Registry& r) {
    r.disabled.insert(ids.begin(), ids.end());
    return r.all;
  });
}

std::vector<int64_t> enable_rules(const std::vector<int64_t>& ids) {
  std::vector<int64_t> reenabled;
  update([&](Registry& r) {
    for (const auto id : ids) {
      const auto found = r.disabled.find(id);
      if (found == r.disabled.end()) continue;
      r.disabled.erase(found);
      reenabled.push_back(id);
    }
    return r.all;
  });
  return reenabled;
}

}  // namespace weft::fused
