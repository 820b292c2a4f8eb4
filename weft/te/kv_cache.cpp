#include "weft/te/kv_cache.h"

#include <vector>

#include "weft/te/host.h"
#include "weft/te/token_rows.h"

namespace weft::te {
namespace {

constexpr const char* kCopyToKvCache = "copy_to_kv_cache";

/// Sequence i of the batch was sequence `page_table[i]` in the step before: moves its tokens to entry i. The entries
/// after the first decrease are unused.
void move_sequences(const at::Tensor& cache, const std::vector<int64_t>& from, const Sequences& cached,
                    const Sequences& added) {
  size_t used = from.size();
  for (size_t i = 0; i + 1 < from.size(); ++i)
    if (from[i + 1] < from[i]) used = i + 1;
  for (size_t i = 0; i < used; ++i) {
    const auto to = static_cast<int64_t>(i), tokens = cached.counts[i] - added.counts[i];
    if (from[i] != to && tokens > 0)
      cache.select(0, to).narrow(0, 0, tokens).copy_(cache.select(0, from[i]).narrow(0, 0, tokens));
  }
}

/// The row of the cache [pages, page_size, h, d] of each new token, the last ones of their sequences.
std::vector<int64_t> target_rows(const at::Tensor& cache, const std::vector<int64_t>& table, int64_t pages_per_sequence,
                                 bool is_non_paged, const Sequences& cached, const Sequences& added) {
  const auto page_size = cache.size(1);
  std::vector<int64_t> rows;
  for (size_t i = 0; i < added.counts.size(); ++i)
    for (auto at = cached.counts[i] - added.counts[i]; at < cached.counts[i]; ++at) {
      const auto sequence = static_cast<int64_t>(i), entry = at / page_size;
      TORCH_CHECK_VALUE(at >= 0 && entry < pages_per_sequence, kCopyToKvCache, ": sequence ", i,
                        " has a token at position ", at, ", the cache has ", pages_per_sequence * page_size,
                        " positions for each sequence.");
      const auto page = is_non_paged ? sequence : table[static_cast<size_t>(sequence * pages_per_sequence + entry)];
      TORCH_CHECK_VALUE(page >= 0 && page < cache.size(0), kCopyToKvCache, ": sequence ", i, " has page ", page,
                        ", expected less than ", cache.size(0), ", the number of pages of the cache.");
      rows.push_back(page * page_size + at % page_size);
    }
  return rows;
}

void check_cache(const at::Tensor& added, const at::Tensor& cache, const char* which) {
  TORCH_CHECK_TYPE(added.scalar_type() == cache.scalar_type(), kCopyToKvCache, ": new ", which, " have dtype ",
                   added.scalar_type(), ", expected that of their cache, ", cache.scalar_type(), ".");
  TORCH_CHECK_VALUE(cache.dim() == 4 && cache.is_contiguous() && added.dim() >= 3 &&
                        added.sizes().slice(static_cast<size_t>(added.dim()) - 2) == cache.sizes().slice(2),
                    kCopyToKvCache, ": new ", which, " have shape ", added.sizes(), ", their cache ", cache.sizes(),
                    "; expected a contiguous cache [pages, rows, h, d] with equal h and d.");
}

}  // namespace

void copy_to_kv_cache(const at::Tensor& new_k, const at::Tensor& new_v, const at::Tensor& k_cache,
                      const at::Tensor& v_cache, const at::Tensor& page_table, const at::Tensor& cu_new_lens,
                      const at::Tensor& cu_cached_lens, QkvFormat qkv_format, int64_t b, int64_t /*max_ctx_len*/,
                      int64_t /*max_seq_len*/, int64_t max_pages_per_seq, bool is_non_paged) {
  check_cache(new_k, k_cache, "keys"), check_cache(new_v, v_cache, "values");
  TORCH_CHECK_VALUE(
      cu_new_lens.size(0) > b && cu_cached_lens.size(0) > b && page_table.numel() >= b * max_pages_per_seq,
      kCopyToKvCache, ": the page table has shape ", page_table.sizes(), " and the offsets ", cu_new_lens.sizes(),
      " and ", cu_cached_lens.sizes(), ", expected those of ", b, " sequences with ", max_pages_per_seq, " pages.");
  const auto added = read_sequences(cu_new_lens.narrow(0, 0, b + 1), {}, "cu_new_lens");
  const auto cached = read_sequences(cu_cached_lens.narrow(0, 0, b + 1), {}, "cu_cached_lens");
  auto table = read_offsets(page_table.reshape({-1}), "page_table");
  table.resize(static_cast<size_t>(b * max_pages_per_seq));
  const auto copy = [&](const at::Tensor& tokens, const at::Tensor& cache) {
    if (is_non_paged) move_sequences(cache, table, cached, added);
    const auto leading = tokens.sizes().slice(0, static_cast<size_t>(tokens.dim()) - 2);
    const auto values = token_rows(qkv_format, leading, added).gather(tokens, 2);
    const auto rows = target_rows(cache, table, max_pages_per_seq, is_non_paged, cached, added);
    cache.view({-1, cache.size(2), cache.size(3)}).index_copy_(0, index_tensor(rows), values);
  };
  copy(host(new_k), host(k_cache));
  copy(host(new_v), host(v_cache));
}

}  // namespace weft::te
