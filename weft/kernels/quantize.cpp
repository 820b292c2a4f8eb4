#include "weft/kernels/quantize.h"

#include <ATen/ops/empty.h>

#include <limits>

#include "weft/kernels/cpu/blocking.h"
#include "weft/kernels/cpu/quantize_loops.h"
#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/quantize_math.h"
#include "weft/kernels/quantize_tiers.h"

namespace weft::kernels {

void check_options(const Quantization& how) {
  const bool two_level = how.scale_format == ScaleFormat::e4m3, float32 = how.scale_format == ScaleFormat::float32;
  TORCH_CHECK_VALUE(two_level == (how.format == Format::e2m1),
                    "quantize: E4M3 scales and E2M1 values are supported together only.");
  const auto block = how.block;
  const bool is_block_size = two_level ? block == 16 : float32 ? block == 0 || block == 128 : block == 32;
  TORCH_CHECK_VALUE(is_block_size,
                    "quantize: expected blocks of 16 values with E4M3 scales, of 32 with E8M0 scales, of 128 or 0 ",
                    "(the whole tensor) with float32 scales, got ", block, ".");
  TORCH_CHECK_VALUE(!how.two_dimensional || block > 0, "quantize: two_dimensional requires blocks.");
  TORCH_CHECK_VALUE(float32 || (!how.power_of_two && how.epsilon == 0),
                    "quantize: power_of_2_scales and amax_epsilon require float32 scales.");
  TORCH_CHECK_VALUE(how.epsilon >= 0 && how.epsilon <= FLT_MAX, "quantize: amax_epsilon is ", how.epsilon,
                    ", expected 0 or more.");
  const bool four_over_six = how.four_over_six != FourOverSix::none, smaller_bound = how.scale_bound != 448;
  TORCH_CHECK_VALUE(two_level || !(how.row_scaled || how.hadamard || how.stochastic_rounding || four_over_six),
                    "quantize: row_scaled, random_hadamard_transform, stochastic_rounding and four_over_six require "
                    "E2M1 values.");
  TORCH_CHECK_VALUE(!smaller_bound || (four_over_six && how.scale_bound == 256),
                    "quantize: four_over_six_e4m3_use_256 requires four_over_six.");
  TORCH_CHECK_VALUE(!four_over_six || !(how.hadamard || how.stochastic_rounding),
                    "quantize: four_over_six excludes random_hadamard_transform and stochastic_rounding.");
  TORCH_CHECK_VALUE(!how.two_dimensional || !(how.hadamard || how.stochastic_rounding || how.row_scaled),
                    "quantize: random_hadamard_transform, stochastic_rounding and row_scaled require one-dimensional "
                    "blocks.");
  TORCH_CHECK_VALUE(!how.row_scaled || !(how.hadamard || how.stochastic_rounding),
                    "quantize: row_scaled excludes random_hadamard_transform and stochastic_rounding.");
}

float max_of(at::ScalarType dtype) {
  if (dtype == at::kHalf) return std::numeric_limits<at::Half>::max();
  return dtype == at::kBFloat16 ? static_cast<float>(std::numeric_limits<at::BFloat16>::max()) : FLT_MAX;
}

CopySizes<int64_t> sizes_of(const QuantizedMatrix& q, bool columnwise) {
  return {q.quantization, q.rows, q.columns, columnwise};
}

void check_hadamard(const at::Tensor& x) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kBFloat16, "quantize: random_hadamard_transform requires bfloat16, got ",
                   x.scalar_type(), ". Convert the tensors, or disable the transform.");
  TORCH_CHECK_VALUE(x.size(0) % 16 == 0, "quantize: random_hadamard_transform requires a multiple of 16 rows, got ",
                    x.size(0), ". Add rows of zeros, or disable the transform.");
}

