#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include "weft/fuser/autograd.h"
#include "weft/quant/recipe.h"

#include "weft/te/gemm_limits.h"
#include "weft/te/host.h"
#include "weft/te/quantized_tensor.h"
#include "weft/te/quantizer_view.h"

// Runs of operations in Transformer Engine's fuser as pipelines of weft (python/torchweft/te/_fusion.py).

namespace weft::te {
namespace {

using fuser::Tensors;

/// The scales and maximum magnitudes of delayed scaling, which Transformer Engine's quantizers hold, as weft's state.
class DelayedState {
 public:
  DelayedState() = default;
  explicit DelayedState(const std::vector<QuantizerView>& quantizers) {
    for (const auto& view : quantizers) {
      scales_.push_back(view.scale.reshape({1}));
      amaxes_.push_back(view.amax.reshape({1}));
    }
    state_ = at::stack({at::cat(scales_), at::cat(amaxes_)});
  }

  /// Undefined without delayed scaling.
  const at::Tensor& state() const { return state_; }

  /// Takes what the quantizers hold now: other calls may have run since.
  void load() const {
    if (state_.defined()) state_.copy_(at::stack({at::cat(scales_), at::cat(amaxes_)}));
  }
  /// Raises the quantizers' maximum magnitudes to those of the state.
  void store() const {
    for (size_t i = 0; i < amaxes_.size(); ++i) amaxes_[i].copy_(state_[1].narrow(0, static_cast<int64_t>(i), 1));
  }

 private:
  at::Tensor state_;
  std::vector<at::Tensor> scales_, amaxes_;
};

/// What backward of one call needs.
struct Call {
  c10::intrusive_ptr<torch::autograd::Node> node;     // null: no gradient is needed
  std::vector<std::optional<at::ScalarType>> dtypes;  // of the outputs; without one if it needs no gradient
  std::vector<DelayedState> delayed;                  // of the linears
};

/// An alias of `t` outside of the caller's graph, which requires a gradient or not. Its node holds no tensor, as that
/// of a leaf would: the caller propagates the gradient, so the node never runs.
at::Tensor entering(const at::Tensor& t, bool needs_grad) {
  auto alias = t.is_inference() ? t.clone() : t.detach();
  if (!needs_grad || !at::isFloatingType(t.scalar_type())) return alias;
  const auto node = c10::make_intrusive<torch::autograd::Error>("FusedRun: a gradient has left its run.");
  torch::autograd::impl::set_gradient_edge(alias, {node, node->add_input_metadata(alias)});
  return alias;
}

/// An alias of `t` outside of the graph, a leaf that requires a gradient or not.
at::Tensor leaf(const at::Tensor& t, bool requires_grad) {
  auto alias = t.detach();
  return alias.set_requires_grad(requires_grad && at::isFloatingType(t.scalar_type()));
}

/// A tensor of the sizes and dtype of a quantized one, without values of its own: its codes go another way.
at::Tensor stand_in(py::handle quantized, bool requires_grad) {
  const auto options = at::TensorOptions().dtype(dtype_of_tensor(quantized)).device(device_of(quantized));
  return at::zeros({1}, options).expand(sizes_of(quantized)).set_requires_grad(requires_grad);
}

quant::Quantizer quantizer_from(py::handle object) {
  const auto view = view_quantizer(object);
  const auto& how = view.how;
  quant::Quantizer made{.format = how.format,
                        .two_dimensional = how.two_dimensional,
                        .power_of_2_scales = how.power_of_two,
                        .amax_epsilon = how.epsilon,
                        .random_hadamard_transform = how.hadamard,
                        .stochastic_rounding = how.stochastic_rounding,
                        .row_scaled = how.row_scaled,
                        .four_over_six = how.four_over_six,
                        .four_over_six_e4m3_use_256 = how.scale_bound == 256};
  switch (view.kind) {
    case QuantizerKind::current:
      made.scaling = quant::Scaling::current;
      break;
    case QuantizerKind::block:
      made.scaling = quant::Scaling::block;
      break;
    case QuantizerKind::mxfp8:
      made.scaling = quant::Scaling::mxfp8;
      break;
    case QuantizerKind::nvfp4:
      TORCH_CHECK_NOT_IMPLEMENTED(!how.hadamard || view.random_signs, "it transforms without random signs");
      made.scaling = quant::Scaling::nvfp4;
      break;
    case QuantizerKind::delayed:
      made.scaling = quant::Scaling::delayed;
      break;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "its quantizer, ", py::str(py::type::of(object)).cast<std::string>(),
                                  ", is none that weft has");
  }
  TORCH_CHECK_NOT_IMPLEMENTED(view.amax_group.is_none(), "its ranks share a maximum magnitude");
  made.check();
  TORCH_CHECK_NOT_IMPLEMENTED(made.quantization() == how, "weft has no such quantizer");
  return made;
}

/// The text of the recipe of a linear's quantizers. Raises NotImplementedError, saying why, if weft has none.
std::string recipe_text(py::handle input, py::handle weight, py::handle grad_output,
                        const std::optional<std::string>& backward_override) {
  quant::Recipe recipe{quantizer_from(input), quantizer_from(weight), quantizer_from(grad_output)};
  if (backward_override)
    TORCH_CHECK_NOT_IMPLEMENTED(detail::read_value(Value(*backward_override), recipe.backward_override),
                                "its recipe has backward_override='", *backward_override, "'");
  recipe.check();
  return recipe.text();
}

/// Raises in strict mode for sizes of a linear that a GPU refuses.
void check_sizes(py::handle input_quantizer, int64_t rows, int64_t in_features, int64_t out_features,
                 bool with_backward, at::ScalarType dtype) {
  check_linear_limits("transformer_engine.pytorch.ops.BasicLinear", view_quantizer(input_quantizer).how,
                      {rows, in_features, out_features, with_backward, dtype});
}

/// Buffers for the results of an operation: its index, the output and the gradient of its input.
using Results = std::tuple<int, std::optional<at::Tensor>, std::optional<at::Tensor>>;

/// The index of a linear, and its quantizers: of input, weight and output gradient.
using LinearQuantizers = std::pair<int, std::vector<py::object>>;

class FusedRun {
 public:
  explicit FusedRun(const std::string& text) : fuser_(fuser::Pipeline::parse(text)) {}

