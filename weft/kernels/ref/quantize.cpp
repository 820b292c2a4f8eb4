#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "weft/kernels/quantize_math.h"
#include "weft/kernels/quantize_tiers.h"

// The formulas of quantize_math.h, one ATen call per rounding. A matrix is seen as [blocks down, rows of a block,
// blocks across, columns of a block], padded with zeros.

namespace weft::kernels::ref {
namespace {

at::Tensor bits(const at::Tensor& x) { return x.contiguous().view(at::kInt); }
at::Tensor floats(const at::Tensor& bits) { return bits.contiguous().view(at::kFloat); }
/// x / divisor; with a number as divisor, some devices multiply by its inverse.
at::Tensor divide(const at::Tensor& x, float divisor) { return x.div(at::full_like(x, divisor)); }
at::Tensor magnitude(const at::Tensor& x) { return at::where(at::isnan(x), 0.F, x.abs()); }

at::Tensor encode_values(const at::Tensor& x, Format format) {
  const auto t = traits_of(format);
  const int shift = 23 - t.mantissa_bits;
  const float magic = power_of_two(24 - t.bias - t.mantissa_bits);
  const auto b = bits(x), size = b.bitwise_and(kMagnitudeBits);
  const auto clamped = size.clamp_max(std::bit_cast<int32_t>(t.max));
  const auto subnormal = bits(floats(clamped) + magic) - std::bit_cast<int32_t>(magic);
  const auto half_ulp = clamped.bitwise_right_shift(shift).bitwise_and(1) + ((1 << (shift - 1)) - 1);
  const auto normal = (clamped + half_ulp).bitwise_right_shift(shift) - ((127 - t.bias) << t.mantissa_bits);
  const auto code = at::where(clamped < ((128 - t.bias) << 23), subnormal, normal);
  const auto sign = b.bitwise_right_shift(31 - t.sign_bit).bitwise_and(1 << t.sign_bit);
  return at::where(size > kInfinityBits, at::full_like(code, t.nan), code.bitwise_or(sign));
}

at::Tensor decode_values(const at::Tensor& code, Format format) {
  const auto t = traits_of(format);
  const int shift = 23 - t.mantissa_bits;
  const auto size = code.bitwise_and((1 << t.sign_bit) - 1);
  const auto subnormal = size.to(at::kFloat) * power_of_two(1 - t.bias - t.mantissa_bits);
  auto b = (size + ((127 - t.bias) << t.mantissa_bits)).bitwise_left_shift(shift);
  b = at::where(size < (1 << t.mantissa_bits), bits(subnormal), b);
  if (format == Format::e4m3) b = at::where(size == 0x7f, at::full_like(b, kInfinityBits | 0x400000), b);
  if (format == Format::e5m2)
    b = at::where(size >= 0x7c, size.bitwise_and(3).bitwise_left_shift(shift).bitwise_or(kInfinityBits), b);
  const auto negative = code.bitwise_and(1 << t.sign_bit) != 0;
  return at::where(negative, -floats(b), floats(b));
}

at::Tensor encode_stochastic_values(const at::Tensor& x, const at::Tensor& u) {
  const auto b = bits(x), size = b.bitwise_and(kMagnitudeBits);
  const auto a = floats(size.clamp_max(std::bit_cast<int32_t>(6.F)));
  const auto step =
      at::where(a < 2, at::full_like(a, 0.5F), at::where(a < 4, at::full_like(a, 1), at::full_like(a, 2)));
  const auto t = (a + u * step).clamp_max(6);
  const auto normal = bits(t).bitwise_right_shift(22) - (126 << 1);
  const auto code = at::where(t < 1, (t >= 0.5).to(at::kInt), normal);
  const auto sign = b.bitwise_right_shift(28).bitwise_and(8);
  return at::where(size > kInfinityBits, at::full_like(code, 7), code.bitwise_or(sign));
}

at::Tensor decode_e8m0_codes(const at::Tensor& code) {
  const auto b = at::where(code == 0, at::full_like(code, 0x400000), code.bitwise_left_shift(23));
  return floats(at::where(code == 255, at::full_like(code, kInfinityBits | 0x400000), b));
}

/// Uniform numbers of `rows` × `columns` positions of a copy; the same as those of the vector tiers.
at::Tensor uniforms(const RandomStream& random, bool columnwise, int64_t rows, int64_t columns,
                    const at::TensorOptions& options) {
  constexpr int64_t kMask = 0xffffffff;
  const auto i = at::arange(rows, options.dtype(at::kLong)).unsqueeze(1);  // of the matrix, also columnwise
  const auto j = at::arange(columns, options.dtype(at::kLong)).unsqueeze(0);
  const auto zero = i * 0 + j * 0;
  const auto number = columnwise ? zero + i % 8 : zero + j.div(16, "floor") % 8;  // of eight per counter
  at::Tensor c[4] = {columnwise ? zero + j : zero + j.div(128, "floor") * 16 + j % 16,
                     columnwise ? zero + i.div(8, "floor") : zero + i,
                     zero + static_cast<int64_t>(random.offset & kMask),
                     zero + static_cast<int64_t>((random.offset >> 32) | (columnwise ? 1U << 31 : 0))};
  uint32_t k0 = static_cast<uint32_t>(random.seed), k1 = static_cast<uint32_t>(random.seed >> 32);
  const auto high = [&](const at::Tensor& product) { return product.bitwise_right_shift(32).bitwise_and(kMask); };
  for (int round = 0; round < 10; ++round, k0 += 0x9e3779b9, k1 += 0xbb67ae85) {
    const auto p0 = c[0] * int64_t{0xd2511f53}, p1 = c[2] * int64_t{0xcd9e8d57};
    const auto next0 = high(p1).bitwise_xor(c[1]).bitwise_xor(static_cast<int64_t>(k0));
    const auto next2 = high(p0).bitwise_xor(c[3]).bitwise_xor(static_cast<int64_t>(k1));
    c[0] = next0, c[1] = p1.bitwise_and(kMask), c[2] = next2, c[3] = p0.bitwise_and(kMask);
  }
  const auto words = at::stack({c[0], c[1], c[2], c[3]});
  const auto word = words.gather(0, number.div(2, "floor").unsqueeze(0)).squeeze(0);
  const auto half = word.bitwise_right_shift(number % 2 * 16).bitwise_and(0xffff);
  return (half.to(at::kFloat) + 0.5F) * power_of_two(-16);
}

/// [M, K] as [down, block_rows, across, block_columns].
at::Tensor split_blocks(const at::Tensor& x, int64_t block_rows, int64_t block_columns) {
  const auto missing = [](int64_t extent, int64_t block) { return (block - extent % block) % block; };
  const auto padded = at::constant_pad_nd(x, {0, missing(x.size(1), block_columns), 0, missing(x.size(0), block_rows)});
  return padded.reshape({padded.size(0) / block_rows, block_rows, padded.size(1) / block_columns, block_columns});
}
at::Tensor join_blocks(const at::Tensor& blocks, int64_t rows, int64_t columns) {
  return blocks.reshape({blocks.size(0) * blocks.size(1), blocks.size(2) * blocks.size(3)})
      .slice(0, 0, rows)
      .slice(1, 0, columns);
}
at::Tensor pack_pairs(const at::Tensor& codes) {
  const auto pairs = split_blocks(codes, 1, 2);
  return pairs.select(3, 0).bitwise_or(pairs.select(3, 1).bitwise_left_shift(4)).squeeze(1);
}
at::Tensor unpack_pairs(const at::Tensor& packed, int64_t columns) {
  return at::stack({packed.bitwise_and(15), packed.bitwise_right_shift(4)}, 2).flatten(1).slice(1, 0, columns);
}

struct Scales {
  at::Tensor factor, stored;  // of the values; inverses or codes. [down, 1, across, 1]
};

at::Tensor float32_scales(const at::Tensor& amax, float max, float epsilon, float limit, bool power_of_two) {
  const auto raised = amax.clamp_min(epsilon);
  auto scale = at::full_like(raised, max).div(raised);
  scale = at::where(scale > FLT_MAX, at::full_like(scale, limit), scale);
  if (power_of_two) scale = floats(bits(scale).bitwise_and(kInfinityBits));
  const auto usable = (raised > 0).logical_and(raised <= FLT_MAX);
  return at::where(usable, scale, at::full_like(scale, 1));
}

/// S of a two-level scale.
at::Tensor tensor_scales(const at::Tensor& amax, float bound) {
  const auto scale = at::full_like(amax, 6 * bound).div(amax).clamp_max(FLT_MAX);
  return at::where((amax == 0).logical_or(scale == 0), at::full_like(scale, 1), scale);
}
at::Tensor e4m3_factors(const at::Tensor& codes, const at::Tensor& tensor_scale) {
  return at::reciprocal(decode_values(codes, Format::e4m3) * at::reciprocal(tensor_scale)).clamp_max(FLT_MAX);
}

/// The errors of all blocks with the E4M3 scales of a candidate.
at::Tensor candidate_errors(const at::Tensor& blocks, const at::Tensor& codes, const at::Tensor& factor,
                            const at::Tensor& amax, const Quantization& how) {
  const auto values = decode_values(encode_values(blocks * factor, Format::e2m1), Format::e2m1);
  const auto d = divide(values * decode_values(codes, Format::e4m3) * amax, 6 * how.scale_bound) - blocks;
  const auto errors = how.four_over_six == FourOverSix::squared ? d * d : d.abs();
  auto sum = at::zeros_like(errors.select(3, 0));
  for (int64_t i = 0; i < errors.size(3); ++i) sum = sum + errors.select(3, i);
  for (auto half = sum.size(1) / 2; half > 0; half /= 2) sum = sum.slice(1, 0, half) + sum.slice(1, half, 2 * half);
  return sum.unsqueeze(3);
}

/// The scales of blocks [down, rows, across, columns]; `amax`: of the tensor or of its rows.
Scales block_scales(const at::Tensor& blocks, const Quantization& how, const at::Tensor& amax, float limit) {
  const auto largest = magnitude(blocks).amax({1, 3}, /*keepdim=*/true);
  const float max = traits_of(how.format).max;
  if (how.scale_format == ScaleFormat::float32) {
    const auto scale = float32_scales(largest, max, how.epsilon, limit, how.power_of_two);
    return {scale, at::reciprocal(scale)};
  }
  if (how.scale_format == ScaleFormat::e8m0) {
    const auto b = bits(largest * (1.F / max));
    const auto rounds_up = (b.bitwise_and(0x7fffff) != 0).to(at::kInt);
    const auto code = at::where(b <= 0x400000, at::zeros_like(b), b.bitwise_right_shift(23) + rounds_up).clamp_max(254);
    return {decode_e8m0_codes(254 - code), code};
  }
  const auto tensor_amax = amax.reshape({-1, 1, 1, 1}), tensor_scale = tensor_scales(tensor_amax, how.scale_bound);
  if (how.four_over_six == FourOverSix::none) {
    const auto codes = encode_values(largest * (tensor_scale * (1.F / 6)), Format::e4m3);
    return {e4m3_factors(codes, tensor_scale), codes};
  }
  const auto base = divide(largest, 6) * tensor_scale;
  const auto six = encode_values(base.clamp_max(448), Format::e4m3),
             four = encode_values((base * 1.5F).clamp_max(448), Format::e4m3);
  const auto factor6 = e4m3_factors(six, tensor_scale), factor4 = e4m3_factors(four, tensor_scale);
  const auto to_four = candidate_errors(blocks, four, factor4, tensor_amax, how) <
                       candidate_errors(blocks, six, factor6, tensor_amax, how);
  return {at::where(to_four, factor4, factor6), at::where(to_four, four, six)};
}

/// Quantizes the rows of x, float32, into `copy`. `u`: undefined, or the uniform numbers of stochastic rounding.
void quantize_rows(const at::Tensor& x, const Quantization& how, const at::Tensor& u, float limit,
                   const QuantizedCopy& copy) {
  const auto block_rows = how.two_dimensional ? how.block : int64_t{1};
  const auto blocks = split_blocks(x, block_rows, how.block);
  const auto scales = block_scales(blocks, how, copy.amax, limit);
  const auto scaled = join_blocks(blocks * scales.factor, x.size(0), x.size(1)).contiguous();
  const auto codes = u.defined() ? encode_stochastic_values(scaled, u) : encode_values(scaled, how.format);
  copy.data.copy_(how.format == Format::e2m1 ? pack_pairs(codes) : codes);
  copy.scales.copy_(scales.stored.squeeze(3).squeeze(1));
}

/// One scale for the tensor.
void quantize_tensor(const at::Tensor& x, const QuantizeArgs& args, const QuantizedMatrix& q) {
  const auto& how = q.quantization;
  const auto& amax = q.rowwise.defined() ? q.rowwise.amax : q.columnwise.amax;
  const auto scale = args.scale.defined()
                         ? args.scale
                         : float32_scales(amax, traits_of(how.format).max, how.epsilon, FLT_MAX, how.power_of_two);
  const auto codes = encode_values(x * scale, how.format);
  for (const auto* copy : {&q.rowwise, &q.columnwise}) {
    if (!copy->defined()) continue;
    copy->scales.copy_(at::reciprocal(scale));
    copy->data.copy_(copy == &q.columnwise ? codes.t() : codes);
  }
}

/// The columnwise copy of two-dimensional blocks: the same codes and scales, transposed.
void transpose_copy(const QuantizedMatrix& q, const QuantizedCopy& rowwise) {
  const bool in_place = q.quantization.columns_in_place();
  q.columnwise.scales.copy_(in_place ? rowwise.scales : rowwise.scales.t());
  if (q.quantization.format == Format::e2m1) {
    q.columnwise.data.copy_(pack_pairs(unpack_pairs(rowwise.data.to(at::kInt), q.columns).t()));
  } else {
    q.columnwise.data.copy_(in_place ? rowwise.data : rowwise.data.t());
  }
}

/// diag(s) H/4: H is Sylvester's matrix of order 16.
at::Tensor hadamard_matrix(const at::TensorOptions& options) {
  std::vector<float> values;
  for (uint32_t r = 0; r < 16; ++r)
    for (uint32_t c = 0; c < 16; ++c)
      values.push_back((std::popcount(r & c) + ((kHadamardSigns >> r) & 1)) % 2 ? -0.25F : 0.25F);
  return at::tensor(values).reshape({16, 16}).to(options.device());
}

}  // namespace

void quantize(const at::Tensor& x, const QuantizeArgs& args, const QuantizedMatrix& q) {
  const auto& how = q.quantization;
  const auto values = x.to(at::kFloat).contiguous();
  if (how.block == 0) return quantize_tensor(values, args, q);
  const auto random = [&](bool columnwise) {
    return how.stochastic_rounding ? uniforms(args.random, columnwise, q.rows, q.columns, x.options()) : at::Tensor();
  };
  const auto limit = max_of(q.dtype);
  auto rowwise = q.rowwise;
  if (!rowwise.defined() && how.two_dimensional) {
    rowwise = allocate_copy(q, /*columnwise=*/false, x.options());
    if (how.has_amax()) rowwise.amax.copy_(q.columnwise.amax);
  }
  if (rowwise.defined()) quantize_rows(values, how, random(false), limit, rowwise);
  if (!q.columnwise.defined()) return;
  if (how.two_dimensional) return transpose_copy(q, rowwise);
  const auto transformed = how.hadamard ? hadamard_transform(x).to(at::kFloat) : values;
  const auto u = random(true);
  auto to = q.columnwise;  // transposed, unless it is stored in place
  if (how.columns_in_place()) to.data = to.data.t(), to.scales = to.scales.t();
  quantize_rows(transformed.t().contiguous(), how, u.defined() ? u.t().contiguous() : u, limit, to);
}

at::Tensor quantization_amax(const at::Tensor& x, bool of_rows) {
  const auto values = magnitude(x.to(at::kFloat));
  if (values.numel() == 0) return at::zeros({of_rows ? x.size(0) : 1}, values.options());
  return of_rows ? values.amax(1) : values.amax().reshape({1});
}

at::Tensor hadamard_transform(const at::Tensor& x) {
  auto y = x.to(at::kFloat).reshape({x.size(0) / 16, 16, x.size(1)}).unbind(1);
  hadamard_sums(y.data());
  return (at::stack(y, 1) * 0.25F).reshape(x.sizes()).to(at::kBFloat16);
}

at::Tensor inverse_hadamard_transform(const at::Tensor& y) {
  const auto groups = y.to(at::kFloat).reshape({y.size(0), y.size(1) / 16, 16});
  return at::matmul(groups, hadamard_matrix(y.options()).t()).reshape(y.sizes());
}

at::Tensor decode_copy(const QuantizedMatrix& q, bool columnwise, Decoding decoding) {
  const auto& how = q.quantization;
  const auto& copy = columnwise ? q.columnwise : q.rowwise;
  const auto l = sizes_of(q, columnwise);
  const auto data = copy.data.to(at::kInt);
  const auto codes = how.format == Format::e2m1 ? unpack_pairs(data, l.columns) : data;
  auto values = decode_values(codes.contiguous(), how.format);
  if (decoding == Decoding::codes) return values;
  if (how.block == 0) return values * copy.scales;
  auto factor = copy.scales;
  if (how.scale_format == ScaleFormat::e8m0) factor = decode_e8m0_codes(copy.scales.to(at::kInt));
  if (how.scale_format == ScaleFormat::e4m3) factor = decode_values(copy.scales.to(at::kInt), Format::e4m3);
  if (how.scale_format == ScaleFormat::e4m3 && decoding == Decoding::values)
    factor = factor * copy.amax.reshape({-1, 1}) * (1 / (6 * how.scale_bound));
  const auto blocks = split_blocks(values, l.block_rows, l.block_columns) * factor.unsqueeze(1).unsqueeze(3);
  return join_blocks(blocks, l.rows, l.columns);
}

}  // namespace weft::kernels::ref
