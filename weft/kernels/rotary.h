#pragma once
#include <ATen/core/Tensor.h>

namespace weft::kernels {

/// The heads in a row of x: `blocks` times `rotated` heads, then `kept` heads, each of `head_dim` values. The first
/// `rotary_dim` values of a rotated head form pairs: (2i, 2i+1) if `interleaved`, otherwise (i, i + rotary_dim/2).
struct RotaryHeads {
  int64_t head_dim, rotary_dim, blocks, rotated, kept;
  bool interleaved;

  int64_t pairs() const { return rotary_dim / 2; }
  int64_t width() const { return blocks * (rotated + kept) * head_dim; }
};

/// cos and sin of the angles, [positions, pairs], in float32, or float64 for float64 activations.
struct RotaryTables {
  at::Tensor cos, sin;
};

/// The tables of positions 0 to `positions` - 1: the angle of pair i is position·base^(-2i/rotary_dim), computed in
/// float64. `like` gives the device, and the dtype of the activations.
RotaryTables rotary_tables(int64_t positions, const RotaryHeads& heads, double base, const at::Tensor& like);

/// The position of each row of packed sequences, int64. Checks `cu_seqlens` (sequence_offsets.h), and that no sequence
/// is longer than `positions`, the number of rows of the tables.
at::Tensor packed_positions(const at::Tensor& cu_seqlens, int64_t rows, int64_t positions);

enum class RotaryDirection { forward, inverse };

/// y of the sizes of x, [outer, T, inner, heads.width()]: the pair (a, b) at position t becomes
/// (a·cos[t] - b·sin[t], b·cos[t] + a·sin[t]), with -sin for the inverse; other values are copied. Tables have at least
/// T rows. Computed in float32 (float64 for float64) and rounded once.
at::Tensor rotary(const at::Tensor& x, const RotaryTables& tables, const RotaryHeads& heads, RotaryDirection direction);

/// The gradients of the first T rows of the tables, given those of y.
RotaryTables rotary_table_gradients(const at::Tensor& dy, const at::Tensor& x, const RotaryHeads& heads);

}  // namespace weft::kernels
