#pragma once
#include <memory>

#include "weft/kernels/quantize.h"

namespace weft::quant {

/// A matrix and its quantized form, which has no copies if the recipe does not quantize it.
struct ObservedOperand {
  at::Tensor matrix;
  kernels::QuantizedMatrix quantized;
};

/// Sees what linears quantize, in all threads. Reads the tensors, which may change or be freed after it returns.
class Observer {
 public:
  Observer() = default;
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;
  virtual ~Observer() = default;
  /// Forward. `call` identifies the call in its backward; 0 without one. `parameter`: W as the caller passed it.
  virtual void observe_forward(int64_t call, const at::Tensor& parameter, const ObservedOperand& x,
                               const ObservedOperand& w) = 0;
  virtual void observe_backward(int64_t call, const ObservedOperand& dy) = 0;
};

/// The observer of the process; nullptr: none.
std::shared_ptr<Observer> observer();
void set_observer(std::shared_ptr<Observer> observer);

}  // namespace weft::quant
