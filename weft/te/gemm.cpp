#include "weft/te/gemm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>

#include "weft/kernels/opmath.h"
#include "weft/kernels/quantized_gemm.h"
#include "weft/kernels/rows.h"
#include "weft/te/bind.h"
#include "weft/te/dtype.h"
#include "weft/te/gemm_limits.h"
#include "weft/te/output.h"

namespace weft::te {

// ---- Operands ------------------------------------------------------------------------------------------------------

namespace {

int64_t row_count(const Operand& o) { return o.quantized ? o.quantized->rows : o.plain.size(0); }
int64_t column_count(const Operand& o) { return o.quantized ? o.quantized->columns : o.plain.size(1); }

at::Tensor operand_values(const Operand& o, at::ScalarType dtype) {
  return o.quantized
             ? kernels::dequantize(*o.quantized, o.copy == Copy::columnwise && o.quantized->columnwise.defined(), dtype)
             : kernels::as_dtype(o.plain, dtype);
}

/// The dtype to multiply in: that of the plain operands.
at::ScalarType plain_dtype(const GemmOperands& o) {
  if (o.a.quantized) return o.b.plain.scalar_type();
  if (o.b.quantized) return o.a.plain.scalar_type();
  return c10::promoteTypes(o.a.plain.scalar_type(), o.b.plain.scalar_type());
}

/// A GPU's epilogue rounds nothing before an activation: its operands have no nominal dtype here.
kernels::GemmResult multiply_quantized(const GemmOperands& o, const kernels::Epilogue& e) {
  auto left = *o.b.quantized, right = *o.a.quantized;
  left.dtype = right.dtype = at::kFloat;
  return kernels::quantized_gemm({left, o.b.copy == Copy::columnwise}, {right, o.a.copy == Copy::columnwise}, e);
}

}  // namespace

int64_t GemmOperands::rows() const { return transb ? column_count(b) : row_count(b); }
int64_t GemmOperands::columns() const { return transa ? row_count(a) : column_count(a); }
int64_t GemmOperands::reduction() const { return transa ? column_count(a) : row_count(a); }

GemmOperands read_gemm_operands(const char* who, py::handle a, bool transa, py::handle b, bool transb) {
  GemmOperands o{read_operand(a, transa ? Copy::rowwise : Copy::columnwise),
                 read_operand(b, transb ? Copy::columnwise : Copy::rowwise), transa, transb};
  const auto reduction_of_b = transb ? row_count(o.b) : column_count(o.b);
  TORCH_CHECK_VALUE(o.reduction() == reduction_of_b, who, ": the operands do not fit: A is [", row_count(o.a), ", ",
                    column_count(o.a), "] with transA=", transa, ", B is [", row_count(o.b), ", ", column_count(o.b),
                    "] with transB=", transb, "; they reduce over ", o.reduction(), " and ", reduction_of_b,
                    " values.");
  return o;
}

at::ScalarType nominal_dtype(const Operand& operand) {
  return operand.quantized ? operand.quantized->dtype : operand.plain.scalar_type();
}

kernels::GemmResult multiply(const GemmOperands& operands, const kernels::Epilogue& e) {
  if (operands.a.quantized && operands.b.quantized) return multiply_quantized(operands, e);
  const auto dtype = plain_dtype(operands);
  const auto a = operand_values(operands.a, dtype), b = operand_values(operands.b, dtype);
  return kernels::gemm({b, operands.transb}, {a, operands.transa}, e);
}

at::Tensor sum_rows_of_b(const GemmOperands& operands, at::ScalarType dtype) {
  const auto& b = operands.b;
  const auto values = operand_values(b, b.quantized ? at::kFloat : b.plain.scalar_type());
  return values.scalar_type() == dtype ? kernels::sum_rows(values) : at::sum(values, 0, /*keepdim=*/false, dtype);
}

// ---- generic_gemm --------------------------------------------------------------------------------------------------

namespace {

constexpr const char* kGenericGemm = "generic_gemm";

/// The sizes of D: those of B with the last one replaced by N, or [M, N] if B is transposed.
std::vector<int64_t> output_sizes(const GemmOperands& operands, std::vector<int64_t> b_sizes) {
  if (operands.transb) return {operands.rows(), operands.columns()};
  b_sizes.back() = operands.columns();
  return b_sizes;
}

struct GenericGemmOptions {
  std::optional<DType> dtype;
  DType bias_type;
  bool gelu, grad, accumulate, split_accumulator;
  double alpha;
  std::optional<double> beta;
};

/// One call: what it computes on the CPU. With `grad` the bias and GELU are those of backward.
struct GenericGemm {
  GemmOperands operands;
  GenericGemmOptions options;
  at::Tensor bias, gelu_in;
  std::vector<int64_t> sizes = {};                           // of D
  at::ScalarType dtype = at::kFloat, computed = at::kFloat;  // of D, and of `out`
  at::Tensor out = {};                                       // D, if the caller gives a plain one
  at::Tensor bias_grad = {}, pre_gelu = {};

