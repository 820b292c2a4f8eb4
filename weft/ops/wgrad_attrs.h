#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

namespace weft::ops {

/// Attributes that a training framework sets on a parameter to control its weight gradient; on a Python Parameter they
/// are Python attributes of the same names. Read when the gradient is computed.
struct WgradAttrs {
  at::Tensor main_grad = {};                         // contiguous, with as many elements as the parameter
  std::function<at::Tensor()> get_main_grad = {};    // if set, called before each gradient to obtain `main_grad`
  std::optional<bool> grad_added_to_main_grad = {};  // if present: set to true, and autograd receives a dummy gradient
  bool overwrite_main_grad = false;                  // main_grad = dW instead of main_grad += dW
  bool zero_out_wgrad = false;                       // fill the dummy gradient with zeros
  bool skip_backward_post_hook = false;              // set by modules, read by frameworks: dW is delayed
};

/// The attributes of a parameter, created if there are none. They live as long as the parameter.
WgradAttrs& wgrad_attrs(const at::Tensor& param);
/// The same, or nullptr if there are none.
WgradAttrs* find_wgrad_attrs(const at::Tensor& param);

/// A snapshot of a parameter's attributes.
struct ResolvedWgradAttrs {
  at::Tensor main_grad = {};
  bool has_getter = false;  // main_grad comes from get_main_grad()
  bool has_flag = false;    // grad_added_to_main_grad is present
  bool overwrite = false;
  bool zero_out = false;
};

/// Reads and sets the attributes of a parameter, which are WgradAttrs or Python attributes.
class WgradResolver {
 public:
  WgradResolver() = default;
  WgradResolver(const WgradResolver&) = delete;
  WgradResolver& operator=(const WgradResolver&) = delete;
  virtual ~WgradResolver() = default;
  /// With `fetch`, calls get_main_grad() if there is one; otherwise only reports it (`has_getter`).
  virtual ResolvedWgradAttrs resolve(const at::Tensor& param, bool fetch) const = 0;
  /// grad_added_to_main_grad = true.
  virtual void mark_grad_added(const at::Tensor& param) const = 0;
};

/// The resolver of a parameter: one that reads its WgradAttrs if it has them, else the installed one (Python's).
const WgradResolver& wgrad_resolver(const at::Tensor& param);
/// Installs the resolver of parameters without WgradAttrs. It must live as long as the process.
void set_wgrad_resolver(const WgradResolver* resolver);

}  // namespace weft::ops
