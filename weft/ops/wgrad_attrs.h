#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>

namespace weft::ops {

/// What a framework notes on a parameter about its weight gradient. A Python Parameter has attributes of these names
/// instead. Read when the gradient is computed.
struct WgradAttrs {
  at::Tensor main_grad = {};                         // contiguous, as many elements as the parameter
  std::function<at::Tensor()> get_main_grad = {};    // if set, called for `main_grad` at each gradient
  std::optional<bool> grad_added_to_main_grad = {};  // present: set to true, and autograd gets a dummy
  bool overwrite_main_grad = false;                  // main_grad = dW instead of main_grad += dW
  bool zero_out_wgrad = false;                       // the dummy is zero
  bool skip_backward_post_hook = false;              // the weight's hooks are run by backward_dw
};

/// The record of a parameter, made if there is none. Lives as long as the parameter.
WgradAttrs& wgrad_attrs(const at::Tensor& param);
/// nullptr if there is none.
WgradAttrs* find_wgrad_attrs(const at::Tensor& param);

/// One reading of a parameter's notes.
struct ResolvedWgradAttrs {
  at::Tensor main_grad = {};
  bool has_getter = false;  // main_grad comes from get_main_grad()
  bool has_flag = false;    // grad_added_to_main_grad is present
  bool overwrite = false;
  bool zero_out = false;
};

/// Reads and sets the notes of a parameter, wherever they are kept.
class WgradResolver {
 public:
  WgradResolver() = default;
  WgradResolver(const WgradResolver&) = delete;
  WgradResolver& operator=(const WgradResolver&) = delete;
  virtual ~WgradResolver() = default;
  /// `fetch`: a framework's get_main_grad() is called; without it only its presence is told.
  virtual ResolvedWgradAttrs resolve(const at::Tensor& param, bool fetch) const = 0;
  /// grad_added_to_main_grad = true.
  virtual void mark_grad_added(const at::Tensor& param) const = 0;
};

/// The one in charge of a parameter: of its record if it has one, else the one that was installed.
const WgradResolver& wgrad_resolver(const at::Tensor& param);
/// Installs the resolver of parameters without a record. It must live as long as the process.
void set_wgrad_resolver(const WgradResolver* resolver);

}  // namespace weft::ops
