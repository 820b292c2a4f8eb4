#include "weft/ops/wgrad_sink.h"

#include <ATen/ops/empty.h>
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

using Sinks = c10::SmallVector<WgradSink, 1>;
using Gradients = c10::SmallVector<at::Tensor, 1>;

/// The sinks of all parameters that one product serves.
Sinks resolve_all(const WgradOptions& options, Params params, bool fetch) {
  Sinks sinks;
  for (const auto& param : params) sinks.push_back(resolve(options, param, fetch));
  for (const auto& sink : sinks) {
    TORCH_CHECK(sink.add == sinks[0].add, options.op,
                ": overwrite_main_grad differs between the weights of one operation; set it alike on all of them.");
    TORCH_CHECK(!sink.out.defined() || sink.out.scalar_type() == sinks[0].out.scalar_type(), options.op,
                ": the main_grads of one operation are ", sinks[0].out.scalar_type(), " and ", sink.out.scalar_type(),
                "; expected one dtype.");
  }
  return sinks;
}

/// dW of one weight, to `out` or to fresh memory.
Gradients write_one(const WgradProduct& product, const at::Tensor& main_grad, bool add) {
  const auto dy = as_matrix(product.dy), x = as_matrix(product.x);
  kernels::Epilogue epilogue{.scale = product.scale, .between = product.between};
  if (main_grad.defined()) epilogue.out = main_grad.view({dy.size(1), x.size(1)});
  if (add) epilogue.add = epilogue.out;
  return {kernels::gemm(kernels::transposed(dy, product.tiles), x, epilogue).out};
}

/// dW of each group, to the sinks or to slices of one fresh block.
Gradients write_groups(const WgradProduct& product, const Sinks& sinks, bool add) {
  const auto dy = as_matrix(product.dy), x = as_matrix(product.x);
  const kernels::GroupIndex index(product.splits);
  const auto groups = index.groups(), n = dy.size(1), k = x.size(1);
  const bool one = product.stacked, fresh = !sinks[0].out.defined();
  Gradients gradients;
  kernels::GroupedMatrix out;
  if (fresh || one) {
    const auto block = fresh ? at::empty({groups, n, k}, x.options()) : sinks[0].out.view({groups, n, k});
    out = kernels::GroupedMatrix(block);
    for (size_t g = 0; g < sinks.size(); ++g)
      gradients.push_back(one ? block : block.select(0, static_cast<int64_t>(g)));
  } else {
    for (const auto& sink : sinks) gradients.push_back(sink.out);
    out = kernels::GroupedMatrix(gradients, n, k);
  }
  kernels::grouped_weight_gradient(index, dy, x, out, add, product.path);
  return gradients;
}

/// The product into the sinks' memory, or into fresh memory. Of several writes in one backward run (a weight that is
/// used twice) only the first overwrites.
Gradients write(const Sinks& sinks, Params params, const WgradProduct& product) {
  const auto compute = [&](bool add) {
    return product.splits.defined() ? write_groups(product, sinks, add) : write_one(product, sinks[0].out, add);
  };
  if (!sinks[0].out.defined()) return compute(false);
  const auto remembered = sinks[0].add ? nullptr : due().get(params[0]);
  const std::lock_guard lock(write_lock(params[0]));
  const bool add = sinks[0].add || remembered->overwritten_in == product.run;
  if (remembered) remembered->overwritten_in = product.run;
  for (const auto& sink : sinks) raise_version(sink.out);
  return compute(add);
}

/// The Parameters themselves. A gradient that leaves autograd's way needs to know whose it is.
Gradients leaves_of(const OpContext& ctx, const WgradOptions& options, int first, int count) {
  TORCH_CHECK_NOT_IMPLEMENTED(ctx.leaves(), options.op,
                              ": accumulate_into_main_grad and delay_wgrad_compute need the Parameter, which a "
                              "compiled, exported or functional call does not carry. Run the module eagerly, or turn "
                              "the options off.");
  Gradients leaves;
  for (int i = first; i < first + count; ++i) {
    leaves.push_back(ctx.leaves()->leaf(ctx.plan().param_base + i));
    TORCH_CHECK(leaves.back().defined(), options.op,
                ": accumulate_into_main_grad or delay_wgrad_compute is on, but the weight is computed from other "
                "tensors (a parametrization, a view of a flat parameter), so it has no main_grad or .grad of its own. "
                "Use a weight that is a Parameter, or turn the options off.");
  }
  return leaves;
}

void add_to_grad(const at::Tensor& param, const at::Tensor& dw) {
  auto& grad = param.mutable_grad();
  if (!grad.defined()) {
    grad = dw.to(param.scalar_type());
  } else {
    grad.add_(dw.to(param.scalar_type()));
    raise_version(grad);
  }
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

void weight_gradient(OpContext& ctx, const WgradOptions& options, int first, int count, WgradProduct product) {
  if (!options.accumulate && !options.delay) {
    auto gradients = write(Sinks(count), {}, product);
    for (int i = 0; i < count; ++i) ctx.set_param_grad(first + i, std::move(gradients[i]));
    return;
  }
  const auto params = leaves_of(ctx, options, first, count);
  const auto sinks = resolve_all(options, params, /*fetch=*/!options.delay);
  if (options.delay || !sinks[0].add) product.run = ctx.leaves()->run();
  if (options.delay) {
    due().get(params[0])->queue.put(std::move(product));
  } else {
    write(sinks, params, product);
    ctx.frame().added.push_back(ctx.index());
  }
  for (int i = 0; i < count; ++i) {
    if (sinks[i].gives != WgradSink::Gives::dummy) continue;
    wgrad_resolver(params[i]).set_added(params[i]);
    ctx.set_param_grad(first + i, dummy_gradient(params[i], sinks[i].zero_dummy));
  }
}

bool backward_dw(const WgradOptions& options, Params params) {
  const auto found = due().find(params[0]);
  if (!found || found->queue.runs() == 0) return false;
  const auto sinks = resolve_all(options, params, /*fetch=*/true);
  for (const auto& product : found->queue.pop_run()) {
    const auto gradients = write(sinks, params, product);
    for (size_t i = 0; i < params.size() && !options.accumulate; ++i) add_to_grad(params[i], gradients[i]);
  }
  for (size_t i = 0; i < params.size(); ++i)
    if (sinks[i].gives == WgradSink::Gives::dummy) wgrad_resolver(params[i]).set_added(params[i]);
  return true;
}

size_t pending_dw(const at::Tensor& param) {
  const auto found = due().find(param);
  return found ? found->queue.runs() : 0;
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
