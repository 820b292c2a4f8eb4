#include "weft/fuser/autograd.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <array>

#include "weft/core/dispatch_keys.h"
#include "weft/core/ownership.h"
#include "weft/fuser/call_validation.h"
#include "weft/fuser/executor.h"
#include "weft/fuser/graph_task.h"
#include "weft/kernels/rows.h"
#include "weft/ops/leading_dims.h"

namespace weft::fuser {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// The tensors that the caller holds and can write into: x, extra inputs, outputs, parameters.
using CallerTensors = std::array<c10::ArrayRef<at::Tensor>, 4>;

/// Properties of a saved tensor before a saved-tensor hook packed it.
struct SavedMeta {
  c10::SmallVector<int64_t, 5> sizes;
  at::ScalarType dtype = at::ScalarType::Undefined;  // Undefined: an empty slot
  c10::Device device = at::kCPU;
  bool contiguous = true;

  static SavedMeta of(const at::Tensor& t) {
    if (!t.defined()) return {};
    return {{t.sizes().begin(), t.sizes().end()}, t.scalar_type(), t.device(), t.is_contiguous()};
  }

  /// Checks `t`, as returned by an unpack hook, against the properties. Returns it, made contiguous if `contiguous`.
  at::Tensor restore(const at::Tensor& t) const {
    if (dtype == at::ScalarType::Undefined || !t.defined()) return t;
    check_gradients({t}, "a saved tensor");
    TORCH_CHECK(t.sizes() == at::IntArrayRef(sizes) && t.scalar_type() == dtype && t.device() == device,
                "weft: a saved-tensor hook returned ", dtype_name(t.scalar_type()), " of shape ", t.sizes(), " on ",
                t.device(), " for a saved tensor that is ", dtype_name(dtype), " of shape ", at::IntArrayRef(sizes),
                " on ", device, ". The unpack hook must return what the pack hook was given.");
    return contiguous ? t.contiguous() : t;
  }
};

/// The memory that a saved parameter had in forward. Backward reads this memory even if `param.data` was set since.
struct ParamMemory {
  c10::Storage storage;
  int64_t offset;
  at::ScalarType dtype;
  int param;    // index among the pipeline's parameters
  size_t slot;  // index among the saved variables

  /// Points `t`, the unpacked parameter, to this memory.
  void restore(at::Tensor& t, const Pipeline& pipeline) const {
    const bool same = t.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
    if (same && t.storage_offset() == offset) return;
    const BelowAutograd below;
    const auto& shape = pipeline.params()[param].shape;
    t = at::empty({0}, at::TensorOptions().dtype(dtype).device(storage.device()));
    t.set_(storage, offset, shape, c10::contiguous_strides(shape));
  }
};

/// The autograd node of a whole pipeline. Edges: x, parameters, extra inputs. Inputs: the gradients of the main output
/// and of the extra outputs returned to the caller.
class PipelineNode final : public Node {
 public:
  PipelineNode(std::shared_ptr<const Pipeline> pipeline, std::shared_ptr<const Plan> plan,
               torch::autograd::edge_list&& edges)
      : Node(std::move(edges)), pipeline_(std::move(pipeline)), plan_(std::move(plan)) {}

  std::string name() const override { return "WeftPipelineBackward"; }

  /// Saves the slots, the additional tensors of Python operations, and the parameters that backward reads. A saved
  /// tensor that aliases one of `caller_tensors` shares its version counter.
  void save_for_backward(const ops::Frame& frame, ops::Params params, const Tensors& outputs,
                         const CallerTensors& caller_tensors);

  variable_list apply(variable_list&& grads) override;
  /// As apply, without an engine.
  variable_list apply_once(variable_list&& grads) {
    by_hand_ = last_use_ = true;
    return apply(std::move(grads));
  }
  void will_release_variables() override { last_use_ = true; }
  void release_variables() override {
    const std::lock_guard lock(mutex_);
    release();
  }

 private:
  void release() {
    released_ |= !saved_.empty() || !states_.empty();
    saved_.clear();
    metas_.clear();
    memories_.clear();
    states_.clear();
  }
  c10::intrusive_ptr<Node> reject_double_backward(const variable_list& grads) const;
  variable_list differentiate(variable_list&& grads, std::vector<at::Tensor> saved,
                              std::vector<std::shared_ptr<void>> states);

