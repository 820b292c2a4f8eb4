#pragma once
#include <ATen/core/Tensor.h>

#include "weft/core/formats.h"

// Quantization of a part of a matrix: a distributed optimizer owns consecutive elements of each weight.

namespace weft::kernels {

/// Consecutive elements of a matrix [rows, columns] in row-major order, from element `start` on.
struct MatrixShard {
  at::Tensor values;  // float32, bfloat16 or float16
  int64_t rows, columns, start;
};

/// Blocks of `rows` × `columns` values that share a scale.
struct BlockShape {
  int64_t rows, columns;
};

/// The maximum magnitudes of the elements of the shard in each block: float32 [blocks down, blocks across], 0 for
/// blocks without any. NaN is ignored.
at::Tensor shard_block_amax(const MatrixShard& shard, BlockShape block);

/// The codes of the shard's elements times the float32 factor of their block: `codes`, contiguous uint8, begins with
/// the byte of element `start`. E2M1: elements with an odd index have the high half of a byte; other halves stay.
void encode_shard(const MatrixShard& shard, BlockShape block, const at::Tensor& factors, Format format,
                  const at::Tensor& codes);

}  // namespace weft::kernels
