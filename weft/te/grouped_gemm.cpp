#include <ATen/ops/sum.h>
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "weft/kernels/opmath.h"
#include "weft/kernels/rows.h"
#include "weft/te/dtype.h"
#include "weft/te/gemm_limits.h"
#include "weft/te/output.h"
#include "weft/te/strict.h"

// One GEMM per group. Each has its own operands, and its own part of the output.

namespace weft::te {
namespace {

using PyTensors = std::vector<py::object>;

// ---- Lists of tensors ----------------------------------------------------------------------------------------------

constexpr const char* kGemmOfLists = "te_general_grouped_gemm";

void check_count(const char* who, const char* what, size_t count, size_t expected) {
  TORCH_CHECK_VALUE(count == expected, who, ": got ", count, " tensors ", what, ", expected ", expected,
                    ", one for each group.");
}

/// Splits one output into consecutive matrices, or takes one output per group, each as [M, N].
class ListOutputs {
 public:
  ListOutputs(const std::vector<at::Tensor>& given, bool single, size_t groups) : single_(single) {
    check_count(kGemmOfLists, "D", given.size(), single ? 1 : groups);
    for (const auto& t : given) {
      TORCH_CHECK_VALUE(t.is_contiguous(), kGemmOfLists, ": D is not contiguous.");
      tensors_.push_back(host(t).view({-1}));
    }
  }
  at::Tensor take(size_t group, int64_t rows, int64_t columns) {
    const auto& all = tensors_[single_ ? 0 : group];
    const auto size = rows * columns, begin = single_ ? taken_ : 0;
    TORCH_CHECK_VALUE(begin + size <= all.numel() && (single_ || size == all.numel()), kGemmOfLists, ": D has ",
                      all.numel(), " elements, expected space for [", rows, ", ", columns, "] of group ", group,
                      single_ ? " after those of the groups before it." : ".");
    taken_ += size;
    return all.narrow(0, begin, size).view({rows, columns});
  }

 private:
  std::vector<at::Tensor> tensors_;  // flat
  bool single_;
  int64_t taken_ = 0;
};

/// The tensors of one group in a list. `bias` is added, or with `grad` becomes the bias gradient; `pre_gelu` receives
/// the input of GELU, or with `grad` is it. Both may be empty: there is none.
struct ListGroup {
  GemmOperands operands;
  at::Tensor out, bias, pre_gelu;

  void set_zero(bool grad, bool accumulate) const {
    if (!accumulate) out.zero_();
    if (grad) bias.zero_();
    pre_gelu.zero_();
  }
  void run(bool grad, bool accumulate) const {
    if (operands.empty()) return set_zero(grad, accumulate);
    kernels::Epilogue e{.out = out};
    const bool has_bias = bias.numel() > 0, has_gelu = pre_gelu.numel() > 0;
    if (accumulate) e.addend = out;
    if (has_bias && !grad) e.bias = bias.reshape({-1});
    if (has_gelu && grad) {
      e.act_grad = kGelu, e.act_input = pre_gelu.view(out.sizes());
    } else if (has_gelu) {
      e.act = kGelu, e.keep_pre_act = true;
    }
    const auto r = multiply(operands, e);
    if (e.keep_pre_act) pre_gelu.copy_(r.pre_act.view(pre_gelu.sizes()));
    if (has_bias && grad) bias.copy_(sum_rows_of_b(operands, bias.scalar_type()));
  }
};

/// D_i = op(B_i) op(A_i) for lists of tensors. Returns `bias`: with `grad` these are the bias gradients.
std::vector<at::Tensor> grouped_gemm_of_lists(const PyTensors& a, bool transa, const PyTensors& b, bool transb,
                                              const std::optional<std::vector<at::Tensor>>& d, DType d_type,
                                              py::handle /*m_splits*/, const std::vector<at::Tensor>& bias,
                                              DType /*bias_type*/, bool single_output,
                                              const std::vector<at::Tensor>& pre_gelu_out, bool grad,
                                              py::handle /*workspace*/, py::handle /*workspace_size*/, bool accumulate,
                                              bool use_split_accumulator, int /*math_sm_count*/) {
  TORCH_CHECK_VALUE(d, kGemmOfLists, ": D is None, expected allocated outputs.");
  check_count(kGemmOfLists, "B", b.size(), a.size());
  check_count(kGemmOfLists, "bias", bias.size(), a.size());
  check_count(kGemmOfLists, "pre_gelu_out", pre_gelu_out.size(), a.size());
  ListOutputs outputs(*d, single_output, a.size());
  std::vector<ListGroup> groups;
  for (size_t i = 0; i < a.size(); ++i) {
    auto operands = read_gemm_operands(kGemmOfLists, a[i], transa, b[i], transb);
    check_gemm_limits(kGemmOfLists, operands,
                      {.split_accumulator = use_split_accumulator, .dtype = scalar_type(d_type)});
    auto out = outputs.take(i, operands.rows(), operands.columns());
    groups.push_back({std::move(operands), std::move(out), host(bias[i]), host(pre_gelu_out[i])});
  }
  const Computing computing;
  for (const auto& group : groups) group.run(grad, accumulate);
  return bias;
}

// ---- Grouped tensors -----------------------------------------------------------------------------------------------

/// The tensors of a list, or the parts of a GroupedTensor, as tensors that share its memory.
PyTensors members(const py::object& tensors) {
  if (py::isinstance<py::list>(tensors) || py::isinstance<py::tuple>(tensors)) return tensors.cast<PyTensors>();
  auto parts = tensors.attr("split_into_quantized_tensors")().cast<PyTensors>();
  constexpr const char* kSwizzled = "_with_gemm_swizzled_scales";
  for (const auto& part : parts)  // Python marks them by what the quantizer would do now
    if (py::hasattr(part, kSwizzled)) py::setattr(part, kSwizzled, tensors.attr(kSwizzled));
  return parts;
}

/// One factor per group, from a tensor with one element or one per group.
std::vector<double> group_factors(const char* who, const char* what, const at::Tensor& factors, size_t groups) {
  const auto count = static_cast<size_t>(factors.numel());
  TORCH_CHECK_VALUE(count == 1 || count == groups, who, ": ", what, " has ", count, " elements, expected 1 or ", groups,
                    ", one for each group.");
  const auto values = host(factors).to(at::kDouble).contiguous();
  std::vector<double> out(groups, *values.const_data_ptr<double>());
  if (count == groups) std::copy_n(values.const_data_ptr<double>(), groups, out.begin());
  return out;
}

/// One group: out = alpha·op(B) op(A) + beta·out, rounded, plus the bias, of which row r is multiplied by
/// bias_scale[r].
struct TensorGroup {
  GemmOperands operands;
  at::Tensor out, bias, bias_scale;  // bias and bias_scale may be undefined
  double alpha, beta;