  /// D as an output of the caller: of these sizes and of this dtype.
  void set_out(const at::Tensor& d) {
    TORCH_CHECK_VALUE(d.sizes() == at::IntArrayRef(sizes) && d.is_contiguous(), kGenericGemm, ": D has shape ",
                      d.sizes(), d.is_contiguous() ? "" : " and is not contiguous",
                      ", expected a contiguous tensor of shape ", at::IntArrayRef(sizes), ".");
    TORCH_CHECK_TYPE(!options.dtype || scalar_type(*options.dtype) == d.scalar_type(), kGenericGemm, ": D is ",
                     d.scalar_type(), ", expected output_dtype, ", scalar_type(*options.dtype), ".");
    dtype = computed = d.scalar_type();
    out = host(d).view({operands.rows(), operands.columns()});
  }

  void check() const {
    const bool gelu = options.gelu, grad = options.grad;
    check_gemm_limits(kGenericGemm, operands,
                      {.bias = bias.defined() && !grad,
                       .bias_grad = bias.defined() && grad,
                       .gelu = gelu && !grad,
                       .gelu_grad = gelu && grad,
                       .split_accumulator = options.split_accumulator,
                       .dtype = dtype});
    const double beta = options.beta.value_or(options.accumulate ? 1 : 0);
    TORCH_CHECK_VALUE(options.accumulate || beta == 0, kGenericGemm, ": beta is ", beta,
                      " without accumulate, expected 0: nothing is added to D.");
    TORCH_CHECK_VALUE(!options.accumulate || out.defined(), kGenericGemm, ": accumulate requires a plain tensor D.");
    TORCH_CHECK_NOT_IMPLEMENTED(!options.accumulate || !options.gelu, kGenericGemm,
                                ": accumulate together with gelu is not supported.");
    TORCH_CHECK_VALUE(!options.gelu || !options.grad || gelu_in.defined(), kGenericGemm,
                      ": the gradient of GELU requires gelu_in, its input.");
  }

  /// The dtype of the input of GELU that forward returns.
  at::ScalarType pre_gelu_dtype() const {
    const auto is_fp8 = [](const Operand& o) {
      return o.quantized && o.quantized->quantization.format != Format::e2m1;
    };
    return is_fp8(operands.a) || is_fp8(operands.b) ? scalar_type(options.bias_type) : dtype;
  }

  kernels::Epilogue epilogue() const {
    kernels::Epilogue e{.scale = options.alpha, .out = out, .dtype = computed};
    if (out.defined()) e.dtype = at::ScalarType::Undefined;
    if (!options.grad && bias.defined()) e.bias = bias.reshape({-1});
    if (options.gelu && options.grad) {
      e.act_grad = kGelu;
      e.act_input = gelu_in.reshape({operands.rows(), operands.columns()});
      e.keep_column_sums = bias.defined();
    } else if (options.gelu) {
      e.act = kGelu;
      e.keep_pre_act = true;
    }
    const auto beta = options.beta.value_or(1);
    if (options.accumulate && beta != 1) out.mul_(beta);
    if (options.accumulate) e.addend = out;
    return e;
  }

  void run() {
    if (operands.empty()) return set_zero();
    auto r = multiply(operands, epilogue());
    out = r.out;
    if (r.pre_act.defined()) pre_gelu = kernels::rounded(r.pre_act, pre_gelu_dtype()).view(sizes);
    if (!options.grad || !bias.defined()) return;
    // After GELU the bias gradient is that of its input, which is D.
    bias_grad = options.gelu ? kernels::as_dtype(r.column_sums, dtype) : sum_rows_of_b(operands, dtype);
  }

