#include "weft/te/quantized_buffers.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <c10/util/accumulate.h>

#include "weft/kernels/quantize_math.h"
#include "weft/te/generator.h"
#include "weft/te/host.h"
#include "weft/te/strict.h"

namespace weft::te {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

kernels::CopySizes<int64_t> kernel_sizes(const QuantizedBuffers& b, bool columnwise) {
  return {b.how, b.rows(), b.columns(), columnwise};
}

/// Whether the buffers hold the scale of a square block once per row (of data, or column of MXFP8's columnwise copy).
bool repeats_scales(const QuantizedBuffers& b) {
  return b.how.two_dimensional && (b.layout == Layout::mxfp8 || b.layout == Layout::nvfp4);
}
bool stores_scales_transposed(const QuantizedBuffers& b) { return b.layout == Layout::block && !b.how.two_dimensional; }

/// The stored scales as a matrix; flat ones have all of their padding.
at::Tensor scale_matrix(const QuantizedBuffers& b, const at::Tensor& stored, bool columnwise) {
  return stored.dim() == 2 ? stored : stored.view(scale_sizes(b, columnwise));
}

/// The part of the stored scales that is no padding, in the layout of the kernels; a view.
at::Tensor used_scales(const QuantizedBuffers& b, const at::Tensor& stored, bool columnwise) {
  if (b.layout == Layout::per_tensor) return stored.view({1});
  auto sizes = kernel_sizes(b, columnwise);
  if (repeats_scales(b)) {
    auto one_dimensional = b.how;
    one_dimensional.two_dimensional = false;
    sizes = {one_dimensional, b.rows(), b.columns(), columnwise};
  }
  const auto matrix = scale_matrix(b, stored, columnwise);
  const auto scales = stores_scales_transposed(b) ? matrix.t() : matrix;
  return scales.narrow(0, 0, sizes.scale_rows).narrow(1, 0, sizes.scale_columns);
}

void zero_padding(const QuantizedBuffers& b, const at::Tensor& stored, bool columnwise) {
  if (b.layout == Layout::per_tensor) return;
  const auto matrix = scale_matrix(b, stored, columnwise);
  const auto used = used_scales(b, stored, columnwise);
  const bool transposed = stores_scales_transposed(b);
  for (int64_t dim = 0; dim < 2; ++dim) {
    const auto begin = used.size(transposed ? 1 - dim : dim);
    if (begin < matrix.size(dim)) matrix.narrow(dim, begin, matrix.size(dim) - begin).zero_();
  }
}

/// One copy while kernels fill it: the scales that they write, and how those get into the buffers.
class FilledCopy {
 public:
  FilledCopy(const QuantizedBuffers& b, bool columnwise) : b_(b), columnwise_(columnwise) {
    const auto& copy = b.copy(columnwise);
    const auto sizes = kernel_sizes(b, columnwise);
    stored_ = host(copy.scales);
    view_.data = host(copy.data).view(at::kByte).view({sizes.rows, sizes.row_bytes});
    view_.scales = has_own_scales() ? at::empty({sizes.scale_rows, sizes.scale_columns}, stored_.options())
                                    : used_scales(b, stored_, columnwise);
    view_.amax = copy.amax.defined() ? host(copy.amax).view(-1) : at::Tensor();
    if (b.how.has_amax() && !view_.amax.defined()) view_.amax = at::empty({sizes.amax}, at::kFloat);
  }
  const kernels::QuantizedCopy& view() const { return view_; }

  /// Moves the scales into the buffers.
  void store_scales() const {
    if (has_own_scales()) {
      auto scales = view_.scales;
      const auto used = used_scales(b_, stored_, columnwise_);
      const int64_t dim = columnwise_ && b_.how.columns_in_place() ? 1 : 0;
      if (repeats_scales(b_)) scales = scales.repeat_interleave(b_.how.block, dim).narrow(dim, 0, used.size(dim));
      used.copy_(scales);
    }
    zero_padding(b_, stored_, columnwise_);
    if (b_.swizzled) stored_.copy_(swizzled_scales(b_, columnwise_).view(stored_.sizes()));
  }

 private:
  bool has_own_scales() const { return repeats_scales(b_) || stores_scales_transposed(b_); }