  std::shared_ptr<const Pipeline> pipeline_;
  std::shared_ptr<const Plan> plan_;
  std::vector<SavedVariable> saved_;
  std::vector<SavedMeta> metas_;               // of `saved_`; empty without saved-tensor hooks
  c10::SmallVector<ParamMemory, 4> memories_;  // of saved parameters
  std::vector<std::shared_ptr<void>> states_;  // contexts of Python operations
  std::vector<ops::Buffers> buffers_;          // only written, so not saved variables
  bool last_use_ = false;                      // the graph is not retained after this backward
  bool by_hand_ = false;                       // the engine knows nothing of this backward
  bool released_ = false;
};

/// The first tensor of the list that has the same storage as `t`, or nullptr.
const at::Tensor* find_alias(const at::Tensor& t, c10::ArrayRef<at::Tensor> list) {
  const auto* storage = t.storage().unsafeGetStorageImpl();
  for (const auto& other : list)
    if (other.defined() && other.storage().unsafeGetStorageImpl() == storage) return &other;
  return nullptr;
}

/// A view of a parameter for saved-tensor hooks, which can recognize a parameter by the view's base.
at::Tensor view_for_hooks(const at::Tensor& param) {
  const at::NoGradGuard no_grad;
  return at::alias(param);
}

void PipelineNode::save_for_backward(const ops::Frame& frame, ops::Params params, const Tensors& outputs,
                                     const CallerTensors& caller_tensors) {
  const bool has_hooks = at::SavedTensorDefaultHooks::get_hooks().has_value();
  const auto save = [&](const at::Tensor& t) {
    const bool is_output =
        std::any_of(outputs.begin(), outputs.end(), [&](const at::Tensor& y) { return y.is_same(t); });
    bool is_callers = false;  // not a view or another tensor
    for (const auto& list : caller_tensors) {
      if (is_output || !t.defined()) break;
      if (const auto* other = find_alias(t, list)) {
        ops::share_version_counter(t, *other);
        is_callers = other->is_same(t);
        break;
      }
    }
    if (has_hooks) metas_.push_back(SavedMeta::of(t));
    // A leaf would be saved itself, and setting its `.data` would change what backward reads.
    saved_.emplace_back(is_callers && !has_hooks && t.is_leaf() ? at::Tensor(t.tensor_data()) : t, is_output);
  };
  saved_.reserve(plan_->num_saved + plan_->backward_params.size() +
                 (frame.dynamic_saved ? frame.dynamic_saved->size() : 0));
  for (int slot = 0; slot < plan_->num_saved; ++slot) save(frame.saved[slot]);
  for (const int p : plan_->backward_params) {
    if (has_hooks) {
      save(view_for_hooks(params[p]));
    } else if (params[p].is_contiguous()) {
      memories_.push_back({params[p].storage(), params[p].storage_offset(), params[p].scalar_type(), p, saved_.size()});
      saved_.emplace_back(params[p], /*is_output=*/false);
    } else {
      save(at::Tensor(params[p].tensor_data()));
    }
  }
  if (frame.dynamic_saved)
    for (const auto& t : *frame.dynamic_saved) save(t);
  if (frame.states) states_ = std::move(*frame.states);
  buffers_ = frame.buffers.vec();
}

/// Flags the gradients (x, extra inputs, parameters, as in the plan key) that autograd does not use in this backward,
/// as in `torch.autograd.grad` for some of the inputs; empty if it uses all.
std::vector<uint8_t> unused_gradients(const Node& node, int num_params, int num_extras) {
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  if (!info || info->empty()) return {};
  std::vector<uint8_t> unused{!node.task_should_compute_output(0)};
  for (int k = 0; k < num_extras; ++k) unused.push_back(!node.task_should_compute_output(1 + num_params + k));
  for (int p = 0; p < num_params; ++p) unused.push_back(!node.task_should_compute_output(1 + p));
  return unused;
}

/// Finds Parameters through the AccumulateGrad nodes that the edges lead to; saved tensors may be copies.
class EdgeLeafParams final : public ops::LeafParams {
 public:
  explicit EdgeLeafParams(const Node& node) : node_(node) {}
  at::Tensor leaf(int p) const override {
    const auto* accumulator = dynamic_cast<torch::autograd::AccumulateGrad*>(node_.next_edge(1 + p).function.get());
    return accumulator ? accumulator->variable : at::Tensor();
  }
  int64_t graph_task_id() const override { return outermost_graph_task_id(); }