  void run() const {
    if (out.numel() == 0) return;
    if (beta != 0 && beta != 1) out.mul_(beta);
    if (!operands.empty()) {
      multiply(operands, {.scale = alpha, .addend = beta == 0 ? at::Tensor() : out, .out = out});
    } else if (beta == 0) {
      out.zero_();
    }
    if (!bias.defined()) return;
    const auto row = kernels::as_dtype(bias, at::kFloat);
    out.copy_(out.to(at::kFloat).add_(bias_scale.defined() ? bias_scale.view({-1, 1}).mul(row) : row));
  }
};

constexpr size_t kMostGroups = 64;  // of one GEMM of a GPU

struct GroupedTensorCall {
  const char* who;
  PyTensors a, b, d, bias = {};
  at::Tensor bias_scale = {};  // undefined without one
  std::vector<double> alpha = {}, beta = {};
  bool split_accumulator = true;
  bool has_lists = false;  // A or D

  std::vector<TensorGroup> groups(bool transa, bool transb) const {
    check_count(who, "B", b.size(), a.size());
    check_count(who, "D", d.size(), a.size());
    if (!bias.empty()) check_count(who, "bias", bias.size(), a.size());
    require_on_gpu(a.size() <= kMostGroups || !(has_lists || !bias.empty()), who, "GPUs multiply at most ", kMostGroups,
                   " groups that are given as lists or have a bias, got ", a.size(), ".");
    std::vector<TensorGroup> out;
    int64_t row = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      auto operands = read_gemm_operands(who, a[i], transa, b[i], transb);
      const auto dtype = nominal_output_dtype(i);
      check_gemm_limits(who, operands, {.split_accumulator = split_accumulator, .dtype = dtype});
      const auto rows = operands.rows(), columns = operands.columns();
      TensorGroup group{std::move(operands), output(i, rows, columns), {}, {}, alpha[i], beta[i]};
      if (!bias.empty()) group.bias = bias_row(i, columns);
      if (bias_scale.defined()) group.bias_scale = scales_of_rows(row, rows);
      out.push_back(std::move(group));
      row += rows;
    }
    return out;
  }

