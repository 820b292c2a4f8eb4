#include "weft/kernels/matrix_shard.h"

#include "weft/kernels/cpu_tensors.h"
#include "weft/kernels/quantize_math.h"

namespace weft::kernels {
namespace {

int64_t blocks_in(int64_t size, int64_t block) { return (size + block - 1) / block; }

/// The values as contiguous float32.
at::Tensor float_values(const MatrixShard& shard) {
  const auto n = shard.values.numel();
  TORCH_CHECK_VALUE(shard.start >= 0 && shard.start + n <= shard.rows * shard.columns, "matrix shard: ", n,
                    " elements from ", shard.start, " on are not in a matrix of ", shard.rows, " x ", shard.columns,
                    ".");
  return shard.values.to(at::kFloat).contiguous();
}

/// Calls run(index in the shard, row, first column, count) for the pieces of rows [begin, end) in the shard.
template <class F>
void for_pieces(const MatrixShard& shard, int64_t begin, int64_t end, const F& run) {
  const auto stop = shard.start + shard.values.numel();
  for (auto row = begin; row < end; ++row) {
    const auto from = std::max(shard.start, row * shard.columns), to = std::min(stop, (row + 1) * shard.columns);
    if (from < to) run(from - shard.start, row, from - row * shard.columns, to - from);
  }
}

template <Format kCodes>
void encode_elements(const MatrixShard& shard, BlockShape block, const at::Tensor& factors, uint8_t* codes) {
  const auto values = float_values(shard);
  const auto* const x = values.const_data_ptr<float>();
  const auto* const factor = factors.const_data_ptr<float>();
  const auto across = factors.size(1);
  const auto code_of = [&](int64_t index, int64_t row, int64_t column) {
    return static_cast<uint8_t>(encode<kCodes>(x[index] * factor[row / block.rows * across + column / block.columns]));
  };
  if constexpr (kCodes == Format::e2m1) {  // rows may share a byte: one thread
    for_pieces(shard, 0, shard.rows, [&](int64_t index, int64_t row, int64_t column, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        const auto element = shard.start + index + i;
        auto& byte = codes[element / 2 - shard.start / 2];
        const auto code = code_of(index + i, row, column + i);
        byte = element % 2 == 0 ? static_cast<uint8_t>((byte & 0xf0) | code)
                                : static_cast<uint8_t>((byte & 0x0f) | (code << 4));
      }
    });
  } else {
    parallel_rows(shard.rows, shard.columns, [&](int64_t begin, int64_t end) {
      for_pieces(shard, begin, end, [&](int64_t index, int64_t row, int64_t column, int64_t count) {
        for (int64_t i = 0; i < count; ++i) codes[index + i] = code_of(index + i, row, column + i);
      });
    });
  }
}

}  // namespace

at::Tensor shard_block_amax(const MatrixShard& shard, BlockShape block) {
  const auto values = float_values(shard);
  const auto down = blocks_in(shard.rows, block.rows), across = blocks_in(shard.columns, block.columns);
  const auto amax = new_zeros_f32(values, down * across);
  const auto* const x = values.const_data_ptr<float>();
  auto* const out = amax.mutable_data_ptr<float>();
  parallel_rows(down, block.rows * shard.columns, [&](int64_t begin, int64_t end) {
    for_pieces(shard, begin * block.rows, std::min(end * block.rows, shard.rows),
               [&](int64_t index, int64_t row, int64_t column, int64_t count) {
                 auto* const of_row = out + row / block.rows * across;
                 for (int64_t i = 0; i < count; ++i) {
                   auto& largest = of_row[(column + i) / block.columns];
                   largest = max_magnitude(largest, x[index + i]);
                 }
               });
  });
  return amax.view({down, across});
}

void encode_shard(const MatrixShard& shard, BlockShape block, const at::Tensor& factors, Format format,
                  const at::Tensor& codes) {
  const auto first = shard.start, stop = first + shard.values.numel();
  const auto bytes = format == Format::e2m1 ? (stop + 1) / 2 - first / 2 : stop - first;
  const auto down = blocks_in(shard.rows, block.rows), across = blocks_in(shard.columns, block.columns);
  TORCH_CHECK_VALUE(codes.is_contiguous() && codes.numel() >= bytes, "matrix shard: expected at least ", bytes,
                    " contiguous bytes for its codes, got shape ", codes.sizes(), ".");
  TORCH_CHECK_VALUE(factors.scalar_type() == at::kFloat && factors.sizes() == at::IntArrayRef({down, across}),
                    "matrix shard: expected float32 factors of shape [", down, ", ", across, "], got ",
                    factors.scalar_type(), " of shape ", factors.sizes(), ".");
  const auto given = factors.contiguous();
  auto* const to = static_cast<uint8_t*>(codes.mutable_data_ptr());
  if (format == Format::e4m3) return encode_elements<Format::e4m3>(shard, block, given, to);
  if (format == Format::e5m2) return encode_elements<Format::e5m2>(shard, block, given, to);
  encode_elements<Format::e2m1>(shard, block, given, to);
}

}  // namespace weft::kernels