namespace {

/// The views of a copy.
QuantizedCopy views_of(const Quantization& how, const CopySizes<int64_t>& n, const at::Tensor& bytes) {
  const auto words = bytes.view(at::kFloat);
  const auto view = [](const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
    return t.as_strided(sizes, strides, t.storage_offset() + offset);
  };
  const bool float32 = how.scale_format == ScaleFormat::float32;
  const auto scale_sizes = how.block == 0 ? std::vector<int64_t>{1} : std::vector{n.scale_rows, n.scale_columns};
  const auto scale_strides = how.block == 0 ? std::vector<int64_t>{1} : std::vector{n.scale_columns, int64_t{1}};
  QuantizedCopy copy{
      .bytes = bytes,
      .data = view(bytes, {n.rows, n.row_bytes}, {n.row_bytes, 1}, n.data_offset()),
      .scales = view(float32 ? words : bytes, scale_sizes, scale_strides, n.scales_offset() / n.scale_bytes),
      .amax = {}};
  if (how.has_amax()) copy.amax = view(words, {n.amax}, {1}, 0);
  return copy;
}

}  // namespace

QuantizedCopy allocate_copy(const QuantizedMatrix& q, bool columnwise, const at::TensorOptions& options) {
  const auto sizes = sizes_of(q, columnwise);
  return views_of(q.quantization, sizes, at::empty({sizes.bytes()}, options.dtype(at::kByte)));
}

QuantizedMatrix matrix_of_copy(const Quantization& quantization, at::ScalarType dtype, int64_t rows, int64_t columns,
                               bool columnwise, const at::Tensor& bytes) {
  QuantizedMatrix q{.quantization = quantization, .dtype = dtype, .rows = rows, .columns = columns};
  const auto sizes = sizes_of(q, columnwise);
  TORCH_CHECK_VALUE(bytes.scalar_type() == at::kByte && bytes.is_contiguous() && bytes.dim() == 1 &&
                        bytes.size(0) == sizes.bytes() && bytes.storage_offset() % 4 == 0,
                    "quantize: a ", columnwise ? "columnwise" : "rowwise", " copy of ", rows, " x ", columns,
                    " values consists of ", sizes.bytes(), " contiguous bytes at a multiple of 4, got ",
                    bytes.scalar_type(), " of shape ", bytes.sizes(), ".");
  (columnwise ? q.columnwise : q.rowwise) = views_of(quantization, sizes, bytes);
  return q;
}

const QuantizedCopy& require_copy(const char* who, const QuantizedMatrix& q, bool columnwise) {
  const auto& copy = columnwise ? q.columnwise : q.rowwise;
  const auto* const name = columnwise ? "columnwise" : "rowwise";
  TORCH_CHECK_VALUE(copy.defined(), who, ": the matrix has no ", name, " copy. Quantize it with ", name, "=True.");
  const auto& memory = copy.bytes.defined() ? copy.bytes : copy.data;
  TORCH_CHECK_VALUE(static_cast<int64_t>(memory.storage().nbytes()) >= memory.storage_offset() + memory.numel(), who,
                    ": the memory of the ", name, " copy was resized.");
  return copy;
}

