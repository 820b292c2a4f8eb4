#include "weft/fused/rules.h"

#include <atomic>
#include <mutex>

namespace weft::fused {

// Built-in rules. Order is meaning: within a pass the first rule that takes an operation keeps it.
FusionRule forward_linear_bias();
FusionRule backward_linear_add();

namespace {

struct Registry {
  std::mutex mutex;
  std::atomic<uint32_t> version{1};
  int64_t next_id = 0;
  std::shared_ptr<const RuleList> list;

  Registry() {
    RuleList rules;
    for (auto& rule : {forward_linear_bias(), backward_linear_add()}) rules.emplace_back(next_id++, rule);
    list = std::make_shared<const RuleList>(std::move(rules));
  }
};

Registry& registry() {
  static Registry instance;
  return instance;
}

}  // namespace

Rules current_rules() {
  auto& r = registry();
  const std::lock_guard lock(r.mutex);
  return {r.list, r.version.load()};
}

uint32_t rules_version() { return registry().version.load(std::memory_order_acquire); }

int64_t add_rule(FusionRule rule, bool prepend) {
  auto& r = registry();
  std::shared_ptr<const RuleList> retired;  // dies after the lock: a rule written in Python takes the GIL to die
  const std::lock_guard lock(r.mutex);
  retired = r.list;
  auto rules = *r.list;
  const auto id = r.next_id++;
  rules.emplace(prepend ? rules.begin() : rules.end(), id, std::move(rule));
  r.list = std::make_shared<const RuleList>(std::move(rules));
  ++r.version;
  return id;
}

void remove_rule(int64_t id) {
  auto& r = registry();
  std::shared_ptr<const RuleList> retired;  // dies after the lock: a rule written in Python takes the GIL to die
  const std::lock_guard lock(r.mutex);
  retired = r.list;
  auto rules = *r.list;
  std::erase_if(rules, [id](const auto& entry) { return entry.first == id; });
  r.list = std::make_shared<const RuleList>(std::move(rules));
  ++r.version;
}

}  // namespace weft::fused
