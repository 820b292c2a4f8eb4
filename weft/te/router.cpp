#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "weft/kernels/top_indices.h"
#include "weft/te/bind.h"
#include "weft/te/enums.h"
#include "weft/te/host.h"
#include "weft/te/strict.h"

// The router of a mixture of experts. All arithmetic is float32; logits have the shape [..., experts]. What backward
// reads, `intermediate_output`: the scores for sigmoid, the logits for sqrtsoftplus, and for softmax the probabilities,
// after the selection -inf where an expert is not selected.

namespace weft::te {
namespace {

constexpr double kEpsilon = 1e-20;  // added to the sum that scores are divided by
constexpr auto kMinusInfinity = -std::numeric_limits<double>::infinity();

enum class ScoreFunction { sigmoid, softmax, sqrtsoftplus };

ScoreFunction score_function_of(const char* who, const std::string& name) {
  if (name == "sigmoid") return ScoreFunction::sigmoid;
  if (name == "softmax") return ScoreFunction::softmax;
  TORCH_CHECK_VALUE(name == "sqrtsoftplus", who, ": score_function is '", name,
                    "', expected 'softmax', 'sigmoid' or 'sqrtsoftplus'.");
  return ScoreFunction::sqrtsoftplus;
}

RoutingMapFormat routing_format_of(const char* who, int format) {
  TORCH_CHECK_VALUE(format == 0 || format == 1, who, ": routing_map_format is ", format,
                    ", expected 0 (BYTEMAP) or 1 (BITMAP_U8).");
  return static_cast<RoutingMapFormat>(format);
}

int64_t checked_experts(const char* who, const at::Tensor& logits, int64_t topk) {
  require_on_gpu(logits.is_contiguous(), who, "GPUs require contiguous logits. Call contiguous().");
  TORCH_CHECK_VALUE(logits.dim() >= 1 && logits.numel() > 0, who, ": logits have shape ", logits.sizes(),
                    ", expected [..., experts] with one or more elements.");
  const auto experts = logits.size(-1);
  TORCH_CHECK_VALUE(topk >= 1 && topk <= experts, who, ": topk is ", topk, ", expected 1 to ", experts,
                    ", the number of experts.");
  return experts;
}

void check_shape(const char* who, const char* name, const at::Tensor& t, at::IntArrayRef expected) {
  TORCH_CHECK_VALUE(t.sizes() == expected, who, ": ", name, " has shape ", t.sizes(), ", expected ", expected, ".");
}

at::Tensor float_matrix(const at::Tensor& t) { return host(t).reshape({-1, t.size(-1)}).to(at::kFloat); }

at::Tensor sqrtsoftplus(const at::Tensor& x) { return at::softplus(x).sqrt_(); }

at::Tensor scores_of(ScoreFunction function, const at::Tensor& logits) {
  if (function == ScoreFunction::sigmoid) return logits.sigmoid();
  return function == ScoreFunction::softmax ? logits.softmax(-1) : sqrtsoftplus(logits);
}

at::Tensor normalized(const at::Tensor& scores) { return scores / (scores.sum(-1, true) + kEpsilon); }

// ---- Selection -----------------------------------------------------------------------------------------------------

struct Groups {
  int64_t count = 0, selected = 0;  // selected 0: no groups
};

Groups checked_groups(const char* who, std::optional<int64_t> num_groups, std::optional<int64_t> group_topk,
                      int64_t topk, int64_t experts) {
  const Groups groups{num_groups.value_or(0), group_topk.value_or(0)};
  if (groups.selected <= 0) return {};
  const bool fits = groups.count > 0 && experts % groups.count == 0 && groups.selected <= groups.count &&
                    topk % groups.selected == 0 && topk / groups.selected <= experts / groups.count;
  TORCH_CHECK_VALUE(fits, who, ": num_groups is ", groups.count, ", group_topk is ", groups.selected, " with topk ",
                    topk, " of ", experts,
                    " experts; expected groups of equal size, at most that many selected, and a topk that they divide "
                    "and have the experts for.");
  return groups;
}

/// The scores of the best groups, -inf in the others. The score of a group is the sum of its best experts.
at::Tensor scores_of_best_groups(const at::Tensor& scores, const Groups& groups, int64_t topk) {
  const auto grouped = scores.unflatten(-1, {groups.count, scores.size(-1) / groups.count});
  const auto per_group = topk / groups.selected;
  const auto group_scores = std::get<0>(grouped.topk(per_group, -1)).sum(-1);
  const auto excluded = at::full_like(group_scores, true, at::kBool)
                            .scatter_(-1, kernels::top_indices(group_scores, groups.selected), false);
  return grouped.masked_fill(excluded.unsqueeze(-1), kMinusInfinity).flatten(-2);
}

// ---- Routing maps
// ----------------------------------------------------------------------------------------------------

std::vector<int64_t> with_last(at::IntArrayRef sizes, int64_t last) {
  auto out = sizes.vec();
  out.back() = last;
  return out;
}

at::Tensor mask_of(const at::Tensor& chosen, int64_t experts) {
  return at::zeros({chosen.size(0), experts}, at::kBool).scatter_(-1, chosen, true);
}

at::Tensor values_of_bits() { return at::tensor({1, 2, 4, 8, 16, 32, 64, 128}, at::kByte); }

/// A boolean per expert, or a bit per expert, the lowest of a byte first. `sizes` are those of the logits.
at::Tensor routing_map_of(const at::Tensor& chosen, at::IntArrayRef sizes, RoutingMapFormat format) {
  const auto experts = sizes.back();
  const auto mask = mask_of(chosen, experts);
  if (format == RoutingMapFormat::bytemap) return mask.reshape(sizes);
  const auto bytes = (experts + 7) / 8;
  const auto bits = at::pad(mask.to(at::kByte), {0, bytes * 8 - experts}).unflatten(-1, {bytes, 8});
  return (bits * values_of_bits()).sum(-1, false, at::kByte).reshape(with_last(sizes, bytes));
}

/// The mask [tokens, experts] of a routing map, or of indices.
at::Tensor mask_of_map(const char* who, const at::Tensor& map, at::IntArrayRef sizes, int64_t topk,
                       bool use_dense_indices, RoutingMapFormat format) {
  const auto experts = sizes.back();
  const bool bitmap = !use_dense_indices && format == RoutingMapFormat::bitmap_u8;
  const auto columns = use_dense_indices ? topk : bitmap ? (experts + 7) / 8 : experts;
  check_shape(who, use_dense_indices ? "topk_indices" : "routing_map", map, with_last(sizes, columns));
  const auto matrix = host(map).reshape({-1, columns});
  if (use_dense_indices) return mask_of(matrix.to(at::kLong), experts);
  if (!bitmap) return matrix.ne(0);
  return matrix.unsqueeze(-1).bitwise_and(values_of_bits()).ne(0).flatten(-2).narrow(-1, 0, experts);
}

void check_topk_indices(const char* who, const at::Tensor& indices, at::IntArrayRef sizes, int64_t topk,
                        RoutingMapFormat format) {
  TORCH_CHECK_VALUE(format == RoutingMapFormat::bytemap, who,
                    ": topk_indices are returned instead of a routing map; leave out routing_map_format.");
  const auto dtype = indices.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kShort || dtype == at::kInt || dtype == at::kLong, who, ": topk_indices is ", dtype,
                   ", expected int16, int32 or int64.");
  TORCH_CHECK_VALUE(dtype != at::kShort || sizes.back() <= std::numeric_limits<int16_t>::max(), who,
                    ": topk_indices is int16, too small for ", sizes.back(), " experts.");
  check_shape(who, "topk_indices", indices, with_last(sizes, topk));
}

/// The routing map, or `topk_indices` filled with the indices if they are given.
at::Tensor write_selection(const at::Tensor& chosen, const at::Tensor& logits, RoutingMapFormat format,
                           const std::optional<at::Tensor>& topk_indices) {
  if (!topk_indices) return on_device(routing_map_of(chosen, logits.sizes(), format), logits.device());
  host(*topk_indices).copy_(chosen.reshape(topk_indices->sizes()));
  return *topk_indices;
}

// ---- Top-k -------------------------------------------------------------------------------------------------------

/// The probabilities of the chosen experts, in the dtype and shape of the logits; 0 elsewhere.
at::Tensor probabilities(const at::Tensor& values, const at::Tensor& chosen, const at::Tensor& logits,
                         std::optional<double> scaling_factor) {
  auto probs = at::zeros({values.size(0), logits.size(-1)}, at::kFloat);
  probs.scatter_(-1, chosen, values * static_cast<float>(scaling_factor.value_or(1)));
  return on_device(probs.to(logits.scalar_type()).reshape(logits.sizes()), logits.device());
}

at::Tensor checked_bias(const char* who, const std::optional<at::Tensor>& bias, int64_t experts) {
  if (!bias || !bias->defined()) return {};
  TORCH_CHECK_TYPE(bias->scalar_type() == at::kFloat, who, ": expert_bias is ", bias->scalar_type(),
                   ", expected float32.");
  check_shape(who, "expert_bias", *bias, {experts});
  return host(*bias);
}

/// The scores of the chosen experts without the bias that was added to all of them.
at::Tensor chosen_scores(const at::Tensor& scores, const at::Tensor& chosen, const at::Tensor& bias) {
  const auto values = scores.gather(-1, chosen);
  return bias.defined() ? values - bias.take(chosen) : values;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> topk_forward(
    const at::Tensor& logits, int64_t topk, bool use_pre_softmax, std::optional<int64_t> num_groups,
    std::optional<int64_t> group_topk, std::optional<double> scaling_factor, const std::string& score_function,
    const std::optional<at::Tensor>& expert_bias, int routing_map_format,
    const std::optional<at::Tensor>& topk_indices) {
  const char* who = "fused_topk_with_score_function_fwd";
  const at::NoGradGuard no_grad;
  const auto experts = checked_experts(who, logits, topk);
  const auto function = score_function_of(who, score_function);
  const auto format = routing_format_of(who, routing_map_format);
  const auto groups = checked_groups(who, num_groups, group_topk, topk, experts);
  const auto bias = checked_bias(who, expert_bias, experts);
  const bool softmax = function == ScoreFunction::softmax, softmax_after = softmax && !use_pre_softmax;
  TORCH_CHECK_VALUE(!bias.defined() || !softmax, who,
                    ": expert_bias requires score_function 'sigmoid' or 'sqrtsoftplus', got 'softmax'.");
  if (topk_indices) check_topk_indices(who, *topk_indices, logits.sizes(), topk, format);

  const auto x = float_matrix(logits);
  const auto scores = softmax_after ? x : scores_of(function, x);
  const auto ranked = bias.defined() ? scores + bias : scores;
  const auto chosen =
      kernels::top_indices(groups.selected ? scores_of_best_groups(ranked, groups, topk) : ranked, topk);
  auto values = chosen_scores(ranked, chosen, bias);
  auto intermediate = function == ScoreFunction::sqrtsoftplus ? x.clone() : scores;
  if (softmax_after) {
    values = values.softmax(-1);
    intermediate = at::full_like(x, kMinusInfinity).scatter_(-1, chosen, values);
  } else if (!softmax && topk > 1) {
    values = normalized(values);
  }
  return {probabilities(values, chosen, logits, scaling_factor), write_selection(chosen, logits, format, topk_indices),
          on_device(intermediate.reshape(logits.sizes()), logits.device())};
}

/// Raises RuntimeError, as Transformer Engine does.
void check_bounds(const char* who, const at::Tensor& bin_bounds) {
  const auto lower = bin_bounds[0].item<float>(), upper = bin_bounds[1].item<float>();
  TORCH_CHECK(std::isfinite(lower) && std::isfinite(upper) && lower < upper, who, ": bin_bounds are [", lower, ", ",
              upper, "], expected values that are finite with lower < upper.");
}

/// Counts for each expert the bias that each token would need to select it: cutoff - score, in bins of equal width.
void add_to_histogram(const at::Tensor& histogram, const at::Tensor& scores, const at::Tensor& cutoff,
                      const at::Tensor& bin_bounds) {
  const auto experts = histogram.size(0), bins = histogram.size(1);
  const auto lower = bin_bounds[0], scale = static_cast<double>(bins) / (bin_bounds[1] - lower);
  const auto bin = ((cutoff.unsqueeze(1) - scores - lower) * scale).floor_().nan_to_num_(0).clamp_(0, bins - 1);
  const auto index = bin.to(at::kLong) + at::arange(experts, at::kLong) * bins;
  histogram.add_(index.flatten().bincount({}, experts * bins).reshape({experts, bins}));
}

/// Quantile balancing: sigmoid scores; the cutoff is the best score, with its bias, that is not selected.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> topk_quantile_forward(
    const at::Tensor& logits, int64_t topk, std::optional<double> scaling_factor, const at::Tensor& expert_bias,
    int routing_map_format, const std::optional<at::Tensor>& topk_indices, const at::Tensor& histogram,
    const at::Tensor& bin_bounds, int histogram_mode, bool bin_bounds_validated) {
  const char* who = "fused_topk_with_score_function_qb_fwd";
  const at::NoGradGuard no_grad;
  const auto experts = checked_experts(who, logits, topk);
  TORCH_CHECK_VALUE(topk < experts, who, ": topk is ", topk, ", expected less than ", experts,
                    ", the number of experts.");
  const auto format = routing_format_of(who, routing_map_format);
  const auto bias = checked_bias(who, expert_bias, experts);
  TORCH_CHECK_TYPE(histogram.scalar_type() == at::kInt && bin_bounds.scalar_type() == at::kFloat, who,
                   ": histogram is ", histogram.scalar_type(), " and bin_bounds ", bin_bounds.scalar_type(),
                   ", expected int32 and float32.");
  TORCH_CHECK_VALUE(histogram.dim() == 2 && histogram.size(0) == experts && histogram.size(1) > 0, who,
                    ": histogram has shape ", histogram.sizes(), ", expected [", experts, ", bins].");
  check_shape(who, "bin_bounds", bin_bounds, {2});
  TORCH_CHECK_VALUE(histogram_mode == 0 || histogram_mode == 1, who, ": histogram_mode is ", histogram_mode,
                    ", expected 0 (TWO_KERNEL) or 1 (FUSED_ATOMIC).");
  if (!bin_bounds_validated) check_bounds(who, host(bin_bounds));
  if (topk_indices) check_topk_indices(who, *topk_indices, logits.sizes(), topk, format);

  auto scores = float_matrix(logits).sigmoid();
  const auto ranked = scores + bias;
  const auto best = kernels::top_indices(ranked, topk + 1), chosen = best.narrow(-1, 0, topk);
  auto cutoff = ranked.gather(-1, best.narrow(-1, topk, 1)).squeeze(-1);
  auto values = chosen_scores(ranked, chosen, bias);
  if (topk > 1) values = normalized(values);
  add_to_histogram(host(histogram), scores, cutoff, host(bin_bounds));
  const auto device = logits.device();
  return {probabilities(values, chosen, logits, scaling_factor), write_selection(chosen, logits, format, topk_indices),
          on_device(scores.reshape(logits.sizes()), device), on_device(std::move(cutoff), device), histogram};
}

// ---- Gradients -----------------------------------------------------------------------------------------------------

/// The gradient of scores, where `saved` is the intermediate output and `scores` what it says they were.
at::Tensor score_backward(ScoreFunction function, const at::Tensor& grad, const at::Tensor& scores,
                          const at::Tensor& saved) {
  if (function == ScoreFunction::sigmoid) return grad * scores * (1 - scores);
  return grad * saved.sigmoid().masked_fill_(saved.gt(20), 1) / (2 * scores + kEpsilon);
}

/// The gradient of scores / (their sum + eps), with sums over the experts of `mask`.
at::Tensor normalized_backward(const at::Tensor& grad, const at::Tensor& scores, const at::Tensor& mask) {
  const auto used = scores * mask;
  const auto sum = used.sum(-1, true) + kEpsilon;
  return (grad / sum - (grad * used).sum(-1, true) / (sum * sum)) * mask;
}

at::Tensor softmax_scores_backward(const at::Tensor& grad, const at::Tensor& probs) {
  return probs * (grad - (grad * probs).sum(-1, true));
}

void topk_backward(const at::Tensor& routing_map, const at::Tensor& intermediate_output, const at::Tensor& grad_probs,
                   const at::Tensor& grad_logits, int64_t topk, bool use_pre_softmax,
                   std::optional<double> scaling_factor, const std::string& score_function, bool use_dense_indices,
                   int routing_map_format) {
  const char* who = "fused_topk_with_score_function_bwd";
  const at::NoGradGuard no_grad;
  checked_experts(who, grad_probs, topk);
  const auto function = score_function_of(who, score_function);
  const auto sizes = grad_probs.sizes();
  check_shape(who, "intermediate_output", intermediate_output, sizes);
  check_shape(who, "grad_logits", grad_logits, sizes);
  const auto mask =
      mask_of_map(who, routing_map, sizes, topk, use_dense_indices, routing_format_of(who, routing_map_format));
  const auto saved = float_matrix(intermediate_output);
  auto grad =
      (float_matrix(grad_probs) * static_cast<float>(scaling_factor.value_or(1))).masked_fill_(mask.bitwise_not(), 0);
  if (function == ScoreFunction::softmax) {
    grad = softmax_scores_backward(grad, use_pre_softmax ? saved : saved.masked_fill(mask.bitwise_not(), 0));
  } else {
    const auto scores = function == ScoreFunction::sigmoid ? saved : sqrtsoftplus(saved);
    if (topk > 1) grad = normalized_backward(grad, scores, mask);
    grad = score_backward(function, grad, scores, saved);
  }
  host(grad_logits).copy_(grad.reshape(sizes));
}

// ---- Auxiliary loss
// --------------------------------------------------------------------------------------------------

std::tuple<at::Tensor, at::Tensor, at::Tensor> score_forward(const at::Tensor& logits, int64_t topk,
                                                             const std::string& score_function,
                                                             int routing_map_format) {
  const char* who = "fused_score_for_moe_aux_loss_fwd";
  const at::NoGradGuard no_grad;
  checked_experts(who, logits, topk);
  const auto function = score_function_of(who, score_function);
  const auto format = routing_format_of(who, routing_map_format);
  const auto x = float_matrix(logits);
  auto scores = scores_of(function, x);
  auto intermediate = function == ScoreFunction::sqrtsoftplus ? x.clone() : scores.clone();
  if (function != ScoreFunction::softmax) scores = normalized(scores);
  const auto device = logits.device();
  auto map = routing_map_of(kernels::top_indices(scores, topk), logits.sizes(), format);
  return {on_device(scores.reshape(logits.sizes()), device), on_device(std::move(map), device),
          on_device(intermediate.reshape(logits.sizes()), device)};
}

void score_for_aux_loss_backward(const at::Tensor& intermediate_output, const at::Tensor& grad_scores,
                                 const at::Tensor& grad_logits, int64_t, const std::string& score_function) {
  const char* who = "fused_score_for_moe_aux_loss_bwd";
  const at::NoGradGuard no_grad;
  const auto function = score_function_of(who, score_function);
  checked_experts(who, grad_scores, 1);
  check_shape(who, "intermediate_output", intermediate_output, grad_scores.sizes());
  check_shape(who, "grad_logits", grad_logits, grad_scores.sizes());
  const auto saved = float_matrix(intermediate_output), grad = float_matrix(grad_scores);
  at::Tensor out;
  if (function == ScoreFunction::softmax) {
    out = softmax_scores_backward(grad, saved);
  } else {
    const auto scores = function == ScoreFunction::sigmoid ? saved : sqrtsoftplus(saved);
    out = score_backward(function, normalized_backward(grad, scores, at::full_like(scores, 1)), scores, saved);
  }
  host(grad_logits).copy_(out.reshape(grad_logits.sizes()));
}

/// coefficient · Σ_e tokens_e Σ_t probs_te in the dtype of probs, and what backward reads: [coefficient, the sum in
/// float32], where coefficient = experts·coeff / (topk·tokens²).
std::tuple<at::Tensor, at::Tensor> aux_loss_forward(const char* who, const at::Tensor& probs,
                                                    const at::Tensor& tokens_per_expert, double total_num_tokens,
                                                    int64_t num_experts, int64_t num_rows, int64_t num_cols,
                                                    int64_t topk, double coeff) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(topk > 0 && num_experts > 0 && num_cols > 0 && total_num_tokens > 0, who, ": topk is ", topk,
                    ", num_experts ", num_experts, ", num_cols ", num_cols, " and total_num_tokens ", total_num_tokens,
                    ", expected 1 or more of each.");
  TORCH_CHECK_VALUE(num_cols % num_experts == 0, who, ": num_cols is ", num_cols, ", expected a multiple of ",
                    num_experts, ", the number of experts.");
  TORCH_CHECK_VALUE(probs.numel() == num_rows * num_cols, who, ": probs have shape ", probs.sizes(), ", expected [",
                    num_rows, ", ", num_cols, "].");
  TORCH_CHECK_VALUE(tokens_per_expert.numel() == num_cols, who, ": tokens_per_expert has shape ",
                    tokens_per_expert.sizes(), ", expected [", num_cols, "].");
  const auto tokens = static_cast<float>(total_num_tokens);
  const auto coefficient =
      static_cast<float>(num_experts) * static_cast<float>(coeff) / static_cast<float>(topk) / tokens / tokens;
  const auto column_sums = host(probs).reshape({num_rows, num_cols}).sum(0, false, at::kFloat);
  const auto sum = (column_sums * host(tokens_per_expert).reshape({num_cols}).to(at::kFloat)).sum();
  const auto loss = sum * coefficient;
  auto saved = at::full({2}, coefficient, at::kFloat);
  saved[1].copy_(loss);
  return {on_device(loss.to(probs.scalar_type()), probs.device()), on_device(std::move(saved), probs.device())};
}