  const QuantizedBuffers& b_;
  bool columnwise_;
  at::Tensor stored_;
  kernels::QuantizedCopy view_;
};

/// Calls the kernel for the copies that are requested and exist.
void run_kernel(const at::Tensor& x, const QuantizedBuffers& b, bool rowwise, bool columnwise,
                const kernels::QuantizeArgs& args) {
  kernels::QuantizedMatrix q{.quantization = b.how, .dtype = x.scalar_type(), .rows = b.rows(), .columns = b.columns()};
  std::optional<FilledCopy> copies[2];
  for (const bool is_columnwise : {false, true}) {
    if (!(is_columnwise ? columnwise : rowwise) || !b.copy(is_columnwise).data.defined()) continue;
    auto& copy = copies[is_columnwise].emplace(b, is_columnwise);
    (is_columnwise ? q.columnwise : q.rowwise) = copy.view();
  }
  if (!copies[0] && !copies[1]) return;
  const py::gil_scoped_release no_gil;
  kernels::quantize_into(x, args, q);
  for (const auto& copy : copies)
    if (copy) copy->store_scales();
}

// ---- One scale per tensor
// --------------------------------------------------------------------------------------------

void fill_per_tensor(const at::Tensor& x, const QuantizerView& quantizer, const QuantizedBuffers& b, c10::Device device,
                     const KnownAmax& known) {
  const auto amax = known.rowwise.defined() ? host(known.rowwise).view({1})
                                            : kernels::quantization_amax(x, b.how, /*transformed=*/false);
  if (quantizer.kind == QuantizerKind::delayed) {
    const auto recorded = host(quantizer.amax);  // empty if nobody asks for the maximum
    if (recorded.numel() > 0) recorded.copy_(at::maximum(recorded, amax.view(recorded.sizes())));
    const auto scale = host(quantizer.scale).reshape({1});
    return run_kernel(x, b, true, true, {.scale = scale.is_cpu() ? scale : scale.cpu(), .amax = amax});
  }
  reduce_amax(amax, quantizer.amax_group, device);
  run_kernel(x, b, true, true, {.amax = amax});
}

// ---- NVFP4
// -----------------------------------------------------------------------------------------------------------

kernels::RandomStream random_stream(c10::Device device) {
  const auto generator = host_generator(device);
  const auto seed = static_cast<uint64_t>(draw_seed(generator)), offset = static_cast<uint64_t>(draw_seed(generator));
  return {.seed = seed, .offset = offset >> 1};
}

/// x with the rows negated whose sign the kernel's Hadamard transform changes: then it changes none.
at::Tensor with_signs(const at::Tensor& x) {
  const auto row = at::arange(x.size(0), at::kLong).bitwise_and(15);
  const auto negative = at::full_like(row, int64_t{kernels::kHadamardSigns}).bitwise_right_shift(row).bitwise_and(1);
  return x * (1 - 2 * negative).to(x.scalar_type()).unsqueeze(1);
}

/// The columnwise copy with one amax per column: the rowwise one of the transposed matrix.
void fill_row_scaled_columns(const at::Tensor& x, const QuantizedBuffers& b) {
  QuantizedBuffers transposed = b;
  transposed.sizes = {b.columns(), b.rows()};
  transposed.rowwise = b.columnwise;
  transposed.columnwise = {};
  run_kernel(x.t().contiguous(), transposed, true, false, {});
}

/// The maximum magnitudes of both copies, over the ranks of the group.
KnownAmax nvfp4_amax(const at::Tensor& x, const at::Tensor& columnwise_x, const QuantizerView& quantizer,
                     const QuantizedBuffers& b, c10::Device device, const KnownAmax& known) {
  const bool transforms = b.how.hadamard && b.columnwise.data.defined();
  const auto amax_of = [&](const at::Tensor& given, const at::Tensor& values, bool transformed) {
    return given.defined() ? host(given).reshape({1}).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true)
                           : kernels::quantization_amax(values, b.how, transformed);
  };
  KnownAmax amax{amax_of(known.rowwise, x, false), {}};
  amax.columnwise = transforms || known.columnwise.defined() ? amax_of(known.columnwise, columnwise_x, transforms)
                                                             : amax.rowwise.clone();
  if (quantizer.amax_group.is_none()) return amax;
  const auto both = at::cat({amax.rowwise, amax.columnwise});
  reduce_amax(both, quantizer.amax_group, device);
  return {both.narrow(0, 0, 1).clone(), both.narrow(0, 1, 1).clone()};
}

