#include "weft/ops/wgrad_sink.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <map>
#include <mutex>
#include <vector>

#include "weft/kernels/gemm.h"
#include "weft/ops/rows.h"
#include "weft/ops/wgrad_queue.h"
#include "weft/ops/wgrad_record.h"
#include "weft/tensor/by_identity.h"

namespace weft::ops {
namespace {

/// What is remembered of a parameter between backward runs.
struct Due {
  WgradQueue queue;
  int64_t overwritten_in = -1;  // the last backward run that overwrote main_grad
};

ByIdentity<Due>& due() {
  static auto* table = new ByIdentity<Due>;  // never destroyed, like the records
  return *table;
}

/// Backward runs on several threads may write one main_grad; autograd would take the accumulator's lock.
std::mutex& write_lock(const at::Tensor& param) {
  static std::array<std::mutex, 64> locks;
  return locks[std::hash<const void*>{}(param.unsafeGetTensorImpl()) / alignof(std::max_align_t) % locks.size()];
}

void check_main_grad(const WgradOptions& options, const at::Tensor& param, const at::Tensor& main_grad) {
  TORCH_CHECK(main_grad.defined(), options.op, ": accumulate_into_main_grad is on, but the weight of shape ",
              param.sizes(), " has no main_grad. Set weight.main_grad before backward, or turn the option off.");
  TORCH_CHECK(main_grad.layout() == at::kStrided && !main_grad.key_set().has(c10::DispatchKey::Python), options.op,
              ": main_grad must be a plain dense tensor, no DTensor or other subclass.");
  TORCH_CHECK(main_grad.device() == param.device() && at::isFloatingType(main_grad.scalar_type()), options.op,
              ": main_grad is ", main_grad.scalar_type(), " on ", main_grad.device(), ", the weight is on ",
              param.device(), "; expected real floating-point numbers on the weight's device.");
  TORCH_CHECK(main_grad.numel() == param.numel() && main_grad.is_contiguous(), options.op, ": main_grad has shape ",
              main_grad.sizes(), " and strides ", main_grad.strides(), ", the weight has shape ", param.sizes(),
              "; expected a contiguous tensor of as many elements.");
}

void raise_version(const at::Tensor& t) {
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

/// The product into the sink's memory, or into fresh memory. Of several writes in one backward run (a weight that is
/// used twice) only the first overwrites.
at::Tensor write(const WgradSink& sink, const at::Tensor& param, const WgradProduct& product) {
  const auto dy = as_matrix(product.dy), x = as_matrix(product.x);
  if (!sink.out.defined())
    return kernels::gemm(kernels::transposed(dy), x, {.scale = product.scale, .between = product.between}).out;
  const auto out = sink.out.view({dy.size(1), x.size(1)});
  const auto remembered = sink.add ? nullptr : due().get(param);
  const std::lock_guard lock(write_lock(param));
  const bool add = sink.add || remembered->overwritten_in == product.run;
  if (remembered) remembered->overwritten_in = product.run;
  raise_version(sink.out);
  return kernels::gemm(
             kernels::transposed(dy), x,
             {.scale = product.scale, .add = add ? out : at::Tensor{}, .out = out, .between = product.between})
      .out;
}

}  // namespace

WgradSink resolve(const WgradOptions& options, const at::Tensor& param, bool fetch) {
  using Gives = WgradSink::Gives;
  if (!options.accumulate) return {.gives = options.delay ? Gives::nothing : Gives::gradient};
  const auto notes = wgrad_resolver(param).resolve(param, fetch);
  const bool comes_later = notes.has_getter && !fetch;
  if (!comes_later) check_main_grad(options, param, notes.main_grad);
  return {.out = comes_later ? at::Tensor{} : notes.main_grad,
          .add = !notes.overwrite,
          .gives = notes.has_flag ? Gives::dummy : Gives::nothing,
          .zero_dummy = notes.zero_out};
}

at::Tensor weight_gradient(const WgradOptions& options, const at::Tensor& param, WgradProduct product) {
  const auto sink = resolve(options, param, /*fetch=*/!options.delay);
  at::Tensor dw;
  if (options.delay) {
    due().get(param)->queue.put(std::move(product));
  } else {
    dw = write(sink, param, product);
  }
  switch (sink.gives) {
    case WgradSink::Gives::gradient:
      return dw;
    case WgradSink::Gives::nothing:
      return {};
    case WgradSink::Gives::dummy:
      wgrad_resolver(param).set_added(param);
      return dummy_gradient(param, sink.zero_dummy);
  }
  return {};
}

bool backward_dw(const WgradOptions& options, const at::Tensor& param) {
  const auto found = due().find(param);
  if (!found || found->queue.size() == 0) return false;
  const auto sink = resolve(options, param, /*fetch=*/true);
  const auto product = found->queue.pop();
  auto dw = write(sink, param, product);
  if (sink.gives == WgradSink::Gives::dummy) wgrad_resolver(param).set_added(param);
  if (options.accumulate) return true;
  auto& grad = param.mutable_grad();
  if (!grad.defined()) {
    grad = dw.to(param.scalar_type());
  } else {
    grad.add_(dw.to(param.scalar_type()));
    raise_version(grad);
  }
  return true;
}

size_t pending_dw(const at::Tensor& param) {
  const auto found = due().find(param);
  return found ? found->queue.size() : 0;
}

at::Tensor dummy_gradient(const at::Tensor& param, bool zero) {
  using Key = std::tuple<std::vector<int64_t>, std::vector<int64_t>, at::ScalarType, c10::DeviceType, int>;
  static std::mutex mutex;
  static auto* kept = new std::map<Key, at::Tensor>;
  const bool dense = param.is_non_overlapping_and_dense();
  const auto strides = dense ? param.strides().vec() : std::vector<int64_t>{};
  const std::lock_guard lock(mutex);
  auto& dummy = (*kept)[{param.sizes().vec(), strides, param.scalar_type(), param.device().type(),
                         static_cast<int>(param.device().index())}];
  if (!dummy.defined()) {
    const auto options = param.options().requires_grad(false);
    dummy = dense ? at::empty_strided(param.sizes(), strides, options).zero_() : at::zeros(param.sizes(), options);
  }
  if (zero) dummy.fill_(0);
  return dummy.detach();
}

}  // namespace weft::ops
