#include "weft/ops/wgrad_sink.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <map>
#include <mutex>
#include <vector>

#include "weft/core/value.h"
#include "weft/core/weak_tensor_map.h"
#include "weft/kernels/gemm.h"
#include "weft/ops/leading_dims.h"
#include "weft/ops/wgrad_attrs.h"
#include "weft/ops/wgrad_queue.h"

namespace weft::ops {
namespace {

/// State of a parameter that persists between backward calls.
struct WgradState {
  WgradQueue queue;
  int64_t overwritten_by = -1;  // graph_task_id of the last backward that overwrote main_grad
};

WeakTensorMap<WgradState>& wgrad_states() {
  static auto* table = new WeakTensorMap<WgradState>;  // never destroyed: parameters may outlive static destructors
  return *table;
}

/// Guards main_grad, which backward calls on several threads may write. (For .grad, AccumulateGrad holds a lock.) One
/// of 64 locks, chosen by the address of the parameter.
std::mutex& write_lock(const at::Tensor& param) {
  static std::array<std::mutex, 64> locks;
  return locks[std::hash<const void*>{}(param.unsafeGetTensorImpl()) / alignof(std::max_align_t) % locks.size()];
}

void check_main_grad(const at::Tensor& param, const at::Tensor& main_grad) {
  TORCH_CHECK(main_grad.defined(), "accumulate_into_main_grad is on, but the weight of shape ", param.sizes(),
              " has no main_grad. Set weight.main_grad before backward, or turn the option off.");
  TORCH_CHECK(main_grad.layout() == at::kStrided && !main_grad.key_set().has(c10::DispatchKey::Python),
              "main_grad must be a dense torch.Tensor, not a DTensor or another subclass.");
  TORCH_CHECK(main_grad.device() == param.device() && is_compute_dtype(main_grad.scalar_type()), "main_grad is ",
              dtype_name(main_grad.scalar_type()), " on ", main_grad.device(), ", the weight is on ", param.device(),
              "; expected ", kComputeDtypes, " on the weight's device.");
  TORCH_CHECK(main_grad.numel() == param.numel() && main_grad.is_contiguous(), "main_grad has shape ",
              main_grad.sizes(), " and strides ", main_grad.strides(), ", the weight has shape ", param.sizes(),
              "; expected a contiguous tensor with the same number of elements.");
}

void bump_version(const at::Tensor& t) {
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

using Sinks = c10::SmallVector<WgradSink, 1>;
using Tensors = c10::SmallVector<at::Tensor, 1>;

/// The sinks of all parameters of one wgrad GEMM: one, or one per group.
Sinks resolve_all(const WgradOptions& options, Params params, bool fetch) {
  Sinks sinks;
  for (const auto& param : params) sinks.push_back(resolve(options, param, fetch));
  for (const auto& sink : sinks) {
    TORCH_CHECK(sink.accumulate == sinks[0].accumulate,
                "overwrite_main_grad differs between the weights of one operation; set the same value on all.");
    TORCH_CHECK(!sink.out.defined() || sink.out.scalar_type() == sinks[0].out.scalar_type(),
                "the main_grads of one operation are ", dtype_name(sinks[0].out.scalar_type()), " and ",
                dtype_name(sink.out.scalar_type()), "; expected one dtype.");
  }
  return sinks;
}

/// dW [out, in] of one weight, written to `main_grad` if defined, else to new memory.
Tensors write_one(const WgradGemm& gemm, const at::Tensor& main_grad, bool accumulate) {
  const auto dy = as_matrix(gemm.dy), x = as_matrix(gemm.x);
  kernels::Epilogue epilogue{.scale = gemm.scale, .progress = gemm.progress};
  if (main_grad.defined()) epilogue.out = main_grad.view({dy.size(1), x.size(1)});
  if (accumulate) epilogue.addend = epilogue.out;
  return {kernels::gemm(kernels::transposed(dy, gemm.packed_dy), x, epilogue).out};
}

/// dW of each group, written to the sinks, or to slices of one new tensor [G, out, in]. Returns one tensor per sink.
Tensors write_groups(const WgradGemm& gemm, const Sinks& sinks, bool accumulate) {
  const auto dy = as_matrix(gemm.dy), x = as_matrix(gemm.x);
  const kernels::GroupIndex index(gemm.splits);
  const auto groups = index.groups(), n = dy.size(1), k = x.size(1);
  const bool allocate = !sinks[0].out.defined();
  Tensors gradients;
  kernels::GroupedMatrix out;
  if (allocate || gemm.stacked) {
    const auto stack = allocate ? at::empty({groups, n, k}, x.options()) : sinks[0].out.view({groups, n, k});
    out = kernels::GroupedMatrix(stack);
    for (size_t g = 0; g < sinks.size(); ++g)
      gradients.push_back(gemm.stacked ? stack : stack.select(0, static_cast<int64_t>(g)));
  } else {
    for (const auto& sink : sinks) gradients.push_back(sink.out);
    out = kernels::GroupedMatrix(gradients, n, k);
  }
  kernels::grouped_weight_gradient(index, dy, x, out, accumulate, gemm.path, gemm.quantization);
  return gradients;
}

/// Runs the wgrad GEMM into the sinks, or into new memory. If a weight is used several times in one backward, only the
/// first write overwrites main_grad; the others add to it.
Tensors write(const Sinks& sinks, Params params, const WgradGemm& gemm) {
  const auto compute = [&](bool accumulate) {
    if (gemm.compute) return Tensors{gemm.compute(sinks[0].out, accumulate)};
    return gemm.splits.defined() ? write_groups(gemm, sinks, accumulate) : write_one(gemm, sinks[0].out, accumulate);
  };
  if (!sinks[0].out.defined()) return compute(false);
  const auto state = sinks[0].accumulate ? nullptr : wgrad_states().get(params[0]);
  const std::lock_guard lock(write_lock(params[0]));
  const bool accumulate = sinks[0].accumulate || state->overwritten_by == gemm.graph_task_id;
  if (state) state->overwritten_by = gemm.graph_task_id;
  for (const auto& sink : sinks) bump_version(sink.out);
  return compute(accumulate);
}

/// Parameters `first` to `first + count - 1` of the operation, into whose main_grad or .grad dW is written directly.
Tensors leaf_params_of(const OpContext& ctx, int first, int count) {
  TORCH_CHECK_NOT_IMPLEMENTED(ctx.leaf_params(),
                              "accumulate_into_main_grad and delay_wgrad_compute need the Parameter object, which is "
                              "not available in a compiled, exported or functional call. Run the module eagerly, or "
                              "turn the options off.");
  Tensors leaves;
  for (int i = first; i < first + count; ++i) {
    leaves.push_back(ctx.leaf_params()->leaf(ctx.plan().param_base + i));
    TORCH_CHECK(leaves.back().defined(),
                "accumulate_into_main_grad or delay_wgrad_compute is on, but the weight is computed from other "
                "tensors (a parametrization, a view of a flat parameter) and has no main_grad or .grad. Use a weight "
                "that is a Parameter, or turn the options off.");
  }
  return leaves;
}

/// param.grad += dW, as AccumulateGrad would; it runs below autograd, so it increments the version itself.
void add_to_grad(const at::Tensor& param, const at::Tensor& dw) {
  auto& grad = param.mutable_grad();
  if (!grad.defined()) {
    grad = dw.to(param.scalar_type());
  } else {
    grad.add_(dw.to(param.scalar_type()));
    bump_version(grad);
  }
}

}  // namespace

WgradSink resolve(const WgradOptions& options, const at::Tensor& param, bool fetch) {
  using Returns = WgradSink::Returns;
  if (!options.accumulate) return {.returns = options.delay ? Returns::nothing : Returns::gradient};
  const auto attrs = wgrad_resolver(param).resolve(param, fetch);
  const bool fetched_later = attrs.has_getter && !fetch;
  if (!fetched_later) check_main_grad(param, attrs.main_grad);
  return {.out = fetched_later ? at::Tensor{} : attrs.main_grad,
          .accumulate = !attrs.overwrite,
          .returns = attrs.has_flag ? Returns::dummy : Returns::nothing,
          .zero_dummy = attrs.zero_out};
}

void weight_gradient(OpContext& ctx, const WgradOptions& options, int first, int count, WgradGemm gemm) {
  if (!options.accumulate && !options.delay) {
    auto gradients = write(Sinks(count), {}, gemm);
    for (int i = 0; i < count; ++i) ctx.set_param_grad(first + i, std::move(gradients[i]));
    return;
  }
  const auto params = leaf_params_of(ctx, first, count);
  const auto sinks = resolve_all(options, params, /*fetch=*/!options.delay);
  if (options.delay || !sinks[0].accumulate) gemm.graph_task_id = ctx.leaf_params()->graph_task_id();
  if (options.delay) {
    wgrad_states().get(params[0])->queue.push(std::move(gemm));
  } else {
    write(sinks, params, gemm);
    ctx.record_added_to_main_grad();
  }
  for (int i = 0; i < count; ++i) {
    if (sinks[i].returns != WgradSink::Returns::dummy) continue;
    wgrad_resolver(params[i]).mark_grad_added(params[i]);
    ctx.set_param_grad(first + i, dummy_gradient(params[i], sinks[i].zero_dummy));
  }
}

bool backward_dw(const WgradOptions& options, Params params) {
  const auto found = wgrad_states().find(params[0]);
  if (!found || found->queue.num_backwards() == 0) return false;
  const auto sinks = resolve_all(options, params, /*fetch=*/true);
  for (const auto& gemm : found->queue.pop_oldest()) {
    const auto gradients = write(sinks, params, gemm);
    for (size_t i = 0; i < params.size() && !options.accumulate; ++i) add_to_grad(params[i], gradients[i]);
  }
  for (size_t i = 0; i < params.size(); ++i)
    if (sinks[i].returns == WgradSink::Returns::dummy) wgrad_resolver(params[i]).mark_grad_added(params[i]);
  return true;
}

size_t pending_dw(const at::Tensor& param) {
  const auto found = wgrad_states().find(param);
  return found ? found->queue.num_backwards() : 0;
}

at::Tensor dummy_gradient(const at::Tensor& param, bool zero) {
  using Key = std::tuple<std::vector<int64_t>, std::vector<int64_t>, at::ScalarType, c10::DeviceType, int>;
  static std::mutex mutex;
  static auto* cache = new std::map<Key, at::Tensor>;
  const bool dense = param.is_non_overlapping_and_dense();
  const auto strides = dense ? param.strides().vec() : std::vector<int64_t>{};
  const std::lock_guard lock(mutex);
  auto& dummy = (*cache)[{param.sizes().vec(), strides, param.scalar_type(), param.device().type(),
                          static_cast<int>(param.device().index())}];
  if (!dummy.defined()) {
    const auto options = param.options().requires_grad(false);
    dummy = dense ? at::empty_strided(param.sizes(), strides, options).zero_() : at::zeros(param.sizes(), options);
  }
  if (zero) dummy.fill_(0);
  return dummy.detach();
}

}  // namespace weft::ops