/// What GPUs require to scale the columns, too.
void check_row_scaled_columns(const at::Tensor& x, const QuantizerView& quantizer, const QuantizedBuffers& b) {
  constexpr const char* kWho = "NVFP4Quantizer with row_scaled_nvfp4 and columnwise usage";
  require_on_gpu(x.scalar_type() == at::kBFloat16, kWho, "GPUs require bfloat16, got ", x.scalar_type(), ".");
  require_on_gpu(b.rows() % 32 == 0 && b.columns() % 32 == 0, kWho, "GPUs require multiples of 32, got ", b.rows(),
                 " rows and ", b.columns(), " columns.");
  require_on_gpu(b.how.four_over_six == kernels::FourOverSix::none, kWho, "GPUs have no kernel with 4over6.");
  require_on_gpu(quantizer.amax_group.is_none(), kWho, "GPUs share no maxima over ranks.");
}

void fill_nvfp4(const at::Tensor& x, const QuantizerView& quantizer, const QuantizedBuffers& b, c10::Device device,
                const KnownAmax& known) {
  if (b.how.row_scaled) {
    if (b.columnwise.data.defined()) check_row_scaled_columns(x, quantizer, b);
    run_kernel(x, b, true, false, {});
    if (b.columnwise.data.defined()) fill_row_scaled_columns(x, b);
    return;
  }
  const bool transforms = b.how.hadamard && b.columnwise.data.defined();
  require_on_gpu(!b.how.hadamard || x.scalar_type() == at::kBFloat16, "NVFP4Quantizer with_rht",
                 "GPUs require bfloat16, also for a rowwise copy, got ", x.scalar_type(), ".");
  if (transforms) kernels::check_hadamard(x);
  const auto columnwise_x = transforms && !quantizer.random_signs ? with_signs(x) : x;
  const auto amax = nvfp4_amax(x, columnwise_x, quantizer, b, device, known);
  const auto random = b.how.stochastic_rounding ? random_stream(device) : kernels::RandomStream{};
  // Copies that differ in more than their direction are made one by one: square blocks are not transformed.
  auto rows = b, columns = b;
  rows.how.hadamard = false;
  if (transforms) columns.how.two_dimensional = false;
  if (!transforms) {
    const bool same_amax = amax.rowwise.equal(amax.columnwise);
    if (same_amax) return run_kernel(x, rows, true, true, {.amax = amax.rowwise, .random = random});
    columns.how.hadamard = false;
    run_kernel(x, columns, false, true, {.amax = amax.columnwise, .random = random});
    return run_kernel(x, rows, true, false, {.amax = amax.rowwise, .random = random});
  }
  run_kernel(x, rows, true, false, {.amax = amax.rowwise, .random = random});
  run_kernel(columnwise_x, columns, false, true, {.transformed_amax = amax.columnwise, .random = random});
}

/// Scales with one row after the other, of a matrix of `rows` × `columns` that is swizzled in tiles of 128 × 4.
at::Tensor swizzle(const at::Tensor& scales, int64_t rows, int64_t columns) {
  return scales.reshape({rows / 128, 4, 32, columns / 4, 4}).permute({0, 3, 2, 1, 4}).contiguous();
}
at::Tensor unswizzle(const at::Tensor& scales, int64_t rows, int64_t columns) {
  return scales.reshape({rows / 128, columns / 4, 32, 4, 4}).permute({0, 3, 2, 1, 4}).reshape({rows, columns});
}

kernels::QuantizedCopy readable_copy(const QuantizedBuffers& b, bool columnwise) {
  const auto& copy = b.copy(columnwise);
  if (!copy.data.defined()) return {};
  const auto sizes = kernel_sizes(b, columnwise);
  TORCH_CHECK_VALUE(copy.scales.defined() && (b.layout != Layout::nvfp4 || copy.amax.defined()),
                    "quantized tensor: its ", columnwise ? "columnwise" : "rowwise", " data has no scales.");
  auto scales =
      used_scales(b, b.swizzled ? row_major_scales(b, columnwise) : host(copy.scales).contiguous(), columnwise);
  if (stores_scales_transposed(b)) scales = scales.contiguous();
  return {.bytes = {},
          .data = host(copy.data).contiguous().view(at::kByte).view({sizes.rows, sizes.row_bytes}),
          .scales = scales,
          .amax = copy.amax.defined() ? host(copy.amax).contiguous().view(-1) : at::Tensor()};
}

}  // namespace

