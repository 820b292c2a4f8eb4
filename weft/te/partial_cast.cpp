#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "weft/kernels/matrix_shard.h"
#include "weft/kernels/quantize_math.h"
#include "weft/te/bind.h"
#include "weft/te/dtype.h"
#include "weft/te/host.h"

// Distributed optimizers own consecutive elements of each weight. They compute the maxima of their elements, reduce
// them over ranks, and quantize their elements with the scales that follow.

namespace weft::te {
namespace {

using kernels::BlockShape;
using kernels::MatrixShard;
using kernels::TwoLevelScale;
using Tensors = std::vector<at::Tensor>;
using Sizes = std::vector<int64_t>;

constexpr BlockShape kFp8Block{128, 128}, kNvfp4Block{16, 16}, kMxfp8Rowwise{1, 32}, kMxfp8Columnwise{32, 1};
constexpr float kScaleBound = 448;  // of the E4M3 scales of blocks

int64_t blocks_down(const MatrixShard& shard, BlockShape block) { return (shard.rows + block.rows - 1) / block.rows; }
int64_t blocks_across(const MatrixShard& shard, BlockShape block) {
  return (shard.columns + block.columns - 1) / block.columns;
}

void check_block(const char* who, int64_t given, BlockShape expected) {
  TORCH_CHECK_VALUE(given == expected.rows, who, ": block_len is ", given, ", expected ", expected.rows, ".");
}

void check_lists(const char* who, size_t expected, std::initializer_list<size_t> lengths) {
  for (const auto length : lengths)
    TORCH_CHECK_VALUE(length == expected, who, ": got lists of ", expected, " and of ", length,
                      " entries, expected one entry per weight.");
}

/// The values that belong to the blocks of a matrix; the memory of scales and maxima is padded.
at::Tensor block_values(const char* who, const at::Tensor& t, const MatrixShard& shard, BlockShape block) {
  const auto down = blocks_down(shard, block), across = blocks_across(shard, block);
  TORCH_CHECK_VALUE(t.dim() == 2 && t.size(0) >= down && t.size(1) >= across, who, ": expected at least ", down, " x ",
                    across, " blocks, got shape ", t.sizes(), ".");
  return host(t).narrow(0, 0, down).narrow(1, 0, across);
}

/// Writes the maxima of the shard's blocks into `amax`; its padding becomes 0.
void store_amax(const char* who, const MatrixShard& shard, BlockShape block, const at::Tensor& amax) {
  const auto values = block_values(who, amax, shard, block);
  if (values.numel() != amax.numel()) host(amax).zero_();
  values.copy_(kernels::shard_block_amax(shard, block));
}

/// float32 of the same sizes: `of` applied to each of the elements, which are of type T.
template <class T, class F>
at::Tensor map_elements(const at::Tensor& t, const F& of) {
  const auto given = t.contiguous();
  auto out = at::empty(given.sizes(), at::kFloat);
  const auto* const from = given.const_data_ptr<T>();
  std::transform(from, from + given.numel(), out.mutable_data_ptr<float>(), of);
  return out;
}

// ---- FP8, blocks of 128 × 128
// ----------------------------------------------------------------------------------------

void compute_fp8_block_amax(const at::Tensor& tensor, const at::Tensor& amax, int64_t h, int64_t w,
                            int64_t start_offset, int64_t block_len) {
  const auto* const who = "fp8_block_scaling_compute_partial_amax";
  check_block(who, block_len, kFp8Block);
  store_amax(who, {host(tensor), h, w, start_offset}, kFp8Block, amax);
}

void cast_fp8_blocks(const at::Tensor& inp, const at::Tensor& out, const at::Tensor& scale, int64_t h, int64_t w,
                     int64_t start_offset, int64_t block_len, DType out_dtype) {
  const auto* const who = "fp8_block_scaling_partial_cast";
  check_block(who, block_len, kFp8Block);
  const MatrixShard shard{host(inp), h, w, start_offset};
  kernels::encode_shard(shard, kFp8Block, block_values(who, scale, shard, kFp8Block),
                        out_dtype == DType::float8_e5m2 ? Format::e5m2 : Format::e4m3, host(out));
}

// ---- MXFP8
// -----------------------------------------------------------------------------------------------------------

void compute_mxfp8_amax(const at::Tensor& input, const at::Tensor& amax_rowwise, const at::Tensor& amax_colwise,
                        int64_t rows, int64_t cols, int64_t start_offset) {
  const auto* const who = "mxfp8_scaling_compute_partial_amax";
  const MatrixShard shard{host(input), rows, cols, start_offset};
  store_amax(who, shard, kMxfp8Rowwise, amax_rowwise);
  store_amax(who, shard, kMxfp8Columnwise, amax_colwise);
}

void cast_mxfp8(const at::Tensor& input, const at::Tensor& output_rowwise, const at::Tensor& output_colwise,
                const at::Tensor& scale_inv_rowwise, const at::Tensor& scale_inv_colwise, int64_t rows, int64_t cols,
                int64_t start_offset) {
  const auto* const who = "mxfp8_scaling_partial_cast";
  const MatrixShard shard{host(input), rows, cols, start_offset};
  const auto cast = [&](BlockShape block, const at::Tensor& scale_inv, const at::Tensor& output) {
    const auto codes = block_values(who, scale_inv, shard, block);
    const auto factors = map_elements<uint8_t>(codes, [](int code) { return kernels::e8m0_factor<float>(code); });
    kernels::encode_shard(shard, block, factors, Format::e4m3, host(output));
  };
  cast(kMxfp8Rowwise, scale_inv_rowwise, output_rowwise);
  cast(kMxfp8Columnwise, scale_inv_colwise, output_colwise);
}

// ---- NVFP4, blocks of 16 × 16
// ----------------------------------------------------------------------------------------

void compute_nvfp4_amax(const at::Tensor& tensor, const at::Tensor& amax, int64_t h, int64_t w, int64_t start_offset,
                        int64_t block_len) {
  const auto* const who = "nvfp4_2d_compute_partial_amax";
  check_block(who, block_len, kNvfp4Block);
  store_amax(who, {host(tensor), h, w, start_offset}, kNvfp4Block, amax);
}

void compute_nvfp4_amaxes(const Tensors& master_weights, const Tensors& partial_amaxes, const Tensors& global_amaxes,
                          const Sizes& h, const Sizes& w, const Sizes& start_offsets, int64_t block_len) {
  check_lists("nvfp4_multi_tensor_compute_partial_amax", master_weights.size(),
              {partial_amaxes.size(), global_amaxes.size(), h.size(), w.size(), start_offsets.size()});
  for (size_t i = 0; i < master_weights.size(); ++i) {
    compute_nvfp4_amax(master_weights[i], partial_amaxes[i], h[i], w[i], start_offsets[i], block_len);
    const auto largest = host(partial_amaxes[i]);
    host(global_amaxes[i]).copy_(largest.numel() > 0 ? largest.amax() : largest.sum());
  }
}

/// `scale`: what the E4M3 scales of blocks are before they are rounded; `global_scale`: that of the tensor.
void cast_nvfp4(const at::Tensor& inp, const at::Tensor& out, const at::Tensor& scale, const at::Tensor& global_scale,
                int64_t h, int64_t w, int64_t start_offset, int64_t block_len) {
  const auto* const who = "nvfp4_2d_partial_cast";
  check_block(who, block_len, kNvfp4Block);
  const MatrixShard shard{host(inp), h, w, start_offset};
  const float given = host(global_scale).item<float>(), inverse = 1 / (given > 0 ? given : 1.F);
  const auto factors = map_elements<float>(block_values(who, scale, shard, kNvfp4Block), [&](float block_scale) {
    const auto code = kernels::encode<Format::e4m3>(block_scale);
    return kernels::e4m3_factor(kernels::decode<Format::e4m3, float>(code), inverse);
  });
  kernels::encode_shard(shard, kNvfp4Block, factors, Format::e2m1, host(out));
}

void cast_nvfp4_tensors(const Tensors& inputs, const Tensors& outputs, const Tensors& scales,
                        const Tensors& global_scales, const Sizes& h, const Sizes& w, const Sizes& start_offsets,
                        int64_t block_len) {
  check_lists("nvfp4_multi_tensor_2d_partial_cast", inputs.size(),
              {outputs.size(), scales.size(), global_scales.size(), h.size(), w.size(), start_offsets.size()});
  for (size_t i = 0; i < inputs.size(); ++i)
    cast_nvfp4(inputs[i], outputs[i], scales[i], global_scales[i], h[i], w[i], start_offsets[i], block_len);
}

/// The scales of blocks with these maxima before they are rounded to E4M3.
void compute_block_scales(const at::Tensor& block_amax, const at::Tensor& scale, const at::Tensor& global_amax) {
  const float sixth = TwoLevelScale::of(host(global_amax).item<float>(), kScaleBound).sixth;
  host(scale).copy_(map_elements<float>(host(block_amax), [&](float amax) {
                      return std::min(amax * sixth, FLT_MAX);
                    }).view(scale.sizes()));
}

/// E4M3 codes of scales [tile_rows, tile_cols], each for block_len rows of `output` [rows_padded, tile_cols]; then 0.
void expand_scales(const at::Tensor& scales, const at::Tensor& output, int64_t tile_rows, int64_t tile_cols,
                   int64_t rows_padded, int64_t block_len) {
  TORCH_CHECK_VALUE(output.numel() == rows_padded * tile_cols && scales.numel() >= tile_rows * tile_cols,
                    "nvfp4_expand_scale_to_fp8: expected ", tile_rows, " x ", tile_cols, " scales and an output of ",
                    rows_padded, " x ", tile_cols, ", got shapes ", scales.sizes(), " and ", output.sizes(), ".");
  const auto codes = map_elements<float>(host(scales).reshape({-1, tile_cols}).narrow(0, 0, tile_rows),
                                         [](float s) { return static_cast<float>(kernels::encode<Format::e4m3>(s)); });
  const auto to = host(output).view({rows_padded, tile_cols});
  const auto used = std::min(tile_rows * block_len, rows_padded);
  to.narrow(0, 0, used).copy_(codes.repeat_interleave(block_len, 0).narrow(0, 0, used));
  to.narrow(0, used, rows_padded - used).zero_();
}

void fuse_nvfp4_scales(const at::Tensor& block_amax, const at::Tensor& global_amax, const at::Tensor& per_block_scale,
                       const at::Tensor& target_scale, const at::Tensor& target_amax, int64_t tile_rows,
                       int64_t tile_cols, int64_t rows_padded, int64_t block_len) {
  compute_block_scales(block_amax, per_block_scale, global_amax);
  expand_scales(per_block_scale, target_scale, tile_rows, tile_cols, rows_padded, block_len);
  host(target_amax).copy_(host(global_amax).view(target_amax.sizes()));
}

void fuse_nvfp4_scales_of_tensors(const Tensors& block_amaxes, const Tensors& global_amaxes,
                                  const Tensors& per_block_scales, const Tensors& target_scales,
                                  const Tensors& target_amaxes, const Sizes& tile_rows, const Sizes& tile_cols,
                                  const Sizes& rows_padded, int64_t block_len) {
  check_lists("nvfp4_multi_tensor_fused_scale", block_amaxes.size(),
              {global_amaxes.size(), per_block_scales.size(), target_scales.size(), target_amaxes.size(),
               tile_rows.size(), tile_cols.size(), rows_padded.size()});
  for (size_t i = 0; i < block_amaxes.size(); ++i)
    fuse_nvfp4_scales(block_amaxes[i], global_amaxes[i], per_block_scales[i], target_scales[i], target_amaxes[i],
                      tile_rows[i], tile_cols[i], rows_padded[i], block_len);
}

/// Codes [M, K/2], two per byte, as [K, M/2].
at::Tensor transposed_nvfp4(const at::Tensor& packed) {
  TORCH_CHECK_VALUE(packed.dim() == 2 && packed.size(0) % 2 == 0,
                    "nvfp4_data_transpose: expected a matrix with an even number of rows, got shape ", packed.sizes(),
                    ".");
  const auto even_rows = packed.slice(0, 0, packed.size(0), 2).t(),
             odd_rows = packed.slice(0, 1, packed.size(0), 2).t();
  auto out = at::empty({packed.size(1), 2, packed.size(0) / 2}, packed.options());
  out.select(1, 0).copy_(even_rows.bitwise_and(15).bitwise_or(odd_rows.bitwise_left_shift(4)));
  out.select(1, 1).copy_(even_rows.bitwise_right_shift(4).bitwise_or(odd_rows.bitwise_and(0xf0)));
  return out.flatten(0, 1);
}

at::Tensor transpose_nvfp4_data(const at::Tensor& input, const std::optional<at::Tensor>& out) {
  auto result = transposed_nvfp4(host(input).view(at::kByte));
  if (!out) return on_device(std::move(result), input.device());
  TORCH_CHECK_VALUE(out->numel() == result.numel(), "nvfp4_data_transpose: out has shape ", out->sizes(), ", expected ",
                    result.sizes(), ".");
  host(*out).view(at::kByte).view(result.sizes()).copy_(result);
  return *out;
}

/// The scales of square blocks, repeated for each of 16 rows, as those of the transposed matrix.
void transpose_nvfp4_scales(const at::Tensor& input, const at::Tensor& output, int64_t m_tiles, int64_t k_tiles) {
  TORCH_CHECK_VALUE(input.dim() == 2 && output.dim() == 2 && input.size(0) >= (m_tiles - 1) * 16 + 1 &&
                        input.size(1) >= k_tiles && output.size(1) >= m_tiles,
                    "nvfp4_2d_scale_transpose: shapes ", input.sizes(), " and ", output.sizes(), " do not hold ",
                    m_tiles, " x ", k_tiles, " blocks.");
  const auto blocks = host(input).slice(0, 0, (m_tiles - 1) * 16 + 1, 16).narrow(1, 0, k_tiles).t();
  const auto to = host(output).narrow(1, 0, m_tiles);
  const auto used = std::min(k_tiles * 16, to.size(0));
  to.narrow(0, 0, used).copy_(blocks.repeat_interleave(16, 0).narrow(0, 0, used));
  to.narrow(0, used, to.size(0) - used).zero_();
}

void transpose_nvfp4_tensors(const Tensors& rowwise_data, const Tensors& columnwise_data, const Tensors& rowwise_scales,
                             const Tensors& columnwise_scales, const Sizes& m, const Sizes& k) {
  check_lists("nvfp4_2d_multi_tensor_transpose", rowwise_data.size(),
              {columnwise_data.size(), rowwise_scales.size(), columnwise_scales.size(), m.size(), k.size()});
  for (size_t i = 0; i < rowwise_data.size(); ++i) {
    transpose_nvfp4_data(rowwise_data[i], columnwise_data[i]);
    transpose_nvfp4_scales(rowwise_scales[i], columnwise_scales[i], (m[i] + 15) / 16, (k[i] + 15) / 16);
  }
}

/// The scales of tensors with these maxima.
void compute_global_scale(const at::Tensor& global_amax, const at::Tensor& global_scale) {
  const auto scale_of = [](float amax) { return TwoLevelScale::of(amax, kScaleBound).scale; };
  host(global_scale).copy_(map_elements<float>(host(global_amax), scale_of).view(global_scale.sizes()));
}

/// `f` without gradients, which parameters on the CPU would require.
template <class... Args>
auto without_grad(void (*f)(Args...)) {
  return [f](Args... args) {
    const at::NoGradGuard no_grad;
    f(std::forward<Args>(args)...);
  };
}

void bind_nvfp4_casts(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def("nvfp4_2d_compute_partial_amax", without_grad(compute_nvfp4_amax), py::arg("tensor"), py::arg("amax"),
        py::arg("h"), py::arg("w"), py::arg("start_offset"), py::arg("block_len") = 16, no_gil);
  m.def("nvfp4_multi_tensor_compute_partial_amax", without_grad(compute_nvfp4_amaxes), py::arg("master_weight_list"),
        py::arg("partial_amax_list"), py::arg("global_amax_list"), py::arg("h_list"), py::arg("w_list"),
        py::arg("start_offset_list"), py::arg("block_len") = 16, no_gil);
  m.def("nvfp4_2d_partial_cast", without_grad(cast_nvfp4), py::arg("inp"), py::arg("out"), py::arg("scale"),
        py::arg("global_scale"), py::arg("h"), py::arg("w"), py::arg("start_offset"), py::arg("block_len") = 16,
        no_gil);
  m.def("nvfp4_multi_tensor_2d_partial_cast", without_grad(cast_nvfp4_tensors), py::arg("inp_list"),
        py::arg("out_list"), py::arg("scale_list"), py::arg("global_scale_list"), py::arg("h_list"), py::arg("w_list"),
        py::arg("start_offset_list"), py::arg("block_len") = 16, no_gil);
  m.def("nvfp4_compute_per_block_scale", compute_block_scales, py::arg("block_amax"), py::arg("scale"),
        py::arg("global_amax"), no_gil);
  m.def("nvfp4_compute_global_scale", compute_global_scale, py::arg("global_amax"), py::arg("global_scale"), no_gil);
  m.def("nvfp4_expand_scale_to_fp8", expand_scales, py::arg("input"), py::arg("output"), py::arg("tile_rows"),
        py::arg("tile_cols"), py::arg("rows_padded"), py::arg("block_len"), no_gil);
  m.def("nvfp4_fused_scale", fuse_nvfp4_scales, py::arg("block_amax"), py::arg("global_amax"),
        py::arg("per_block_scale"), py::arg("target_scale"), py::arg("target_amax"), py::arg("tile_rows"),
        py::arg("tile_cols"), py::arg("rows_padded"), py::arg("block_len"), no_gil);
  m.def("nvfp4_multi_tensor_fused_scale", fuse_nvfp4_scales_of_tensors, py::arg("block_amax_list"),
        py::arg("global_amax_list"), py::arg("per_block_scale_list"), py::arg("target_scale_list"),
        py::arg("target_amax_list"), py::arg("tile_rows_list"), py::arg("tile_cols_list"), py::arg("rows_padded_list"),
        py::arg("block_len"), no_gil);
}

void bind_nvfp4_transposes(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def("nvfp4_data_transpose", transpose_nvfp4_data, py::arg("input"), py::kw_only(), py::arg("out") = py::none(),
        no_gil);
  m.def("nvfp4_2d_scale_transpose", transpose_nvfp4_scales, py::arg("input"), py::arg("output"), py::arg("M_tiles"),
        py::arg("K_tiles"), no_gil);
  m.def("nvfp4_2d_multi_tensor_transpose", transpose_nvfp4_tensors, py::arg("rowwise_data_list"),
        py::arg("columnwise_data_list"), py::arg("rowwise_scale_inv_list"), py::arg("columnwise_scale_inv_list"),
        py::arg("M_list"), py::arg("K_list"), no_gil);
}

}  // namespace

void bind_partial_cast(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  m.def("fp8_block_scaling_compute_partial_amax", without_grad(compute_fp8_block_amax), py::arg("tensor"),
        py::arg("amax"), py::arg("h"), py::arg("w"), py::arg("start_offset"), py::arg("block_len"), no_gil);
  m.def("fp8_block_scaling_partial_cast", without_grad(cast_fp8_blocks), py::arg("inp"), py::arg("out"),
        py::arg("scale"), py::arg("h"), py::arg("w"), py::arg("start_offset"), py::arg("block_len"),
        py::arg("out_dtype"), no_gil);
  m.def("mxfp8_scaling_compute_partial_amax", without_grad(compute_mxfp8_amax), py::arg("input"),
        py::arg("amax_rowwise"), py::arg("amax_colwise"), py::arg("rows"), py::arg("cols"), py::arg("start_offset"),
        no_gil);
  m.def("mxfp8_scaling_partial_cast", without_grad(cast_mxfp8), py::arg("input"), py::arg("output_rowwise"),
        py::arg("output_colwise"), py::arg("scale_inv_rowwise"), py::arg("scale_inv_colwise"), py::arg("rows"),
        py::arg("cols"), py::arg("start_offset"), no_gil);
  bind_nvfp4_casts(m);
  bind_nvfp4_transposes(m);
}

}  // namespace weft::te
