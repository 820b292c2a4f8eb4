#include "weft/kernels/quantized_gemm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <set>

#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/quantize_math.h"
#include "weft/kernels/quantize_tiers.h"
#include "weft/kernels/row_chunks.h"
#include "weft/kernels/tiers.h"

namespace weft::kernels {
namespace {

/// Values of an operand, exact, and the scales that they do not contain.
struct DecodedOperand {
  at::Tensor values;        // [rows, K], of the requested dtype, or float32 if that does not hold them
  at::Tensor block_scales;  // float32 [rows, blocks of K]; undefined if the values contain them
};

/// Whether a columnwise operand is read from the rowwise copy: with one scale for all values they differ by order only.
bool reads_rows(const QuantizedOperand& o) {
  return !o.columnwise || (o.matrix.quantization.block == 0 && !o.matrix.columnwise.defined());
}
const QuantizedCopy& copy_of(const QuantizedOperand& o) {
  return reads_rows(o) ? o.matrix.rowwise : o.matrix.columnwise;
}
int64_t row_count(const QuantizedOperand& o) { return o.columnwise ? o.matrix.columns : o.matrix.rows; }
int64_t reduction_of(const QuantizedOperand& o) { return o.columnwise ? o.matrix.rows : o.matrix.columns; }
bool has_block_scales(const Quantization& q) {
  return q.block > 0 && q.scale_format == ScaleFormat::float32 && !q.power_of_two;
}
bool has_block_scales(const QuantizedOperand& o) { return has_block_scales(o.matrix.quantization); }
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

/// The scale of all values that decoded ones do not contain.
float factor_of(const QuantizedOperand& o) {
  const auto& q = o.matrix.quantization;
  if (q.block == 0) return copy_of(o).scales.item<float>();
  return q.scale_format == ScaleFormat::e4m3 ? copy_of(o).amax.item<float>() / (6 * q.scale_bound) : 1;
}

/// The factor of all products: of NVFP4 operands as a GPU's kernels compute it, so that results have the same bits.
double factor_of_products(const QuantizedOperand& a, const QuantizedOperand& b) {
  const auto &qa = a.matrix.quantization, &qb = b.matrix.quantization;
  if (qa.scale_format == ScaleFormat::e4m3 && qb.scale_format == ScaleFormat::e4m3 && qa.block > 0 && qb.block > 0) {
    const float inverse = 1 / (6 * 6 * qa.scale_bound * qb.scale_bound);
    const float factor = copy_of(a).amax.item<float>() * copy_of(b).amax.item<float>() * inverse;
    if (std::isnormal(factor)) return factor;
  }
  return static_cast<double>(factor_of(a)) * factor_of(b);
}

/// The scales that decoded values contain: those that keep them exact.
Decoding decoding_of(const Quantization& q) {
  return q.block == 0 || has_block_scales(q) ? Decoding::codes : Decoding::block_scaled;
}

/// Whether `dtype`, bfloat16 or float32, holds the decoded values.
bool holds_values(at::ScalarType dtype, const QuantizedOperand& o) {
  const auto& q = o.matrix.quantization;
  const bool has_powers_of_two = decoding_of(q) == Decoding::block_scaled && q.scale_format != ScaleFormat::e4m3;
  return dtype == at::kFloat || !has_powers_of_two || fits_bfloat16(o);
}

DecodedOperand decode_operand(const QuantizedOperand& o, at::ScalarType dtype) {
  const auto& q = o.matrix.quantization;
  const auto type = holds_values(dtype, o) ? dtype : at::kFloat;
  auto values = decode_copy(o.matrix, !reads_rows(o), decoding_of(q), type);
  if (o.columnwise && (reads_rows(o) || q.columns_in_place())) values = values.t();
  return {values, has_block_scales(o) ? scales_of_rows(o) : at::Tensor()};
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

bool is_normal_float(double x) { return std::isnormal(static_cast<float>(x)); }

/// The epilogue of a float32 product times this factor, of operands with this nominal dtype.
GemmResult finish(at::Tensor product, Epilogue e, double factor, at::ScalarType dtype) {
  e.scale *= factor;
  if (!is_normal_float(e.scale)) {
    product = product.to(at::kDouble).mul_(e.scale).to(at::kFloat);
    e.scale = 1;
  }
  return apply_epilogue(product, e, dtype);
}

bool has_activation(const Epilogue& e) { return e.act || e.act_grad || e.keep_pre_act || e.keep_column_sums; }

/// What one bfloat16 GEMM of decoded operands applies: the whole epilogue, or v up to the activation, as a separate
/// linear would store it.
Epilogue before_activation(const Epilogue& e, at::ScalarType nominal) {
  return has_activation(e) ? Epilogue{.scale = e.scale, .bias = e.bias, .dtype = nominal} : e;
}
/// The result, from what such a GEMM returned.
GemmResult after_gemm(const at::Tensor& v, Epilogue e, at::ScalarType nominal) {
  GemmResult result;
  result.out = v;
  if (!has_activation(e)) return result;
  e.scale = 1;
  e.bias = at::Tensor();
  return apply_epilogue(v.to(at::kFloat), e, nominal);
}

/// Rows [from, to) of the rowwise copy of a matrix whose blocks do not span rows, to be decoded.
QuantizedMatrix rows_between(const QuantizedMatrix& matrix, int64_t from, int64_t to) {
  auto part = matrix;
  part.rows = to - from;
  part.rowwise.data = matrix.rowwise.data.narrow(0, from, to - from);
  if (matrix.quantization.block > 0) part.rowwise.scales = matrix.rowwise.scales.narrow(0, from, to - from);
  return part;
}

/// Rows that are decoded to `dtype` as they arrive.
class DecodedRows {
 public:
  DecodedRows(const QuantizedRowChunks& given, at::ScalarType dtype) : given_(given), chunks_{.rows = given.rows} {
    for (const auto& [matrix, row] : given.list)
      chunks_.list.push_back(
          {.a = at::empty({matrix.rows, matrix.columns}, matrix.rowwise.data.options().dtype(dtype)), .row = row});
    done_.resize(given.list.size());
    chunks_.min_block_rows = given.min_block_rows;
    chunks_.ready = [this](int chunk, int64_t from) { return ready(chunk, from); };
    chunks_.progress = given.progress;
  }
  DecodedRows(const DecodedRows&) = delete;
  DecodedRows& operator=(const DecodedRows&) = delete;

  const RowChunks& chunks() const { return chunks_; }
  /// Chunks with values that `dtype` does not hold. The rows that arrived with them are decoded as zeros.
  const std::set<int>& not_representable() const { return not_representable_; }

 private:
  int64_t ready(int chunk, int64_t from) {
    const auto& matrix = given_.list[chunk].matrix;
    const auto to = given_.ready ? given_.ready(chunk, from) : matrix.rows;
    auto& done = done_[chunk];
    if (to <= done) return to;
    const auto part = rows_between(matrix, done, to);
    const auto rows = chunks_.list[chunk].a.narrow(0, done, to - done);
    if (holds_values(rows.scalar_type(), {part})) {
      decode_copy(part, false, decoding_of(part.quantization), rows.scalar_type(), rows);
    } else {
      rows.zero_();
      not_representable_.insert(chunk);
    }
    done = to;
    if (given_.progress) given_.progress();
    return to;
  }

  const QuantizedRowChunks& given_;
  RowChunks chunks_;
  std::vector<int64_t> done_;  // rows decoded so far, per chunk
  std::set<int> not_representable_;
};

// ---- Checks --------------------------------------------------------------------------------------------------------

void check_operands(const QuantizedOperand& a, const QuantizedOperand& b) {
  for (const auto* o : {&a, &b}) {
    require_copy(o == &a ? "quantized gemm, operand a" : "quantized gemm, operand b", o->matrix, !reads_rows(*o));
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

void check_epilogue(const QuantizedOperand& a, int64_t rows, const QuantizedOperand& b, const Epilogue& e) {
  const auto device = copy_of(a).data.device();
  const auto n = row_count(b);
  const bool halves = e.act && e.act->gated(), doubles = e.act_grad && e.act_grad->gated();
  const std::array<int64_t, 2> sizes{rows, halves ? n / 2 : doubles ? 2 * n : n};
  check_tensor("bias", e.bias, {n}, device);
  check_tensor("out", e.out, sizes, device);
  check_tensor("addend", e.addend, sizes, device);
  if (e.act_grad) check_elements(e.act_input, rows * (doubles ? 2 * n : n), "the input of the activation");
  const auto dtype = e.result_dtype(a.matrix.dtype);
  TORCH_CHECK_TYPE(is_compute_dtype(dtype), "quantized gemm: dtype is ", dtype, ", expected ", kComputeDtypes, ".");
  TORCH_CHECK_VALUE(!e.out.defined() || e.dtype == at::ScalarType::Undefined || e.dtype == dtype,
                    "quantized gemm: dtype is ", e.dtype, ", but `out` is ", dtype, ". Omit dtype.");
}

/// Other tiers than AMX may round a bfloat16 product before the epilogue.
at::ScalarType decoded_dtype(const QuantizedOperand& b) {
  const auto device = copy_of(b).data.device().type();
  return amx_supports(device, at::kBFloat16, row_count(b), reduction_of(b)) ? at::kBFloat16 : at::kFloat;
}

}  // namespace

GemmResult quantized_gemm(const QuantizedOperand& a, const QuantizedOperand& b, const Epilogue& epilogue) {
  check_operands(a, b);
  check_epilogue(a, row_count(a), b, epilogue);
  const auto nominal = a.matrix.dtype;
  Epilogue e = epilogue;
  e.dtype = epilogue.result_dtype(nominal);
  const auto& data = copy_of(a).data;
  if (data.is_meta())
    return finish(at::empty({row_count(a), row_count(b)}, data.options().dtype(at::kFloat)), e, 1, nominal);
  const auto dtype = decoded_dtype(b);
  const auto left = decode_operand(a, dtype), right = decode_operand(b, dtype);
  if (left.block_scales.defined())
    return finish(sum_scaled_blocks(left, right, a.matrix.quantization.block), e, 1, nominal);
  const auto factor = factor_of_products(a, b);
  auto first = before_activation(e, nominal);
  first.scale *= factor;
  if (first.dtype == at::kDouble || !is_normal_float(first.scale) ||
      left.values.scalar_type() != right.values.scalar_type() ||
      gemm_tier(left.values, transposed(right.values), first) != Tier::amx)
    return finish(float32_product(left.values, right.values), e, factor, nominal);
  return after_gemm(gemm(left.values, transposed(right.values), first).out, e, nominal);
}

bool multiplies_in_chunks(const Quantization& quantization) {
  return !has_block_scales(quantization) && !(quantization.block > 0 && quantization.two_dimensional) &&
         !quantization.row_scaled;
}

GemmResult quantized_gemm(const QuantizedRowChunks& a, const QuantizedOperand& b, const Epilogue& epilogue) {
  const QuantizedOperand first{a.list.at(0).matrix};
  const auto nominal = first.matrix.dtype;
  check_operands(first, b);
  check_epilogue(first, a.rows, b, epilogue);
  TORCH_INTERNAL_ASSERT(multiplies_in_chunks(first.matrix.quantization));
  Epilogue e = epilogue;
  e.dtype = epilogue.result_dtype(nominal);
  const auto right = decode_operand(b, decoded_dtype(b));
  if (a.progress) a.progress();
  const DecodedRows rows(a, right.values.scalar_type());
  const auto factor = factor_of_products(first, b);
  const auto w = transposed(right.values);
  auto first_part = before_activation(e, nominal);
  first_part.scale *= factor;
  const bool on_amx = !first_part.addend.defined() && !first_part.out.defined() && first_part.dtype != at::kDouble &&
                      is_normal_float(first_part.scale) &&
                      gemm_tier(rows.chunks().list.front().a, w, first_part) == Tier::amx;
  const auto y = gemm(rows.chunks(), w, on_amx ? first_part : Epilogue{.dtype = at::kFloat}).out;
  for (const int chunk : rows.not_representable()) {
    const auto& [matrix, row] = a.list[chunk];
    y.narrow(0, row, matrix.rows)
        .copy_(on_amx ? quantized_gemm({matrix}, b, before_activation(e, nominal)).out
                      : float32_product(decode_operand({matrix}, at::kFloat).values, right.values));
  }
  return on_amx ? after_gemm(y, e, nominal) : finish(y, e, factor, nominal);
}

}  // namespace weft::kernels
