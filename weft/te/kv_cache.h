#pragma once
#include <ATen/core/Tensor.h>

#include "weft/te/enums.h"

namespace weft::te {

/// Copies the new tokens of `b` sequences to a cache [pages, rows of a page, h, d]. `cu_cached_lens` counts the new
/// tokens. A cache that is not paged has one page for each sequence, and `page_table` says which sequence of the step
/// before each one is: its tokens are moved first.
void copy_to_kv_cache(const at::Tensor& new_k, const at::Tensor& new_v, const at::Tensor& k_cache,
                      const at::Tensor& v_cache, const at::Tensor& page_table, const at::Tensor& cu_new_lens,
                      const at::Tensor& cu_cached_lens, QkvFormat qkv_format, int64_t b, int64_t max_ctx_len,
                      int64_t max_seq_len, int64_t max_pages_per_seq, bool is_non_paged);

}  // namespace weft::te