  /// `needs` says of x, the extra inputs and the parameters whether their gradients are needed. A linear's weight may
  /// be a quantized tensor. `evaluated` are the operations in evaluation mode. Returns the outputs and a Call for
  /// `backward`.
  py::tuple forward(const at::Tensor& x, const std::vector<at::Tensor>& extras, const std::vector<py::object>& params,
                    const std::vector<bool>& needs, const std::vector<int>& evaluated,
                    const std::optional<std::string>& recipe, const std::vector<LinearQuantizers>& quantizers,
                    const std::vector<Results>& buffers_for) {
    TORCH_CHECK_VALUE(needs.size() == 1 + extras.size() + params.size(), "FusedRun: expected ",
                      1 + extras.size() + params.size(), " flags, got ", needs.size(), ".");
    uint64_t mask = 0;
    for (const int i : evaluated)
      if (const int bit = fuser_.pipeline().eval_bit(i); bit >= 0) mask |= uint64_t{1} << bit;
    Call call;
    std::vector<at::Tensor> results;
    std::optional<quant::Recipe> how;
    if (recipe) how = quant::Recipe::parse(*recipe);
    std::vector<ops::Buffers> buffers;
    for (const auto& [op, output, grad_input] : buffers_for)
      buffers.push_back(
          {.op = op, .output = output.value_or(at::Tensor()), .grad_input = grad_input.value_or(at::Tensor())});
    const auto buffers_of = [&](int op) -> ops::Buffers& {
      for (auto& given : buffers)
        if (given.op == op) return given;
      return buffers.emplace_back(ops::Buffers{.op = op});
    };
    std::vector<DelayedState> delayed;
    if (how && how->is_delayed()) {
      for (const auto& [op, its] : quantizers) {
        TORCH_CHECK_VALUE(its.size() == 3, "FusedRun: expected 3 quantizers, got ", its.size(), ".");
        delayed.push_back(DelayedState({view_quantizer(its[0]), view_quantizer(its[1])}));
        call.delayed.push_back(DelayedState({view_quantizer(its[2])}));
        auto& of_linear = buffers_of(op);
        of_linear.forward_scaling = delayed.back().state();
        of_linear.backward_scaling = call.delayed.back().state();
      }
    }
    std::vector<at::Tensor> weights;
    for (size_t i = 0; i < params.size(); ++i) {
      const bool needed = needs[1 + extras.size() + i];
      if (is_quantized(params[i]) && !how) {
        const auto values = dequantized(params[i], dtype_of_tensor(params[i]));
        weights.push_back(leaf(on_device(values, device_of(params[i])), needed));
      } else if (is_quantized(params[i])) {
        weights.push_back(stand_in(params[i], needed));
        buffers_of(op_of_param(i)).weight =
            std::make_shared<kernels::QuantizedMatrix>(own_matrix(params[i], how->weight.quantization()));
      } else {  // a Parameter itself, so that its main_grad is found
        const auto p = params[i].cast<at::Tensor>();
        weights.push_back(needed ? p : leaf(p, false));
      }
    }
    {
      const py::gil_scoped_release release;
      const at::AutoGradMode grad_mode(true);
      const quant::Autocast region(how);
      size_t next = 0;
      const auto input = entering(x, needs[next++]);
      Tensors extra_inputs;
      for (const auto& t : extras) extra_inputs.push_back(entering(t, needs[next++]));
      const auto outputs = fuser_(input, weights, std::move(extra_inputs), mask, buffers);
      for (const auto& y : outputs) {
        if (y.grad_fn()) call.node = y.grad_fn();
        call.dtypes.push_back(y.grad_fn() ? std::optional(y.scalar_type()) : std::nullopt);
        results.push_back(y.detach());
      }
      const at::NoGradGuard no_grad;
      for (const auto& state : delayed) state.store();
    }
    return py::make_tuple(std::move(results), std::move(call));
  }