 private:
  const Node& node_;
};

variable_list PipelineNode::apply(variable_list&& grads) {
  check_gradients(grads);
  std::vector<at::Tensor> saved;
  std::vector<std::shared_ptr<void>> states;
  {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
    saved.reserve(saved_.size());
    const auto self = saved_.empty() ? c10::intrusive_ptr<Node>() : getptr();
    for (const auto& variable : saved_) saved.push_back(variable.unpack(self));
    for (size_t k = 0; k < metas_.size(); ++k) saved[k] = metas_[k].restore(saved[k]);
    for (const auto& memory : memories_) memory.restore(saved[memory.slot], *pipeline_);
    states = states_;
    if (last_use_) release();
  }
  if (!c10::GradMode::is_enabled()) return differentiate(std::move(grads), std::move(saved), std::move(states));
  auto error = reject_double_backward(grads);
  auto out = differentiate(std::move(grads), std::move(saved), std::move(states));
  for (auto& grad : out) {
    if (!grad.defined()) continue;
    grad = grad.detach();
    torch::autograd::impl::set_gradient_edge(grad, {error, error->add_input_metadata(grad)});
  }
  return out;
}

/// An error node with edges to everything that the gradients depend on, so that every second-order path raises.
c10::intrusive_ptr<Node> PipelineNode::reject_double_backward(const variable_list& grads) const {
  auto edges = next_edges();
  for (const auto& grad : grads)
    if (grad.defined() && grad.requires_grad()) edges.push_back(torch::autograd::impl::gradient_edge(grad));
  return c10::make_intrusive<torch::autograd::Error>(
      "weft: differentiating twice through a pipeline is not supported. Use torch operations where you need second "
      "derivatives.",
      std::move(edges));
}

/// Casts gradients accumulated in float32 to the dtype that the next node expects. Autograd would do it too, but its
/// dispatcher calls cost more than the kernels of a small pipeline.
void cast_to_expected_dtypes(const Node& node, variable_list& grads) {
  for (size_t i = 0; i < grads.size(); ++i) {
    const auto& edge = node.next_edge(i);
    if (!grads[i].defined() || grads[i].scalar_type() != at::kFloat || !edge.is_valid()) continue;
    const auto expected = edge.function->input_metadata(edge.input_nr).grad_dtype();
    if (expected && at::isReducedFloatingType(*expected)) grads[i] = kernels::rounded(grads[i], *expected);
  }
}

variable_list PipelineNode::differentiate(variable_list&& grads, std::vector<at::Tensor> saved,
                                          std::vector<std::shared_ptr<void>> states) {
  const BelowAutograd below;
  const auto& pipeline = *pipeline_;
  const int num_params = pipeline.num_params();
  const auto& inputs = pipeline.caller_inputs();
  const auto& outputs = pipeline.caller_outputs();

  variable_list out(1 + num_params + inputs.size());
  Tensors extra_in(pipeline.num_extra_in()), extra_out(pipeline.num_extra_out());
  c10::SmallVector<at::Tensor, 8> params(num_params);
  auto next = saved.begin() + plan_->num_saved;
  for (const int p : plan_->backward_params) params[p] = std::move(*next++);
  std::vector<at::Tensor> dynamic_saved(std::make_move_iterator(next), std::make_move_iterator(saved.end()));
  for (size_t k = 0; k < outputs.size(); ++k) extra_out[outputs[k]] = std::move(grads[1 + k]);

  const EdgeLeafParams leaf_params(*this);
  ops::Frame frame{.saved = saved.data(),
                   .extra_in = extra_in.data(),
                   .extra_out = extra_out.data(),
                   .param_grads = out.data() + 1,
                   .params = params.data(),
                   .dynamic_saved = &dynamic_saved,
                   .states = &states,
                   .leaf_params = &leaf_params,
                   .added_to_main_grad = {},
                   .buffers = buffers_,
                   .report = &pipeline.report().backward};
  auto dy = std::move(grads[0]);
  grads.clear();
  const auto unused =
      by_hand_ ? std::vector<uint8_t>() : unused_gradients(*this, num_params, static_cast<int>(inputs.size()));
  out[0] = unused.empty() ? run_backward(pipeline, *plan_, frame, std::move(dy))
                          : run_backward(pipeline, prune(pipeline, *plan_, unused), frame, std::move(dy));
  for (size_t k = 0; k < inputs.size(); ++k) out[1 + num_params + k] = std::move(extra_in[inputs[k]]);
  cast_to_expected_dtypes(*this, out);
  return out;
}

torch::autograd::edge_list edges_of(const at::Tensor& x, ops::Params params, const Tensors& extras) {
  torch::autograd::edge_list edges;
  edges.reserve(1 + params.size() + extras.size());
  const auto add = [&](const at::Tensor& t) {
    edges.push_back(t.requires_grad() ? torch::autograd::impl::gradient_edge(t) : torch::autograd::Edge());
  };
  add(x);
  for (const auto& param : params) add(param);
  for (const auto& extra : extras) add(extra);
  return edges;
}

/// Moves each extra input that its operation may overwrite and that is not referenced elsewhere into `extra_in`, so
/// that the operation becomes its sole owner. A leaf that requires grad is never donated.
void donate_extras(const Pipeline& pipeline, const Plan& plan, Tensors& extras, Tensors& extra_in) {
  const auto& slots = pipeline.caller_inputs();
  for (size_t k = 0; k < extras.size(); ++k) {
    const bool may_write = plan.in_place && pipeline.op(pipeline.consumer(slots[k])).in_place();
    const bool leaf = extras[k].requires_grad() && extras[k].is_leaf();
    if (may_write && !leaf && sole_owner(extras[k])) {
      extra_in[slots[k]] = extras[k].detach();
      extras[k].reset();
      torch::autograd::impl::bump_version(extra_in[slots[k]]);
    } else {
      extra_in[slots[k]] = extras[k];
    }
  }
}

/// Attaches the node to the outputs. An output that shares memory with an input or another output becomes a view of it,
/// so that autograd detects in-place changes to either.
void finalize_outputs(Tensors& outputs, const at::Tensor& x, const Tensors& extras, c10::ArrayRef<uint8_t> needs_grad,
                      const c10::intrusive_ptr<Node>& node) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    auto& y = outputs[i];
    const auto* source = find_alias(y, x);
    if (!source) source = find_alias(y, extras);
    if (!source) source = find_alias(y, {outputs.data(), i});
    const bool differentiable = node && needs_grad[i] && torch::autograd::isDifferentiableType(y.scalar_type());
    if (source && !(y.is_same(*source) && !differentiable)) {
      const at::NoGradGuard no_grad;
      y = at::as_strided(*source, y.sizes(), y.strides(), y.storage_offset());
      if (y.is_view() && differentiable)
        torch::autograd::impl::get_view_autograd_meta(y)->set_creation_meta(
            torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
    } else if (!source && y.requires_grad()) {
      y = y.detach();
    }
    if (differentiable) {
      torch::autograd::impl::set_gradient_edge(y, {node, node->add_input_metadata(y)});
    } else if (node) {
      node->add_input_metadata(Node::undefined_input());
    }
  }
}

}  // namespace