int64_t QuantizedBuffers::columns() const { return sizes.empty() ? 1 : sizes.back(); }
int64_t QuantizedBuffers::rows() const {
  return sizes.empty() ? 1 : c10::multiply_integers(sizes.begin(), sizes.end() - 1);
}

std::vector<int64_t> data_sizes(const QuantizedBuffers& b, bool columnwise) {
  if (b.layout == Layout::nvfp4) {
    if (columnwise) return {b.columns(), ceil_div(b.rows(), 2)};
    auto packed = b.sizes;
    packed.back() = ceil_div(packed.back(), 2);
    return packed;
  }
  if (!columnwise || b.layout == Layout::mxfp8 || b.sizes.empty()) return b.sizes;
  std::vector<int64_t> transposed{b.sizes.back()};
  transposed.insert(transposed.end(), b.sizes.begin(), b.sizes.end() - 1);
  return transposed;
}

std::vector<int64_t> scale_sizes(const QuantizedBuffers& b, bool columnwise) {
  if (b.layout == Layout::per_tensor) return {1};
  const auto block = b.how.block;
  const auto across = columnwise ? b.rows() : b.columns(), down = columnwise ? b.columns() : b.rows();
  if (b.layout == Layout::block)
    return b.how.two_dimensional ? std::vector{ceil_div(down, block), round_up(ceil_div(across, block), 4)}
                                 : std::vector{ceil_div(across, block), round_up(down, 4)};
  if (b.layout == Layout::mxfp8 && columnwise) return {round_up(ceil_div(across, block), 4), round_up(down, 128)};
  return {round_up(down, 128), round_up(ceil_div(across, block), 4)};
}

int64_t amax_count(const QuantizedBuffers& b, bool columnwise) {
  if (b.layout != Layout::nvfp4) return 0;
  return b.how.row_scaled ? (columnwise ? b.columns() : b.rows()) : 1;
}

QuantizedBuffers describe_buffers(const QuantizerView& quantizer, at::IntArrayRef sizes) {
  QuantizedBuffers b{.layout = quantizer.layout,
                     .how = quantizer.how,
                     .sizes = sizes.vec(),
                     .rowwise = {},
                     .columnwise = {},
                     .random_signs = quantizer.random_signs};
  const bool is_mxfp8 = b.layout == Layout::mxfp8, is_nvfp4 = b.layout == Layout::nvfp4;
  b.swizzled = quantizer.optimize_for_gemm && (is_mxfp8 || is_nvfp4);
  if (is_mxfp8) check_whole_blocks("MXFP8", b.rows(), b.columns(), 32);
  if (is_nvfp4) check_whole_blocks("NVFP4", b.rows(), b.columns(), 16);
  require_on_gpu(b.layout != Layout::block || b.how.power_of_two || !gpu_needs_no_transpose(), "Float8BlockQuantizer",
                 "from compute capability 10.0 on, GPUs require scales that are powers of two, "
                 "force_pow_2_scales=True.");
  return b;
}

bool swizzles_while_quantizing(const QuantizedBuffers& b) {
  if (b.layout != Layout::nvfp4 || !b.swizzled) return b.swizzled;
  const auto& how = b.how;
  const bool makes_tiles = how.two_dimensional && !how.row_scaled && how.four_over_six == kernels::FourOverSix::none;
  return b.columns() % 128 == 0 && (how.hadamard ? b.rows() % 64 == 0 : makes_tiles && b.rows() % 128 == 0);
}

std::array<bool, 2> requested_copies(const QuantizerView& quantizer) {
  if (quantizer.layout != Layout::per_tensor) return {quantizer.rowwise, quantizer.columnwise};
  const bool one_buffer = gpu_needs_no_transpose();
  require_on_gpu(quantizer.rowwise || one_buffer, "Float8Quantizer",
                 "before compute capability 10.0, GPUs make the columnwise copy together with the rowwise one only.");
  return {quantizer.rowwise || one_buffer, quantizer.columnwise && !one_buffer};
}