namespace {

/// Checks a tensor that the caller gives instead of a computed one.
void check_given(const char* name, const at::Tensor& given, const at::Tensor& x, int64_t expected, bool is_used) {
  if (!given.defined()) return;
  TORCH_CHECK_VALUE(is_used, "quantize: ", name, " is not used by this quantizer and these copies; omit it.");
  TORCH_CHECK_VALUE(given.scalar_type() == at::kFloat && given.numel() == expected && given.is_contiguous() &&
                        given.device() == x.device(),
                    "quantize: ", name, " must be contiguous, float32, on ", x.device(), " and have ", expected,
                    " element(s), got ", given.scalar_type(), " of shape ", given.sizes(), " on ", given.device(), ".");
}

void check_arguments(const at::Tensor& x, const Quantization& how, const QuantizeArgs& args) {
  check_options(how);
  const auto dtype = x.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf,
                   "quantize: expected float32, bfloat16 or float16, got ", dtype, ".");
  TORCH_CHECK_VALUE(x.dim() == 2, "quantize: expected a matrix, got shape ", x.sizes(),
                    ". Flatten the leading dimensions: x.flatten(0, -2).");
  TORCH_CHECK_VALUE(args.rowwise || args.columnwise, "quantize: request a rowwise or a columnwise copy.");
  TORCH_CHECK_VALUE(!how.row_scaled || !args.columnwise, "quantize: row_scaled excludes a columnwise copy.");
  const bool transforms = how.hadamard && args.columnwise;
  if (transforms) {
    check_hadamard(x);
  }
  check_given("amax", args.amax, x, how.row_scaled ? x.size(0) : 1, how.has_amax() && (args.rowwise || !how.hadamard));
  check_given("transformed_amax", args.transformed_amax, x, 1, transforms);
  check_given("scale", args.scale, x, 1, how.block == 0);
  TORCH_CHECK_VALUE(args.random.offset >> 63 == 0, "quantize: offset is ", args.random.offset,
                    ", expected below 2^63.");
}

CopyPointers pointers(const QuantizedCopy& copy) {
  if (!copy.defined()) return {};
  const bool float32 = copy.scales.scalar_type() == at::kFloat;
  return {.data = copy.data.mutable_data_ptr<uint8_t>(),
          .ld = copy.data.size(1),
          .float32_scales = float32 ? copy.scales.mutable_data_ptr<float>() : nullptr,
          .scale_codes = float32 ? nullptr : copy.scales.mutable_data_ptr<uint8_t>(),
          .scales_ld = copy.scales.dim() == 2 && copy.scales.size(0) > 1 ? copy.scales.stride(0) : copy.scales.size(-1),
          .amax = copy.amax.defined() ? copy.amax.const_data_ptr<float>() : nullptr};
}

/// One scale per tensor: stores its inverse and returns it.
float tensor_scale(const Quantization& how, const at::Tensor& given, const at::Tensor& amax,
                   const at::Tensor& inverse) {
  const float scale = given.defined() ? *given.const_data_ptr<float>()
                                      : float32_scale(*amax.const_data_ptr<float>(), traits_of(how.format).max,
                                                      how.epsilon, FLT_MAX, how.power_of_two);
  *inverse.mutable_data_ptr<float>() = 1 / scale;
  return scale;
}

constexpr int64_t kWideRegion = 32 * kQuantizeRegion;  // columns

void vector_quantize(Tier tier, const at::Tensor& x, const QuantizeArgs& args, const QuantizedMatrix& q) {
  const auto m = contiguous(x);
  QuantizeCall call{.how = q.quantization,
                    .dtype = q.dtype,
                    .x = m.const_data_ptr(),
                    .rows = q.rows,
                    .columns = q.columns,
                    .scale_limit = max_of(q.dtype),
                    .rowwise = pointers(q.rowwise),
                    .columnwise = pointers(q.columnwise),
                    .random = args.random};
  if (q.quantization.block == 0) {
    const auto& copy = q.rowwise.defined() ? q.rowwise : q.columnwise;
    call.scale = tensor_scale(q.quantization, args.scale, copy.amax, copy.scales);
    if (q.columnwise.defined()) q.columnwise.scales.copy_(copy.scales);
  }
  if (!q.columnwise.defined() && !q.quantization.two_dimensional) {  // along rows, as they lie in memory
    call.region_columns = kWideRegion;
    call.region_rows = std::clamp<int64_t>(kWideRegion / std::max<int64_t>(q.columns, 1), 1, kQuantizeRegion);
  }
  const auto across = ceil_div(q.columns, call.region_columns);
  parallel_rows(across * ceil_div(q.rows, call.region_rows), call.region_rows * call.region_columns,
                [&](int64_t begin, int64_t end) {
                  for (auto i = begin; i < end; ++i)
                    quantize_loops(tier).quantize(call, i / across * call.region_rows,
                                                  i % across * call.region_columns);
                });
}

}  // namespace