at::Tensor aux_loss_backward(const at::Tensor& const_buf, const at::Tensor& tokens_per_expert, int64_t num_rows,
                             int64_t num_cols, const at::Tensor& grad_aux_loss) {
  const char* who = "fused_moe_aux_loss_bwd";
  const at::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(const_buf.dim() == 1 && const_buf.numel() >= 1, who, ": Const_buf has shape ", const_buf.sizes(),
                    ", expected [2].");
  TORCH_CHECK_VALUE(tokens_per_expert.numel() == num_cols && num_rows >= 0, who, ": tokens_per_expert has shape ",
                    tokens_per_expert.sizes(), ", expected [", num_cols, "].");
  TORCH_CHECK_VALUE(grad_aux_loss.numel() == 1, who, ": grad_aux_loss has shape ", grad_aux_loss.sizes(),
                    ", expected one element.");
  const auto row = host(const_buf)[0] * host(tokens_per_expert).reshape({num_cols}).to(at::kFloat) *
                   host(grad_aux_loss).reshape({}).to(at::kFloat);
  auto out = row.to(grad_aux_loss.scalar_type()).expand({num_rows, num_cols}).contiguous();
  return on_device(std::move(out), grad_aux_loss.device());
}

void bind_aux_loss(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def("fused_score_for_moe_aux_loss_fwd", score_forward, py::arg("logits"), py::arg("topk"),
        py::arg("score_function"), py::arg("routing_map_format") = 0, no_gil);
  m.def("fused_score_for_moe_aux_loss_bwd", score_for_aux_loss_backward, py::arg("intermediate_output"),
        py::arg("grad_scores"), py::arg("grad_logits"), py::arg("topk"), py::arg("score_function"), no_gil);
  m.def(
      "fused_moe_aux_loss_fwd",
      [](const at::Tensor& probs, const at::Tensor& tokens_per_expert, int64_t total_num_tokens, int64_t num_experts,
         int64_t num_rows, int64_t num_cols, int64_t topk, double coeff) {
        return aux_loss_forward("fused_moe_aux_loss_fwd", probs, tokens_per_expert,
                                static_cast<double>(total_num_tokens), num_experts, num_rows, num_cols, topk, coeff);
      },
      py::arg("probs"), py::arg("tokens_per_expert"), py::arg("total_num_tokens"), py::arg("num_experts"),
      py::arg("num_rows"), py::arg("num_cols"), py::arg("topk"), py::arg("coeff"), no_gil);
  m.def(
      "fused_moe_aux_loss_fwd_graph_safe",
      [](const at::Tensor& probs, const at::Tensor& tokens_per_expert, const at::Tensor& total_num_tokens,
         int64_t num_experts, int64_t num_rows, int64_t num_cols, int64_t topk, double coeff) {
        const char* who = "fused_moe_aux_loss_fwd_graph_safe";
        TORCH_CHECK_VALUE(total_num_tokens.numel() == 1, who, ": total_num_tokens has shape ", total_num_tokens.sizes(),
                          ", expected one element.");
        TORCH_CHECK_TYPE(total_num_tokens.scalar_type() == at::kLong, who, ": total_num_tokens is ",
                         total_num_tokens.scalar_type(), ", expected int64.");
        return aux_loss_forward(who, probs, tokens_per_expert, host(total_num_tokens).item().toDouble(), num_experts,
                                num_rows, num_cols, topk, coeff);
      },
      py::arg("probs"), py::arg("tokens_per_expert"), py::arg("total_num_tokens"), py::arg("num_experts"),
      py::arg("num_rows"), py::arg("num_cols"), py::arg("topk"), py::arg("coeff"), no_gil);
  m.def("fused_moe_aux_loss_bwd", aux_loss_backward, py::arg("Const_buf"), py::arg("tokens_per_expert"),
        py::arg("num_rows"), py::arg("num_cols"), py::arg("grad_aux_loss"), no_gil);
}

}  // namespace

