#pragma once
#include <array>

#include "weft/core/fields.h"
#include "weft/ops/spec.h"

namespace weft::ops {

/// The order of the heads in a packed activation of queries, keys and values.
enum class QkvLayout {
  group_interleaved,  // for each group: its query heads, its key head, its value head
  concatenated,       // all query heads, all key heads, all value heads
};

/// The order of the dimensions, as Transformer Engine names it: s sequence, b batch, t rows of packed sequences, h
/// heads, d channels. The last two are one dimension here.
enum class QkvFormat {
  sbhd,  // the first dimension is the sequence
  bshd,  // the dimension before the last is the sequence
  thd,   // rows of all sequences, one after the other; their offsets are an extra input
};

/// Heads of a packed activation: `heads` query heads, and `groups` key and value heads of `head_dim` values each.
struct QkvHeads {
  int64_t heads, groups, head_dim;
};

/// The heads of the options; `groups` defaults to `heads`. Raises ValueError for sizes below 1 and unless the groups
/// divide the heads.
QkvHeads make_heads(std::string_view op, int64_t heads, std::optional<int64_t> groups, int64_t head_dim);

/// An activation [*, width] as [outer, length, inner, width]: `length` is the sequence. Without a format the activation
/// must be one sequence: an assumed order would mix the entries of a batch. Raises ValueError for others.
struct SequenceDims {
  c10::SymInt outer = 1, length = 1, inner = 1;

  SequenceDims(std::optional<QkvFormat> format, c10::SymIntArrayRef sizes);
  /// For sizes that are known.
  std::array<int64_t, 4> sizes(int64_t width) const;
};

/// Raises unless `cu_seqlens` is a vector of int32 or int64 with at least one element. Kernels check the values.
void check_cu_seqlens(const Spec& cu_seqlens, const char* name = "cu_seqlens");

namespace description {
inline constexpr const char* kNumAttentionHeads = "Number of query heads in the input, those of this rank.";
inline constexpr const char* kKvChannels = "Number of channels of a head.";
inline constexpr const char* kNumGqaGroups =
    "Number of key heads and of value heads, each shared by consecutive query heads; None means one per query head.";
inline constexpr const char* kQkvFormat =
    "Order of the dimensions: ``\"sbhd\"`` sequence first, ``\"bshd\"`` sequence before the last dimension, "
    "``\"thd\"`` packed sequences. None: the input is one sequence, so that the order does not matter.";
}  // namespace description

}  // namespace weft::ops

template <>
struct weft::EnumNames<weft::ops::QkvLayout> {
  static constexpr std::array list{"group_interleaved", "concatenated"};
};
template <>
struct weft::EnumNames<weft::ops::QkvFormat> {
  static constexpr std::array list{"sbhd", "bshd", "thd"};
};
