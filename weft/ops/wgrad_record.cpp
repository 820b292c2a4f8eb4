#include "weft/ops/wgrad_record.h"

#include <atomic>

#include "weft/tensor/by_identity.h"

namespace weft::ops {
namespace {

ByIdentity<WgradRecord>& records() {
  static auto* table = new ByIdentity<WgradRecord>;  // never destroyed: a parameter may outlive any order of exit
  return *table;
}

/// Notes in records. A parameter without a record has none.
class RecordResolver final : public WgradResolver {
 public:
  WgradNotes resolve(const at::Tensor& param, bool fetch) const override {
    auto* record = find_wgrad_record(param);
    if (!record) return {};
    const bool getter = static_cast<bool>(record->get_main_grad);
    if (getter && fetch) record->main_grad = record->get_main_grad();
    return {.main_grad = record->main_grad,
            .has_getter = getter,
            .has_flag = record->grad_added_to_main_grad.has_value(),
            .overwrite = record->overwrite_main_grad,
            .zero_out = record->zero_out_wgrad};
  }
  void set_added(const at::Tensor& param) const override { wgrad_record(param).grad_added_to_main_grad = true; }
};

std::atomic<const WgradResolver*>& installed() {
  static std::atomic<const WgradResolver*> resolver{nullptr};
  return resolver;
}

}  // namespace

WgradRecord& wgrad_record(const at::Tensor& param) { return *records().get(param); }
WgradRecord* find_wgrad_record(const at::Tensor& param) { return records().find(param).get(); }

const WgradResolver& wgrad_resolver(const at::Tensor& param) {
  static const RecordResolver own;
  const auto* other = installed().load();
  return other && !find_wgrad_record(param) ? *other : own;
}

void set_wgrad_resolver(const WgradResolver* resolver) { installed() = resolver; }

}  // namespace weft::ops