void bind_router(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def("fused_topk_with_score_function_fwd", topk_forward, py::arg("logits"), py::arg("topk"),
        py::arg("use_pre_softmax"), py::arg("num_groups"), py::arg("group_topk"), py::arg("scaling_factor"),
        py::arg("score_function"), py::arg("expert_bias"), py::arg("routing_map_format") = 0,
        py::arg("topk_indices") = py::none(), no_gil);
  m.def("fused_topk_with_score_function_qb_fwd", topk_quantile_forward, py::arg("logits"), py::arg("topk"),
        py::arg("scaling_factor"), py::arg("expert_bias"), py::arg("routing_map_format"), py::arg("topk_indices"),
        py::arg("histogram"), py::arg("bin_bounds"), py::arg("histogram_mode"), py::arg("bin_bounds_validated") = false,
        no_gil);
  m.def("fused_topk_with_score_function_bwd", topk_backward, py::arg("routing_map"), py::arg("intermediate_output"),
        py::arg("grad_probs"), py::arg("grad_logits"), py::arg("topk"), py::arg("use_pre_softmax"),
        py::arg("scaling_factor"), py::arg("score_function"), py::arg("use_dense_indices") = false,
        py::arg("routing_map_format") = 0, no_gil);
  bind_aux_loss(m);
}

}  // namespace weft::te