Tensors run_plan(const std::shared_ptr<const Pipeline>& pipeline_ptr, const std::shared_ptr<const Plan>& plan,
                 const at::Tensor& x, ops::Params params, Tensors extras, c10::ArrayRef<ops::Buffers> buffers) {
  RECORD_FUNCTION("weft::pipeline", std::vector<c10::IValue>());
  track_recompute();
  const auto& pipeline = *pipeline_ptr;
  const auto& slots = pipeline.caller_outputs();
  c10::SmallVector<uint8_t, 4> needs_grad{plan->output_requires_grad};
  bool any = plan->output_requires_grad;
  for (const int slot : slots) {
    needs_grad.push_back(plan->extra_out_requires_grad[slot]);
    any |= needs_grad.back() != 0;
  }
  c10::intrusive_ptr<PipelineNode> node;
  if (any) node = c10::make_intrusive<PipelineNode>(pipeline_ptr, plan, edges_of(x, params, extras));

  c10::SmallVector<at::Tensor, 16> saved(plan->num_saved);
  Tensors extra_in(pipeline.num_extra_in()), extra_out(pipeline.num_extra_out());
  std::vector<at::Tensor> dynamic_saved;
  std::vector<std::shared_ptr<void>> states(plan->process_local ? pipeline.size() : 0);
  ops::Frame frame{.saved = saved.data(),
                   .extra_in = extra_in.data(),
                   .extra_out = extra_out.data(),
                   .params = params.data(),
                   .dynamic_saved = &dynamic_saved,
                   .states = &states,
                   .added_to_main_grad = {},
                   .buffers = buffers,
                   .report = &pipeline.report().forward};
  donate_extras(pipeline, *plan, extras, extra_in);
  Tensors outputs;
  {
    const BelowAutograd below;
    outputs.push_back(run_forward(pipeline, *plan, frame, x));
  }
  for (const int slot : slots) outputs.push_back(std::move(extra_out[slot]));
  finalize_outputs(outputs, x, extras, needs_grad, node);
  if (!node) return outputs;
  node->save_for_backward(frame, params, outputs, CallerTensors{x, extras, outputs, params});
  return outputs;
}

Tensors run_backward_of(torch::autograd::Node& node, Tensors grads) {
  auto* pipeline_node = dynamic_cast<PipelineNode*>(&node);
  TORCH_CHECK_VALUE(pipeline_node, "weft: expected the node of a pipeline, got ", node.name(), ".");
  TORCH_CHECK_VALUE(grads.size() == node.num_inputs(), "weft: expected ", node.num_inputs(), " gradients, got ",
                    grads.size(), ".");
  auto out = pipeline_node->apply_once({std::make_move_iterator(grads.begin()), std::make_move_iterator(grads.end())});
  return {std::make_move_iterator(out.begin()), std::make_move_iterator(out.end())};
}

}  // namespace weft::fuser
