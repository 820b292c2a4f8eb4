#include "weft/kernels/quantized_gemm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "weft/kernels/quantize_math.h"
#include "weft/kernels/quantize_tiers.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

/// Values of an operand, exact, and the scales that they do not contain.
struct DecodedOperand {
  at::Tensor values;        // [rows, K], of the requested dtype, or float32 if that does not hold them
  float factor = 1;         // of all values
  at::Tensor block_scales;  // float32 [rows, blocks of K]; undefined if the values contain them
};

const QuantizedCopy& copy_of(const QuantizedOperand& o) {
  return o.columnwise ? o.matrix.columnwise : o.matrix.rowwise;
}
int64_t row_count(const QuantizedOperand& o) { return o.columnwise ? o.matrix.columns : o.matrix.rows; }
int64_t reduction_of(const QuantizedOperand& o) { return o.columnwise ? o.matrix.rows : o.matrix.columns; }
bool has_block_scales(const QuantizedOperand& o) {
  const auto& q = o.matrix.quantization;
  return q.block > 0 && q.scale_format == ScaleFormat::float32 && !q.power_of_two;
}
bool is_transformed(const QuantizedOperand& o) { return o.columnwise && o.matrix.quantization.hadamard; }

// ---- Decoding ------------------------------------------------------------------------------------------------------

/// Whether blocks with E8M0 code 0 hold zeros only.
bool smallest_blocks_are_zero(const QuantizedOperand& o) {
  const auto l = sizes_of(o.matrix, o.columnwise);
  const auto is_smallest = copy_of(o)
                               .scales.eq(0)
                               .repeat_interleave(l.block_rows, 0)
                               .slice(0, 0, l.rows)
                               .repeat_interleave(l.block_columns, 1)
                               .slice(1, 0, l.columns);
  return !copy_of(o).data.bitwise_and(0x7f).ne(0).logical_and(is_smallest).any().item<bool>();
}

/// Whether all values, with their power-of-two scales, are normal numbers of bfloat16: AMX reads subnormal ones as 0.
bool fits_bfloat16(const QuantizedOperand& o) {
  const auto& q = o.matrix.quantization;
  const auto& scales = copy_of(o).scales;
  if (scales.numel() == 0) return true;
  const int least = q.format == Format::e4m3 ? -117 : -110, most = q.format == Format::e4m3 ? 119 : 112;  // exponents
  if (q.scale_format == ScaleFormat::float32)
    return scales.min().item<float>() >= power_of_two(least) && scales.max().item<float>() <= power_of_two(most);
  const auto codes = scales.to(at::kInt);
  const auto used = codes.masked_select(codes > 0);
  if (used.numel() > 0 && (used.min().item<int>() < least + 127 || used.max().item<int>() > most + 127)) return false;
  return used.numel() == codes.numel() || smallest_blocks_are_zero(o);
}

/// One scale per row and block of the reduction, from scales of blocks of rows.
at::Tensor scales_of_rows(const QuantizedOperand& o) {
  const auto& scales = copy_of(o).scales;
  const auto& q = o.matrix.quantization;
  return q.two_dimensional ? scales.repeat_interleave(q.block, 0).slice(0, 0, row_count(o)) : scales;
}

DecodedOperand decode_operand(const QuantizedOperand& o, at::ScalarType dtype) {
  const auto& q = o.matrix.quantization;
  const auto& copy = copy_of(o);
  const auto decode = [&](Decoding decoding, at::ScalarType type) {
    auto values = decode_copy(o.matrix, o.columnwise, decoding, type);
    return o.columnwise && q.columns_in_place() ? values.t() : values;
  };
  if (q.block == 0) return {decode(Decoding::codes, dtype), copy.scales.item<float>(), {}};
  if (q.scale_format == ScaleFormat::e4m3)
    return {decode(Decoding::block_scaled, dtype), copy.amax.item<float>() / (6 * q.scale_bound), {}};
  if (has_block_scales(o)) return {decode(Decoding::codes, dtype), 1, scales_of_rows(o)};
  return {decode(Decoding::block_scaled, dtype == at::kFloat || fits_bfloat16(o) ? dtype : at::kFloat), 1, {}};
}

// ---- Multiplication ------------------------------------------------------------------------------------------------

/// A Bᵀ in float32.
at::Tensor float32_product(const at::Tensor& a, const at::Tensor& b) {
  const Epilogue float32{.dtype = at::kFloat};
  if (a.scalar_type() == b.scalar_type() && gemm_tier(a, transposed(b), float32) == Tier::amx)
    return gemm(a, transposed(b), float32).out;
  return gemm(a.to(at::kFloat), transposed(b.to(at::kFloat))).out;
}

/// Σ over blocks of the reduction: partial sums times the scales of both operands.
at::Tensor sum_scaled_blocks(const DecodedOperand& a, const DecodedOperand& b, int64_t block) {
  auto sum = at::zeros({a.values.size(0), b.values.size(0)}, a.values.options().dtype(at::kFloat));
  for (int64_t k = 0, i = 0; k < a.values.size(1); k += block, ++i) {
    const auto length = std::min(block, a.values.size(1) - k);
    auto partial = float32_product(a.values.narrow(1, k, length), b.values.narrow(1, k, length));
    sum.addcmul_(partial.mul_(a.block_scales.narrow(1, i, 1)), b.block_scales.narrow(1, i, 1).t());
  }
  return sum;
}

