#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "weft/te/enums.h"

// Where the tokens of the sequences of a batch are in a tensor whose leading dimensions count as rows.

namespace weft::te {

/// The values of a vector of offsets or lengths, int32 or int64. `name` is that of the argument, for errors.
std::vector<int64_t> read_offsets(const at::Tensor& cu_seqlens, const char* name);

/// The numbers as a tensor, int64.
at::Tensor index_tensor(const std::vector<int64_t>& values);

/// The number of tokens of each sequence, and the row at which it starts in a tensor [t, ...] of all sequences.
struct Sequences {
  std::vector<int64_t> counts, starts;

  int64_t size() const { return static_cast<int64_t>(counts.size()); }
};

/// Sequence i has cu_seqlens[i+1] - cu_seqlens[i] tokens. Undefined `cu_seqlens_padded`: no padding between sequences.
Sequences read_sequences(const at::Tensor& cu_seqlens, const at::Tensor& cu_seqlens_padded, const char* name);

/// The row of each token, for all sequences in order.
struct TokenRows {
  at::Tensor offsets;  // int64: sequence i has the tokens [offsets[i], offsets[i+1])
  at::Tensor index;    // int64: the row of each token; undefined if token i is row i

  /// The tokens of `t`, whose last `trailing` dimensions are those of a row.
  at::Tensor gather(const at::Tensor& t, int64_t trailing) const;
  /// The inverse: fills `t`; rows that are no token become `fill`.
  void scatter(const at::Tensor& tokens, const at::Tensor& t, int64_t trailing, double fill = 0) const;
};

/// The rows in a tensor with the leading dimensions `sizes`: [s, b], [b, s] or [t].
TokenRows token_rows(QkvFormat format, at::IntArrayRef sizes, const Sequences& sequences);

/// The rows in a cache of pages with the leading dimensions `sizes`: [pages, rows] if bshd, [rows, pages] if sbhd. Page
/// j of sequence i is page_table[i, j].
TokenRows paged_rows(QkvFormat format, at::IntArrayRef sizes, const at::Tensor& page_table, const Sequences& sequences);

}  // namespace weft::te