void allocate_missing(QuantizedBuffers& b, bool columnwise, const at::TensorOptions& options) {
  auto& copy = b.copy(columnwise);
  if (!copy.data.defined()) copy.data = at::empty(data_sizes(b, columnwise), options.dtype(at::kByte));
  if (!copy.scales.defined()) copy.scales = at::empty(scale_sizes(b, columnwise), options.dtype(scale_dtype(b.layout)));
  const auto count = amax_count(b, columnwise);  // 0 for a matrix without rows whose rows are scaled
  if (b.layout == Layout::nvfp4 && (!copy.amax.defined() || copy.amax.numel() != count))
    copy.amax = at::empty({count}, options.dtype(at::kFloat));
}

void allocate_missing(QuantizedBuffers& b, const QuantizerView& quantizer, const at::TensorOptions& options) {
  if (b.layout == Layout::per_tensor && !b.rowwise.scales.defined()) {
    b.rowwise.scales = quantizer.kind == QuantizerKind::delayed
                           ? host(quantizer.scale).reciprocal().to(options.dtype(at::kFloat))
                           : at::empty({1}, options.dtype(at::kFloat));
    b.columnwise.scales = b.rowwise.scales;
  }
  const auto requested = requested_copies(quantizer);
  for (const bool columnwise : {false, true}) {
    if (requested[columnwise]) {
      allocate_missing(b, columnwise, options);
    } else {
      b.copy(columnwise).data.reset();
    }
  }
}

void fill_buffers(const at::Tensor& given, const QuantizerView& quantizer, const QuantizedBuffers& b,
                  c10::Device device, const KnownAmax& known) {
  const at::NoGradGuard no_grad;
  const auto x = given.detach().contiguous().view({b.rows(), b.columns()});
  if (b.layout == Layout::per_tensor) return fill_per_tensor(x, quantizer, b, device, known);
  if (b.layout == Layout::nvfp4) return fill_nvfp4(x, quantizer, b, device, known);
  run_kernel(x, b, true, true, {});
}

kernels::QuantizedMatrix readable_matrix(const QuantizedBuffers& given, at::ScalarType dtype, bool rowwise,
                                         bool columnwise) {
  auto b = given;
  if (repeats_scales(b)) b.how.two_dimensional = false;  // the scales are those of blocks of one row
  kernels::QuantizedMatrix q{.quantization = b.how, .dtype = dtype, .rows = b.rows(), .columns = b.columns()};
  if (rowwise) q.rowwise = readable_copy(b, false);
  if (columnwise) q.columnwise = readable_copy(b, true);
  return q;
}

at::Tensor decode_buffers(const QuantizedBuffers& b, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const bool columnwise = !b.rowwise.data.defined();
  const bool is_decoded = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  const auto matrix = readable_matrix(b, dtype, !columnwise, columnwise);
  auto values = kernels::dequantize(matrix, columnwise, is_decoded ? dtype : at::kFloat);
  if (columnwise && b.how.hadamard && !b.random_signs) values = with_signs(values);
  return values.to(dtype).view(b.sizes);
}

at::Tensor swizzled_scales(const QuantizedBuffers& b, bool columnwise) {
  const auto sizes = scale_sizes(b, columnwise);
  const auto scales = host(b.copy(columnwise).scales).reshape(sizes);
  if (b.layout == Layout::mxfp8 && columnwise) return swizzle(scales.t(), sizes[1], sizes[0]).view(sizes);
  return swizzle(scales, sizes[0], sizes[1]).view(sizes);
}

at::Tensor row_major_scales(const QuantizedBuffers& b, bool columnwise) {
  const auto sizes = scale_sizes(b, columnwise);
  const auto scales = host(b.copy(columnwise).scales);
  if (b.layout == Layout::mxfp8 && columnwise) return unswizzle(scales, sizes[1], sizes[0]).t().contiguous();
  return unswizzle(scales, sizes[0], sizes[1]).contiguous();
}

void reduce_amax(const at::Tensor& amax, const py::object& group, c10::Device device) {
  if (group.is_none()) return;
  const auto distributed = py::module_::import("torch.distributed");
  const auto reduced = on_device(amax.clone(), device);
  distributed.attr("all_reduce")(reduced, distributed.attr("ReduceOp").attr("MAX"), group);
  amax.copy_(host(reduced));
}

}  // namespace weft::te