at::Tensor quantization_amax(const at::Tensor& x, const Quantization& how, bool transformed) {
  const auto values = transformed && how.hadamard ? hadamard_transform(x) : x;
  const auto tier = vector_tier(values);
  if (tier == Tier::ref) return ref::quantization_amax(values, how.row_scaled);
  const auto m = contiguous(values);
  const auto rows = how.row_scaled ? m.size(0) : int64_t{1}, columns = m.numel() / std::max<int64_t>(rows, 1);
  auto amax = new_zeros_f32(m, rows);
  const auto* const data = static_cast<const char*>(m.const_data_ptr());
  auto* const out = amax.mutable_data_ptr<float>();
  const auto run = [&](int64_t begin, int64_t count) {
    return quantize_loops(tier).amax(m.scalar_type(), data + begin * m.element_size(), count);
  };
  if (how.row_scaled) {
    parallel_rows(rows, columns, [&](int64_t begin, int64_t end) {
      for (auto row = begin; row < end; ++row) out[row] = run(row * columns, columns);
    });
  } else {
    *out = at::parallel_reduce(
        int64_t{0}, columns, kGrain, 0.F,
        [&](int64_t begin, int64_t end, float largest) { return std::max(largest, run(begin, end - begin)); },
        [](float a, float b) { return std::max(a, b); });
  }
  return amax;
}

at::Tensor hadamard_transform(const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.scalar_type() == at::kBFloat16 && x.size(0) % 16 == 0,
                    "hadamard_transform: expected a bfloat16 matrix with a multiple of 16 rows, got ", x.scalar_type(),
                    " of shape ", x.sizes(), ".");
  const auto tier = vector_tier(x);
  if (tier == Tier::ref) return ref::hadamard_transform(x);
  const auto m = contiguous(x);
  auto out = new_empty(m, m.sizes(), at::kBFloat16);
  parallel_rows(m.size(0) / 16, 16 * m.size(1), [&](int64_t begin, int64_t end) {
    quantize_loops(tier).hadamard(m.const_data_ptr(), out.mutable_data_ptr(), m.size(1), begin * 16, end * 16);
  });
  return out;
}

namespace {

/// Fills the copies of `q` from x, after `check_arguments`.
void fill_copies(const at::Tensor& x, const QuantizeArgs& args, const QuantizedMatrix& q) {
  const auto& how = q.quantization;
  const auto amax_of = [&](bool transformed) {
    const auto& given = transformed ? args.transformed_amax : args.amax;
    return given.defined() ? given : quantization_amax(x, how, transformed);
  };
  if (how.has_amax()) {
    const bool transforms = how.hadamard && args.columnwise;
    at::Tensor amax;
    if (args.rowwise || !transforms) amax = amax_of(false);
    if (args.rowwise) q.rowwise.amax.copy_(amax.reshape(-1));
    if (args.columnwise) q.columnwise.amax.copy_((transforms ? amax_of(true) : amax).reshape(-1));
  }
  const auto tier = vector_tier(x, args.scale, q.rowwise.amax, q.columnwise.amax);
  if (tier == Tier::ref) {
    ref::quantize(x, args, q);
  } else {
    vector_quantize(tier, x, args, q);
  }
}

/// Raises unless the loops can write the scales and the data of a copy.
void check_destination(const QuantizedMatrix& q, bool columnwise) {
  const auto sizes = sizes_of(q, columnwise);
  const auto& copy = columnwise ? q.columnwise : q.rowwise;
  const bool has_codes =
      copy.data.is_contiguous() && copy.data.sizes() == at::IntArrayRef({sizes.rows, sizes.row_bytes});
  const bool has_scales =
      copy.scales.numel() == sizes.scale_rows * sizes.scale_columns &&
      (copy.scales.dim() == 1 || copy.scales.numel() == 0 || copy.scales.size(1) == 1 || copy.scales.stride(1) == 1);
  const bool has_amax = !q.quantization.has_amax() ||
                        (copy.amax.defined() && copy.amax.is_contiguous() && copy.amax.numel() == sizes.amax);
  TORCH_CHECK_VALUE(has_codes && has_scales && has_amax, "quantize: a ", columnwise ? "columnwise" : "rowwise",
                    " copy of ", q.rows, " x ", q.columns, " values has ", sizes.rows, " x ", sizes.row_bytes,
                    " bytes, ", sizes.scale_rows, " x ", sizes.scale_columns, " scales and ", sizes.amax,
                    " maxima, got data of shape ", copy.data.sizes(), " and scales of shape ", copy.scales.sizes(),
                    ".");
}

}  // namespace

