#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "weft/te/bind.h"
#include "weft/te/dtype.h"
#include "weft/te/host.h"

// Permutation of tokens by the indices of their experts, and offsets of groups of rows. A row id map, int32 [choices,
// tokens] flattened, has the row of each choice of a token among the permuted rows, or -1 if that choice was dropped.
// Sums are rounded to the dtype of the tokens after each term, as on a GPU, and to float16 for float8.

namespace weft::te {
namespace {

at::ScalarType compute_dtype(at::ScalarType dtype) { return at::isFloat8Type(dtype) ? at::kHalf : dtype; }

/// The tokens as float8 if Python passes their codes as bytes.
at::Tensor typed(const at::Tensor& tokens, DType dtype) {
  const auto type = scalar_type(dtype);
  return at::isFloat8Type(type) && tokens.scalar_type() == at::kByte ? tokens.view(type) : tokens;
}

/// `values` rounded to `dtype`; values that float8 does not have become its largest.
at::Tensor rounded_to(const at::Tensor& values, at::ScalarType dtype) {
  if (!at::isFloat8Type(dtype)) return values.to(dtype);
  const double max = dtype == at::kFloat8_e4m3fn ? 448 : 57344;
  return values.clamp(-max, max).to(dtype);
}

void check_matrix(const char* who, const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.dim() == 2, who, ": ", name, " has shape ", t.sizes(), ", expected [rows, columns].");
}

/// The row id map as int64 [choices, tokens].
at::Tensor checked_map(const char* who, const at::Tensor& row_id_map, int64_t tokens, int64_t choices, int64_t rows) {
  TORCH_CHECK_VALUE(row_id_map.numel() == tokens * choices, who, ": row_id_map has shape ", row_id_map.sizes(),
                    ", expected ", tokens * choices, " elements for ", tokens, " tokens with ", choices,
                    " experts each.");
  auto map = host(row_id_map).to(at::kLong).reshape({choices, tokens});
  if (map.numel() > 0) {
    const auto largest = map.max().item<int64_t>();
    TORCH_CHECK_VALUE(largest < rows, who, ": row_id_map has row ", largest, ", but there are ", rows,
                      " permuted rows.");
  }
  return map;
}

/// Probabilities [tokens, choices], or undefined.
at::Tensor checked_probs(const char* who, const std::optional<at::Tensor>& prob, int64_t tokens, int64_t choices) {
  if (!prob || !prob->defined() || prob->numel() == 0) return {};
  TORCH_CHECK_VALUE(prob->numel() == tokens * choices, who, ": prob has shape ", prob->sizes(), ", expected [", tokens,
                    ", ", choices, "].");
  return host(*prob).reshape({tokens, choices});
}

/// Sorts the tokens by the expert in `indices` [tokens, choices], and keeps the first rows. Rows beyond the last are 0.
/// The workspace of a GPU's sort is returned as it is.
std::tuple<at::Tensor, at::Tensor, std::vector<at::Tensor>> permute_forward(const at::Tensor& input, DType dtype,
                                                                            const at::Tensor& indices,
                                                                            int64_t num_out_tokens,
                                                                            std::vector<at::Tensor> workspace,
                                                                            int64_t) {
  const char* who = "moe_permute_fwd";
  const at::NoGradGuard no_grad;
  check_matrix(who, "input", input);
  check_matrix(who, "indices", indices);
  const auto tokens = input.size(0), choices = indices.size(1), all = tokens * choices;
  TORCH_CHECK_VALUE(indices.size(0) == tokens, who, ": indices has shape ", indices.sizes(), ", expected ", tokens,
                    " rows, one per token.");
  const auto rows = num_out_tokens > 0 ? num_out_tokens : all;
  const auto order = host(indices).reshape({-1}).argsort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  const auto map_position = order.remainder(choices) * tokens + order.floor_divide(choices);
  auto kept = at::arange(all, at::kInt);
  kept.masked_fill_(kept.ge(rows), -1);
  auto row_id_map = at::empty({all}, at::kInt);
  row_id_map.index_copy_(0, map_position, kept);
  const auto source = typed(host(input), dtype);
  const auto bytes = at::isFloat8Type(source.scalar_type()) ? source.view(at::kByte) : source;
  const auto sorted = order.narrow(0, 0, std::min(rows, all)).floor_divide(choices);
  auto permuted = at::zeros({rows, input.size(1)}, bytes.options());
  permuted.narrow(0, 0, sorted.size(0)).copy_(bytes.index_select(0, sorted));
  permuted = permuted.view(input.scalar_type());
  const auto device = input.device();
  return {on_device(std::move(permuted), device), on_device(std::move(row_id_map), device), std::move(workspace)};
}

/// Each token is the sum of its rows, weighted by its probabilities if there are any.
at::Tensor unpermute_forward(const at::Tensor& input, DType dtype, const at::Tensor& row_id_map,
                             const std::optional<at::Tensor>& prob, int64_t num_tokens, int64_t top_k) {
  const char* who = "moe_unpermute_fwd";
  const at::NoGradGuard no_grad;
  check_matrix(who, "input", input);
  TORCH_CHECK_VALUE(num_tokens >= 0 && top_k > 0, who, ": got num_tokens ", num_tokens, " and topK ", top_k,
                    ", expected 0 or more and 1 or more.");
  const auto map = checked_map(who, row_id_map, num_tokens, top_k, input.size(0));
  const auto probs = checked_probs(who, prob, num_tokens, top_k);
  const auto tokens = typed(host(input), dtype);
  const auto type = compute_dtype(tokens.scalar_type());
  const auto rows = tokens.to(type);
  auto sum = at::zeros({num_tokens, input.size(1)}, type);
  for (int64_t k = 0; k < top_k && rows.size(0) > 0; ++k) {
    auto term = rows.index_select(0, map[k].clamp_min(0));
    if (probs.defined()) term.mul_(probs.select(1, k).to(type).unsqueeze(1));
    sum.add_(term.masked_fill_(map[k].lt(0).unsqueeze(1), 0));
  }
  if (!probs.defined() && at::isFloat8Type(tokens.scalar_type())) sum.div_(static_cast<double>(top_k));
  auto out = rounded_to(sum, tokens.scalar_type()).view(input.scalar_type());
  return on_device(std::move(out), input.device());
}

/// The gradients of `unpermute_forward`: of its rows, those that no token reads 0, and of its probabilities, float32.
std::tuple<at::Tensor, at::Tensor> unpermute_backward(const at::Tensor& input_bwd, const at::Tensor& input_fwd,
                                                      DType dtype, const at::Tensor& row_id_map,
                                                      const std::optional<at::Tensor>& prob) {
  const char* who = "moe_unpermute_bwd";
  const at::NoGradGuard no_grad;
  check_matrix(who, "input_bwd", input_bwd);
  check_matrix(who, "input_fwd", input_fwd);
  TORCH_CHECK_VALUE(input_fwd.size(1) == input_bwd.size(1), who, ": input_fwd has shape ", input_fwd.sizes(),
                    ", expected ", input_bwd.size(1), " columns, as input_bwd has.");
  const auto tokens = input_bwd.size(0), choices = tokens > 0 ? row_id_map.numel() / tokens : 1;
  const auto map = checked_map(who, row_id_map, tokens, choices, input_fwd.size(0));
  const auto probs = checked_probs(who, prob, tokens, choices);
  TORCH_CHECK_VALUE(probs.defined() || choices == 1, who, ": got ", choices,
                    " experts per token without prob. Pass the probabilities of the forward pass.");
  const auto typed_grad = typed(host(input_bwd), dtype);
  const auto type = compute_dtype(typed_grad.scalar_type());
  const auto grad = typed_grad.to(type), rows = typed(host(input_fwd), dtype).to(type);
  auto d_rows = at::zeros({input_fwd.size(0), input_bwd.size(1)}, type);
  auto d_probs = at::zeros({tokens, choices}, at::kFloat);
  for (int64_t k = 0; k < choices; ++k) {
    const auto kept = map[k].ge(0).nonzero().squeeze(1);
    const auto row = map[k].index_select(0, kept);
    auto term = grad.index_select(0, kept);
    if (probs.defined()) {
      const auto products = (term * rows.index_select(0, row)).to(at::kFloat);
      d_probs.select(1, k).index_copy_(0, kept, products.sum(1));
      term.mul_(probs.select(1, k).index_select(0, kept).to(type).unsqueeze(1));
    }
    d_rows.index_copy_(0, row, term);
  }
  auto d_input = rounded_to(d_rows, typed_grad.scalar_type()).view(input_bwd.scalar_type());
  const auto device = input_bwd.device();
  return {on_device(std::move(d_input), device), on_device(std::move(d_probs), device)};
}

// ---- Offsets of groups ---------------------------------------------------------------------------------------------

/// Where each group ends, in elements of rows with `stride` elements; with `leading_zero`, 0 comes first.
at::Tensor offsets_of_groups(const at::Tensor& sizes, int64_t stride, bool leading_zero, at::ScalarType dtype) {
  auto out = at::zeros({sizes.numel() + (leading_zero ? 1 : 0)}, dtype);
  out.narrow(0, leading_zero ? 1 : 0, sizes.numel()).copy_(sizes.cumsum(0) * stride);
  return out;
}

void check_splits(const char* who, const char* name, const at::Tensor& splits) {
  TORCH_CHECK_VALUE(splits.dim() == 1, who, ": ", name, " has shape ", splits.sizes(), ", expected one dimension.");
  TORCH_CHECK_TYPE(at::isIntegralType(splits.scalar_type(), /*includeBool=*/false), who, ": ", name, " is ",
                   splits.scalar_type(), ", expected int64.");
}

at::Tensor splits_to_offsets(const at::Tensor& first_dims, int64_t logical_last_dim) {
  const char* who = "splits_to_offsets";
  check_splits(who, "first_dims", first_dims);
  TORCH_CHECK_VALUE(logical_last_dim > 0, who, ": logical_last_dim is ", logical_last_dim, ", expected 1 or more.");
  return on_device(offsets_of_groups(host(first_dims), logical_last_dim, true, at::kLong), first_dims.device());
}

/// The split sizes as int64 on `device`, and one tensor of offsets for each stride.
std::tuple<at::Tensor, std::vector<at::Tensor>> splits_to_offsets_multi(
    const at::Tensor& split_sizes, const c10::Device& device, const std::vector<int64_t>& strides,
    const std::vector<bool>& include_leading_zero, const std::vector<at::ScalarType>& dtypes, bool) {
  const char* who = "splits_to_offsets_multi";
  check_splits(who, "split_sizes", split_sizes);
  TORCH_CHECK_VALUE(include_leading_zero.size() == strides.size() && dtypes.size() == strides.size(), who, ": got ",
                    strides.size(), " strides, ", include_leading_zero.size(), " include_leading_zero and ",
                    dtypes.size(), " dtypes, expected as many of each.");
  auto sizes = split_sizes.to(at::kLong).to(device);
  std::vector<at::Tensor> out;
  for (size_t i = 0; i < strides.size(); ++i)
    out.push_back(
        on_device(offsets_of_groups(host(sizes), strides[i], include_leading_zero[i], dtypes[i]), sizes.device()));
  return {std::move(sizes), std::move(out)};
}

}  // namespace

void bind_permutation(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def("moe_permute_fwd", permute_forward, py::arg("input"), py::arg("dtype"), py::arg("indices"),
        py::arg("num_out_tokens"), py::arg("workspace"), py::arg("max_expanded_token_num"), no_gil);
  for (const auto* name : {"moe_permute_bwd", "moe_unpermute_fwd"})
    m.def(name, unpermute_forward, py::arg("input"), py::arg("dtype"), py::arg("row_id_map"),
          py::arg("prob") = py::none(), py::arg("num_tokens"), py::arg("topK"), no_gil);
  m.def("moe_unpermute_bwd", unpermute_backward, py::arg("input_bwd"), py::arg("input_fwd"), py::arg("dtype"),
        py::arg("row_id_map"), py::arg("prob") = py::none(), no_gil);
  m.def("splits_to_offsets", splits_to_offsets, py::arg("first_dims"), py::arg("logical_last_dim"), no_gil);
  m.def("splits_to_offsets_multi", splits_to_offsets_multi, py::arg("split_sizes"), py::arg("device"), py::kw_only(),
        py::arg("strides"), py::arg("include_leading_zero"), py::arg("dtypes"), py::arg("bulk_allocate") = false,
        no_gil);
}

}  // namespace weft::te
