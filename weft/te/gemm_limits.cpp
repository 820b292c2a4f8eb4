#include "weft/te/gemm_limits.h"

#include "weft/te/quantizer_view.h"
#include "weft/te/strict.h"

namespace weft::te {
namespace {

bool is_fp8(const Operand& o) { return o.quantized && o.quantized->quantization.format != Format::e2m1; }
bool is_nvfp4(const Operand& o) { return o.quantized && o.quantized->quantization.format == Format::e2m1; }
bool has_one_scale(const Operand& o) { return is_fp8(o) && o.quantized->quantization.block == 0; }
bool has_float32_blocks(const Operand& o) {
  return is_fp8(o) && o.quantized->quantization.block > 0 &&
         o.quantized->quantization.scale_format == ScaleFormat::float32;
}

void check_multiple(const char* who, const char* what, int64_t size, int64_t divisor) {
  TORCH_CHECK(size % divisor == 0, who, ": the ", what, " dimension requirement of FP8 GEMMs on GPUs is a multiple of ",
              divisor, ", got ", size, ". Pad the operands.", kRelax);
}

/// The leading dimensions of the operands as the GPU reads them: it transposes none, or has transposed copies.
void check_leading_dimensions(const char* who, const GemmOperands& o) {
  const bool any_layout = gpu_needs_no_transpose();
  if (has_one_scale(o.a)) check_multiple(who, "leading", o.transa || !any_layout ? o.reduction() : o.columns(), 16);
  if (has_one_scale(o.b)) check_multiple(who, "leading", o.transb && any_layout ? o.rows() : o.reduction(), 16);
}

void check_float32_blocks(const char* who, const GemmOperands& o, const GemmFeatures& f) {
  const bool a_is_1d = !o.a.quantized->quantization.two_dimensional;
  const bool b_is_1d = !o.b.quantized->quantization.two_dimensional;
  check_multiple(who, "leading", o.reduction(), 16);
  check_multiple(who, "outer", o.columns(), 8);
  if (b_is_1d) check_multiple(who, "outer", o.rows(), 8);
  TORCH_CHECK(a_is_1d || b_is_1d, who,
              ": Only 1D by 1D, 1D by 2D, and 2D by 1D block scaling GEMM is supported on GPUs, got two operands with "
              "2D blocks.",
              kRelax);
  const bool has_only_gelu_grad = f.gelu_grad && !f.bias && !f.bias_grad;
  TORCH_CHECK(
      has_only_gelu_grad || !(f.gelu || f.gelu_grad || f.bias_grad), who,
      ": Epilogue requested outside of the available ones: block-scaled FP8 GEMMs of GPUs add a bias or multiply "
      "by the gradient of GELU.",
      kRelax);
  TORCH_CHECK(!f.gelu_grad || f.dtype == at::kBFloat16, who, ": an unsupported value or parameter was passed: ",
              "the gradient of GELU requires a bfloat16 output, got ", f.dtype, ".", kRelax);
  TORCH_CHECK(f.split_accumulator, who,
              ": CUBLAS_STATUS_NOT_SUPPORTED: block-scaled FP8 GEMMs of GPUs require use_split_accumulator=True.",
              kRelax);
}

/// GPUs multiply values with other scales by a factor for each operand: both have the same kind, or neither any.
void check_same_scaling(const char* who, const GemmOperands& o) {
  bool same = o.a.quantized.has_value() == o.b.quantized.has_value();
  if (same && o.a.quantized) {
    const auto &a = o.a.quantized->quantization, &b = o.b.quantized->quantization;
    same = a.block == b.block && a.scale_format == b.scale_format && is_nvfp4(o.a) == is_nvfp4(o.b);
  }
  TORCH_CHECK(same, who, ": Inputs A and B to GEMM need to have compatible scaling modes. Quantize both by the same ",
              "recipe, or none.", kRelax);
}

void check_nvfp4(const char* who, int64_t reduction, int64_t columns, at::ScalarType dtype) {
  check_multiple(who, "leading", reduction, 32);
  check_multiple(who, "outer", columns, 8);
  TORCH_CHECK(dtype != at::kHalf, who, ": FP4 GEMM does not support FP16 output. Use bfloat16.", kRelax);
}

/// Blocks with float32 scales that the GPU converts to MXFP8: rows of 1D blocks are converted by fours.
void check_converted_blocks(const char* who, const GemmOperands& o) {
  check_multiple(who, "leading", o.reduction(), 16);
  if (!o.a.quantized->quantization.two_dimensional) check_multiple(who, "outer", o.columns(), 4);
  if (!o.b.quantized->quantization.two_dimensional) check_multiple(who, "outer", o.rows(), 4);
}

void check_nvfp4(const char* who, const kernels::Quantization& q, const LinearSizes& s) {
  TORCH_CHECK(!q.hadamard || s.dtype == at::kBFloat16, who, ": RHT is only supported for bfloat16 input, got ", s.dtype,
              ".", kRelax);
  check_nvfp4(who, s.in_features, s.out_features, s.dtype);
  if (!s.with_backward) return;
  check_nvfp4(who, s.out_features, s.in_features, s.dtype);
  check_nvfp4(who, s.rows, s.in_features, s.dtype);
}

/// Leading dimensions of operands with one scale each.
void check_one_scale(const char* who, const LinearSizes& s) {
  check_multiple(who, "leading", s.in_features, 16);
  if (!s.with_backward) return;
  check_multiple(who, "leading", s.out_features, 16);
  if (!gpu_needs_no_transpose()) check_multiple(who, "leading", s.rows, 16);
}

}  // namespace

void check_linear_limits(const char* who, const kernels::Quantization& q, const LinearSizes& s) {
  if (!strict()) return;
  if (q.block == 0) return check_one_scale(who, s);
  if (q.scale_format != ScaleFormat::float32) {
    check_whole_blocks(who, s.rows, s.in_features, q.block);
    check_whole_blocks(who, s.out_features, s.in_features, q.block);
    if (s.with_backward) check_whole_blocks(who, s.rows, s.out_features, q.block);
    if (q.format == Format::e2m1) check_nvfp4(who, q, s);
  } else if (!gpu_needs_no_transpose() || s.with_backward) {
    for (const int64_t size : {s.rows, s.in_features, s.out_features}) check_multiple(who, "leading", size, 16);
  } else {
    check_multiple(who, "leading", s.in_features, 16);
    check_multiple(who, "outer", s.rows, 4);
  }
}

void check_gemm_limits(const char* who, const GemmOperands& o, const GemmFeatures& features) {
  if (!strict() || o.empty()) return;
  check_same_scaling(who, o);
  if (is_nvfp4(o.a)) check_nvfp4(who, o.reduction(), o.columns(), features.dtype);
  if (!is_fp8(o.a)) return;
  const auto is_e5m2 = [](const Operand& x) { return x.quantized->quantization.format == Format::e5m2; };
  TORCH_CHECK(!is_e5m2(o.a) || !is_e5m2(o.b), who,
              ": CUBLAS_STATUS_NOT_SUPPORTED: GPUs do not multiply two E5M2 operands. Use E4M3 for one of them.",
              kRelax);
  check_leading_dimensions(who, o);
  if (!has_float32_blocks(o.a)) return;
  if (gpu_needs_no_transpose()) return check_converted_blocks(who, o);
  check_float32_blocks(who, o, features);
}

}  // namespace weft::te