  /// An empty operand: D is 0 or remains, and there is no bias.
  void set_zero() {
    if (!out.defined())
      out = at::zeros({operands.rows(), operands.columns()}, computed);
    else if (!options.accumulate)
      out.zero_();
    if (options.gelu && !options.grad) pre_gelu = at::zeros(sizes, pre_gelu_dtype());
    const auto b_columns = operands.transb ? operands.rows() : operands.reduction();
    if (options.grad && bias.defined()) bias_grad = at::zeros({b_columns}, dtype);
  }
};

/// Whether the GEMM writes what a quantizer for delayed scaling receives without rounding it to `output_dtype`: FP8
/// operands with one scale each.
bool quantizes_accumulators(const GemmOperands& o) {
  const auto has_one_scale = [](const Operand& x) { return x.quantized && x.quantized->quantization.block == 0; };
  return has_one_scale(o.a) || has_one_scale(o.b);
}

py::list generic_gemm(py::handle a, bool transa, py::handle b, bool transb, const py::object& d,
                      const py::object& given_quantizer, std::optional<DType> output_dtype,
                      const std::optional<at::Tensor>& bias, DType bias_type, bool gelu,
                      const std::optional<at::Tensor>& gelu_in, bool grad, py::handle /*workspace*/,
                      py::handle /*workspace_size*/, bool accumulate, bool use_split_accumulator,
                      py::handle comm_overlap, py::handle /*comm_type*/, const py::object& extra_output,
                      bool /*bulk_overlap*/, double alpha, std::optional<double> beta) {
  TORCH_CHECK_NOT_IMPLEMENTED(comm_overlap.is_none(), kGenericGemm,
                              ": overlapping communication with a GEMM through userbuffers (comm_overlap) is not "
                              "supported on the CPU. Leave the ub_* options of the module off.");
  GenericGemm call{.operands = read_gemm_operands(kGenericGemm, a, transa, b, transb),
                   .options = {output_dtype, bias_type, gelu, grad, accumulate, use_split_accumulator, alpha, beta},
                   .bias = host(bias),
                   .gelu_in = host(gelu_in)};
  const auto device = device_of(a);
  call.sizes = output_sizes(call.operands, sizes_of(b));
  const bool quantized_d = !d.is_none() && is_quantized(d);
  const auto quantizer = quantized_d && given_quantizer.is_none() ? py::object(d.attr("_quantizer")) : given_quantizer;
  call.dtype = output_dtype ? scalar_type(*output_dtype) : nominal_dtype(call.operands.a);
  call.computed = quantizes_accumulators(call.operands) ? computed_dtype(quantizer, call.dtype) : call.dtype;
  const bool writes_d = !d.is_none() && quantizer.is_none();
  if (writes_d) call.set_out(d.cast<at::Tensor>());
  call.check();
  {
    const Computing computing;
    call.run();
  }
  py::list out;
  out.append(writes_d ? d : make_output(call.out.view(call.sizes), call.dtype, quantizer, device, d));
  for (const auto& t : {call.bias_grad, call.pre_gelu})
    out.append(t.defined() ? py::cast(on_device(t, device)) : py::none());
  out.append(extra_output);
  return out;
}

}  // namespace

void bind_gemm(py::module_& m) {
  m.def(kGenericGemm, &generic_gemm, py::arg("A"), py::arg("transA"), py::arg("B"), py::arg("transB"), py::arg("D"),
        py::arg("quantizer"), py::arg("output_dtype"), py::arg("bias"), py::arg("bias_type"), py::arg("gelu"),
        py::arg("gelu_in"), py::arg("grad"), py::arg("workspace"), py::arg("workspace_size"), py::arg("accumulate"),
        py::arg("use_split_accumulator"), py::arg("comm_overlap") = py::none(), py::arg("comm_type") = py::none(),
        py::arg("extra_output") = py::none(), py::arg("bulk_overlap") = false, py::arg("alpha") = 1.0,
        py::arg("beta") = py::none());
  bind_grouped_gemm(m);
}

}  // namespace weft::te