  /// Returns the gradients of x, the parameters and the extra inputs; None for those that are not needed.
  static std::vector<std::optional<at::Tensor>> backward(Call& call,
                                                         const std::vector<std::optional<at::Tensor>>& grads) {
    TORCH_CHECK_VALUE(call.node, "FusedRun: the call needed no gradient, or its backward has run.");
    TORCH_CHECK_VALUE(grads.size() == call.dtypes.size(), "FusedRun: expected ", call.dtypes.size(), " gradients, got ",
                      grads.size(), ".");
    const auto node = std::exchange(call.node, {});
    const py::gil_scoped_release release;
    const at::NoGradGuard no_grad;
    for (const auto& state : call.delayed) state.load();
    Tensors given;
    for (size_t i = 0; i < grads.size(); ++i)
      given.push_back(grads[i] && call.dtypes[i] ? grads[i]->to(*call.dtypes[i]) : at::Tensor());
    std::vector<std::optional<at::Tensor>> out;
    for (auto& grad : fuser::run_backward_of(*node, std::move(given)))
      out.push_back(grad.defined() ? std::optional(std::move(grad)) : std::nullopt);
    for (const auto& state : call.delayed) state.store();
    return out;
  }

  /// The steps of the last call, forward and backward: the rule of each, or the name of an operation that runs by
  /// itself.
  std::pair<std::vector<std::string>, std::vector<std::string>> steps() const {
    const auto plan = fuser_.last_plan();
    if (!plan) return {};
    const auto names = [&](const std::vector<fuser::PlannedStep>& steps) {
      std::vector<std::string> list;
      for (const auto& planned : steps)
        list.emplace_back(planned.step.fused ? planned.step.rule
                                             : std::string(fuser_.pipeline().op(planned.step.first).name()));
      return list;
    };
    return {names(plan->forward), names(plan->backward)};
  }

 private:
  int op_of_param(size_t param) const {
    size_t end = 0;
    for (int i = 0; i < fuser_.pipeline().size(); ++i)
      if (end += fuser_.pipeline().op(i).params().size(); param < end) return i;
    TORCH_CHECK_VALUE(false, "FusedRun: got more than ", end, " parameters.");
  }

  fuser::Fuser fuser_;
};

}  // namespace

void bind_fused_run(py::module_& m) {
  const py::class_<Call> call(m, "_Call", "What backward of one call of a _FusedRun needs.");
  py::class_<FusedRun>(m, "_FusedRun", "A run of operations as a pipeline of weft.")
      .def(py::init<const std::string&>(), py::arg("text"))
      .def("forward", &FusedRun::forward, py::arg("x"), py::arg("extras"), py::arg("params"), py::arg("needs"),
           py::arg("evaluated"), py::arg("recipe"), py::arg("quantizers"), py::arg("buffers_for"))
      .def("steps", &FusedRun::steps)
      .def_static("backward", &FusedRun::backward, py::arg("call"), py::arg("grads"));
  m.def("_check_linear_sizes", &check_sizes, py::arg("input_quantizer"), py::arg("rows"), py::arg("in_features"),
        py::arg("out_features"), py::arg("with_backward"), py::arg("dtype"));
  m.def("_recipe_text", &recipe_text, py::arg("input"), py::arg("weight"), py::arg("grad_output"),
        py::arg("backward_override"));
}

}  // namespace weft::te