 private:
  at::Tensor output(size_t i, int64_t rows, int64_t columns) const {
    TORCH_CHECK_NOT_IMPLEMENTED(!is_quantized(d[i]), who, ": D is quantized, expected plain tensors.");
    const auto t = d[i].cast<at::Tensor>();
    TORCH_CHECK_VALUE(t.numel() == rows * columns && t.is_contiguous(), who, ": D of group ", i, " has shape ",
                      t.sizes(), t.is_contiguous() ? "" : " and is not contiguous", ", expected a contiguous tensor [",
                      rows, ", ", columns, "].");
    return host(t).view({rows, columns});
  }
  at::ScalarType nominal_output_dtype(size_t i) const {
    return is_quantized(d[i]) ? dtype_of_tensor(d[i]) : d[i].cast<at::Tensor>().scalar_type();
  }
  at::Tensor bias_row(size_t i, int64_t columns) const {
    const auto t = host(bias[i].cast<at::Tensor>());
    const auto bytes = columns * static_cast<int64_t>(t.element_size());
    require_on_gpu(bytes % 16 == 0 || d[i].attr("numel")().cast<int64_t>() == 0, who,
                   "GPUs add a bias whose bytes are a multiple of 16, got ", columns, " elements of ", t.scalar_type(),
                   ".");
    require_on_gpu(t.scalar_type() == nominal_output_dtype(i), who, "GPUs add a bias in the dtype of D, ",
                   nominal_output_dtype(i), ", got ", t.scalar_type(), ".");
    TORCH_CHECK_VALUE(t.numel() == columns, who, ": the bias of group ", i, " has shape ", t.sizes(), ", expected ",
                      columns, " elements.");
    return t.reshape({columns});
  }
  at::Tensor scales_of_rows(int64_t row, int64_t rows) const {
    TORCH_CHECK_VALUE(row + rows <= bias_scale.numel(), who, ": bias_scale has ", bias_scale.numel(),
                      " elements, expected one for each row of D.");
    return bias_scale.narrow(0, row, rows);
  }
};

/// D = alpha·op(B) op(A) + beta·D + bias per group. A or D may be a list instead of a GroupedTensor.
py::object grouped_gemm_of_tensors(const char* who, const py::object& a, bool transa, const py::object& b, bool transb,
                                   py::object d, const py::object& bias, const std::optional<at::Tensor>& bias_scale,
                                   const at::Tensor& alpha, const at::Tensor& beta, bool split_accumulator) {
  GroupedTensorCall call{
      .who = who, .a = members(a), .b = members(b), .d = members(d), .split_accumulator = split_accumulator};
  const auto is_list = [](const py::object& t) { return py::isinstance<py::list>(t) || py::isinstance<py::tuple>(t); };
  call.has_lists = is_list(a) || is_list(d);
  TORCH_CHECK_VALUE(!call.a.empty(), who, ": the operands have no groups.");
  TORCH_CHECK_VALUE(!bias_scale || !bias.is_none(), who, ": bias_scale requires a bias.");
  if (!bias.is_none()) call.bias = members(bias);
  if (bias_scale) call.bias_scale = host(*bias_scale).reshape({-1});
  call.alpha = group_factors(who, "alpha", alpha, call.a.size());
  call.beta = group_factors(who, "beta", beta, call.a.size());
  const auto groups = call.groups(transa, transb);
  const Computing computing;
  for (const auto& group : groups) group.run();
  return d;
}

void bind_grouped_tensor_gemm(py::module_& m, const char* name) {
  m.def(
      name,
      [name](const py::object& a, bool transa, const py::object& b, bool transb, const py::object& d,
             const py::object& bias, const std::optional<at::Tensor>& bias_scale, const at::Tensor& alpha,
             const at::Tensor& beta, py::handle /*workspace_setup*/, py::handle /*workspace_cublas*/,
             bool use_split_accumulator, int /*math_sm_count*/) {
        return grouped_gemm_of_tensors(name, a, transa, b, transb, d, bias, bias_scale, alpha, beta,
                                       use_split_accumulator);
      },
      py::arg("A"), py::arg("transa"), py::arg("B"), py::arg("transb"), py::arg("D"), py::arg("bias"),
      py::arg("bias_scale"), py::arg("alpha"), py::arg("beta"), py::arg("workspace_setup"), py::arg("workspace_cublas"),
      py::arg("use_split_accumulator"), py::arg("math_sm_count"));
}

}  // namespace

void bind_grouped_gemm(py::module_& m) {
  m.def(kGemmOfLists, &grouped_gemm_of_lists, py::arg("A"), py::arg("transa"), py::arg("B"), py::arg("transb"),
        py::arg("D"), py::arg("D_type"), py::arg("m_splits"), py::arg("bias"), py::arg("bias_type"),
        py::arg("single_output"), py::arg("pre_gelu_out"), py::arg("grad"), py::arg("workspace"),
        py::arg("workspaceSize"), py::arg("accumulate"), py::arg("use_split_accumulator"), py::arg("math_sm_count"));
  bind_grouped_tensor_gemm(m, "te_general_grouped_gemm_for_grouped_tensor");
  bind_grouped_tensor_gemm(m, "te_general_grouped_gemm_for_discrete_in");
  bind_grouped_tensor_gemm(m, "te_general_grouped_gemm_for_discrete_out");
}

}  // namespace weft::te
