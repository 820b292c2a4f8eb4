#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "weft/kernels/attention_tiers.h"

namespace weft::kernels {
namespace {

/// One row of factors. The random number of key position j is output j % 4 of Philox4x32-10 with the seed as its key,
/// and the counter (j / 4, query position, sequence and head).
template <class T>
void fill_row(T* row, int64_t first_key, int64_t keys, uint64_t seed, uint64_t subsequence, uint64_t threshold,
              T kept) {
  at::Philox4_32 engine(seed, subsequence, static_cast<uint64_t>(first_key / 4));
  for (int64_t skipped = 0; skipped < first_key % 4; ++skipped) engine();
  for (int64_t j = 0; j < keys; ++j) row[j] = engine() < threshold ? T(0) : kept;
}

}  // namespace

at::Tensor dropout_factors(const DenseAttention& d, const ScoreBlock& s, at::ScalarType dtype) {
  const auto& a = d.attention;
  const auto heads = d.heads();
  auto factors = at::empty({s.batches, d.in.q.size(2), d.heads_per_group(), s.queries, s.keys}, at::dtype(dtype));
  const auto seed = static_cast<uint64_t>(a.seed.item<int64_t>());
  const auto threshold = static_cast<uint64_t>(std::llround(std::ldexp(a.dropout, 32)));  // of 2^32 values
  AT_DISPATCH_FLOATING_TYPES(dtype, "dropout_factors", [&] {
    const auto kept = a.dropout < 1 ? static_cast<scalar_t>(1 / (1 - a.dropout)) : scalar_t(0);
    auto* data = factors.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, s.batches * heads * s.queries, 16, [&](int64_t begin, int64_t end) {
      for (auto row = begin; row < end; ++row) {
        const auto sequence_and_head = (d.first_sequence + s.batch) * heads + row / s.queries;
        const auto position = a.query_offset + s.query + row % s.queries;
        const auto subsequence = (static_cast<uint64_t>(sequence_and_head) << 32) | static_cast<uint32_t>(position);
        fill_row(data + row * s.keys, a.key_offset + s.key, s.keys, seed, subsequence, threshold, kept);
      }
    });
  });
  return factors;
}

}  // namespace weft::kernels
