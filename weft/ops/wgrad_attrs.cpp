#include "weft/ops/wgrad_attrs.h"

#include <atomic>

#include "weft/core/weak_tensor_map.h"

namespace weft::ops {
namespace {

WeakTensorMap<WgradAttrs>& wgrad_attrs_table() {
  static auto* table = new WeakTensorMap<WgradAttrs>;  // never destroyed: parameters may outlive static destructors
  return *table;
}

/// Resolves attributes stored as WgradAttrs.
class AttrsResolver final : public WgradResolver {
 public:
  ResolvedWgradAttrs resolve(const at::Tensor& param, bool fetch) const override {
    auto* attrs = find_wgrad_attrs(param);
    if (!attrs) return {};
    const bool getter = static_cast<bool>(attrs->get_main_grad);
    if (getter && fetch) attrs->main_grad = attrs->get_main_grad();
    return {.main_grad = attrs->main_grad,
            .has_getter = getter,
            .has_flag = attrs->grad_added_to_main_grad.has_value(),
            .overwrite = attrs->overwrite_main_grad,
            .zero_out = attrs->zero_out_wgrad};
  }
  void mark_grad_added(const at::Tensor& param) const override { wgrad_attrs(param).grad_added_to_main_grad = true; }
};

std::atomic<const WgradResolver*>& installed() {
  static std::atomic<const WgradResolver*> resolver{nullptr};
  return resolver;
}

}  // namespace

WgradAttrs& wgrad_attrs(const at::Tensor& param) { return *wgrad_attrs_table().get(param); }
WgradAttrs* find_wgrad_attrs(const at::Tensor& param) { return wgrad_attrs_table().find(param).get(); }

const WgradResolver& wgrad_resolver(const at::Tensor& param) {
  static const AttrsResolver own;
  const auto* other = installed().load();
  return other && !find_wgrad_attrs(param) ? *other : own;
}

void set_wgrad_resolver(const WgradResolver* resolver) { installed() = resolver; }

}  // namespace weft::ops