/// The epilogue of a float32 product whose operands have these factors.
at::Tensor finish(at::Tensor product, const Epilogue& e, float left_factor, float right_factor) {
  for (const double factor : {static_cast<double>(left_factor), static_cast<double>(right_factor), e.scale})
    if (factor != 1) product.mul_(factor);
  if (e.bias.defined()) product.add_(e.bias);
  if (e.addend.defined() && e.addend.scalar_type() == at::kDouble) product = product.to(at::kDouble);
  if (e.addend.defined()) product.add_(e.addend);
  return e.out.defined() ? e.out.copy_(product) : product.to(e.dtype);
}

bool is_normal_float(double x) { return std::isnormal(static_cast<float>(x)); }

// ---- Checks --------------------------------------------------------------------------------------------------------

void check_operands(const QuantizedOperand& a, const QuantizedOperand& b) {
  for (const auto* o : {&a, &b}) {
    require_copy(o == &a ? "quantized gemm, operand a" : "quantized gemm, operand b", o->matrix, o->columnwise);
    TORCH_CHECK_NOT_IMPLEMENTED(!o->matrix.quantization.row_scaled,
                                "quantized gemm: row-scaled operands are not supported; dequantize them first.");
  }
  TORCH_CHECK_VALUE(reduction_of(a) == reduction_of(b), "quantized gemm: the operands reduce over ", reduction_of(a),
                    " and ", reduction_of(b), " values; expected the same number.");
  TORCH_CHECK_VALUE(
      has_block_scales(a) == has_block_scales(b),
      "quantized gemm: the blocks of one operand have arbitrary float32 scales, those of the other do not. "
      "Use the same scaling and the same power_of_2_scales for both.");
  TORCH_CHECK_VALUE(is_transformed(a) == is_transformed(b),
                    "quantized gemm: only one operand has a Hadamard transform. Use random_hadamard_transform for both "
                    "operands, or for none.");
  TORCH_CHECK_VALUE(copy_of(a).data.device() == copy_of(b).data.device(), "quantized gemm: the operands are on ",
                    copy_of(a).data.device(), " and ", copy_of(b).data.device(), ".");
}

void check_tensor(const char* name, const at::Tensor& t, at::IntArrayRef sizes, c10::Device device) {
  if (!t.defined()) return;
  TORCH_CHECK_VALUE(t.sizes() == sizes, "quantized gemm: ", name, " has shape ", t.sizes(), ", expected ", sizes, ".");
  TORCH_CHECK_TYPE(is_compute_dtype(t.scalar_type()), "quantized gemm: ", name, " is ", t.scalar_type(), ", expected ",
                   kComputeDtypes, ".");
  TORCH_CHECK_VALUE(t.device() == device, "quantized gemm: ", name, " is on ", t.device(), ", the operands are on ",
                    device, ".");
}

void check_epilogue(const QuantizedOperand& a, const QuantizedOperand& b, const Epilogue& e) {
  TORCH_INTERNAL_ASSERT(!e.act && !e.act_grad && !e.keep_pre_act && !e.keep_column_sums);
  const auto device = copy_of(a).data.device();
  const std::array<int64_t, 2> sizes{row_count(a), row_count(b)};
  check_tensor("bias", e.bias, at::IntArrayRef(&sizes[1], 1), device);
  check_tensor("out", e.out, sizes, device);
  check_tensor("addend", e.addend, sizes, device);
  const auto dtype = e.result_dtype(a.matrix.dtype);
  TORCH_CHECK_TYPE(is_compute_dtype(dtype), "quantized gemm: dtype is ", dtype, ", expected ", kComputeDtypes, ".");
  TORCH_CHECK_VALUE(!e.out.defined() || e.dtype == at::ScalarType::Undefined || e.dtype == dtype,
                    "quantized gemm: dtype is ", e.dtype, ", but `out` is ", dtype, ". Omit dtype.");
}

}  // namespace

at::Tensor quantized_gemm(const QuantizedOperand& a, const QuantizedOperand& b, const Epilogue& epilogue) {
  check_operands(a, b);
  check_epilogue(a, b, epilogue);
  Epilogue e = epilogue;
  e.dtype = epilogue.result_dtype(a.matrix.dtype);
  const auto& data = copy_of(a).data;
  if (data.is_meta())
    return e.out.defined() ? e.out : at::empty({row_count(a), row_count(b)}, data.options().dtype(e.dtype));
  // Other tiers may round a bfloat16 product before the epilogue.
  const bool amx = amx_supports(data.device().type(), at::kBFloat16, row_count(b), reduction_of(a));
  const auto dtype = amx ? at::kBFloat16 : at::kFloat;
  const auto left = decode_operand(a, dtype), right = decode_operand(b, dtype);
  if (left.block_scales.defined()) return finish(sum_scaled_blocks(left, right, a.matrix.quantization.block), e, 1, 1);
  const double scale = e.scale * left.factor * right.factor;
  if (e.dtype == at::kDouble || gemm_tier(left.values, transposed(right.values), e) != Tier::amx ||
      !is_normal_float(scale) || left.values.scalar_type() != right.values.scalar_type())
    return finish(float32_product(left.values, right.values), e, left.factor, right.factor);
  e.scale = scale;
  return gemm(left.values, transposed(right.values), e).out;
}

}  // namespace weft::kernels