QuantizedMatrix quantize(const at::Tensor& x, const Quantization& how, const QuantizeArgs& args) {
  check_arguments(x, how, args);
  QuantizedMatrix q{.quantization = how, .dtype = x.scalar_type(), .rows = x.size(0), .columns = x.size(1)};
  if (args.rowwise) q.rowwise = allocate_copy(q, false, x.options());
  if (args.columnwise) q.columnwise = allocate_copy(q, true, x.options());
  fill_copies(x, args, q);
  return q;
}

void quantize_into(const at::Tensor& x, QuantizeArgs args, const QuantizedMatrix& q) {
  args.rowwise = q.rowwise.defined();
  args.columnwise = q.columnwise.defined();
  check_arguments(x, q.quantization, args);
  TORCH_CHECK_VALUE(x.size(0) == q.rows && x.size(1) == q.columns, "quantize: x has shape ", x.sizes(), ", expected ",
                    q.rows, " x ", q.columns, ", the sizes of the quantized matrix.");
  if (args.rowwise) check_destination(q, false);
  if (args.columnwise) check_destination(q, true);
  fill_copies(x, args, q);
}

at::Tensor decode_copy(const QuantizedMatrix& q, bool columnwise, Decoding decoding, at::ScalarType dtype,
                       at::Tensor out) {
  const auto& copy = require_copy("dequantize", q, columnwise);
  const auto tier = is_plain_strided(copy.data) ? vector_tier(copy.data.device().type(), dtype) : Tier::ref;
  const auto l = sizes_of(q, columnwise);
  TORCH_INTERNAL_ASSERT(!out.defined() || (out.is_contiguous() && out.sizes() == at::IntArrayRef({l.rows, l.columns}) &&
                                           out.scalar_type() == dtype));
  if (tier == Tier::ref) {
    const auto values = ref::decode_copy(q, columnwise, decoding);
    return out.defined() ? out.copy_(values) : values.to(dtype);
  }
  if (!out.defined()) out = new_empty(copy.data, {l.rows, l.columns}, dtype);
  const DequantizeCall call{.how = q.quantization,
                            .copy = pointers(copy),
                            .columns = l.columns,
                            .block_rows = l.block_rows > 0 ? l.block_rows : std::max<int64_t>(l.rows, 1),
                            .block_columns = l.block_columns > 0 ? l.block_columns : std::max<int64_t>(l.columns, 1),
                            .decoding = decoding,
                            .dtype = dtype,
                            .out = out.mutable_data_ptr()};
  parallel_rows(l.rows, l.columns,
                [&](int64_t begin, int64_t end) { quantize_loops(tier).dequantize(call, begin, end); });
  return out;
}

at::Tensor dequantize(const QuantizedMatrix& q, bool columnwise, at::ScalarType dtype) {
  const bool transformed = columnwise && q.quantization.hadamard;
  auto out = decode_copy(q, columnwise, Decoding::values, transformed ? at::kFloat : dtype);
  if (transformed) out = ref::inverse_hadamard_transform(out).to(dtype);
  return columnwise && !q.quantization.columns_in_place() ? out.t().contiguous() : out;
}

}  // namespace weft::kernels
