#pragma once
#include <c10/core/CPUAllocator.h>

#include <limits>

#include "weft/kernels/attention_tiers.h"
#include "weft/kernels/cpu/epilogue_rows_amx.h"

// What the forward and the backward pass of attention on AMX tiles share. Included by attention_*_amx.cpp only.
//
// Scores are computed transposed, Sᵀ = K Qᵀ, by blocks of 32 keys × 32 queries: a vector register then holds 16 queries
// of one key, so that the statistics of a query (maximum, sum, logsumexp) need no reduction across lanes. A panel is 32
// keys, 32 queries or 32 channels; the last one is padded with zeros.

namespace weft::kernels::CPU_CAPABILITY {

constexpr float kLog2E = 1.44269504F, kLn2 = 0.693147181F;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Rows of one head: `rows` of `columns` adjacent elements, `ld` elements apart.
struct HeadRows {
  Bf16* data;
  int64_t ld, rows, columns;

  /// Whether rows of blocks can be stored with non-temporal stores.
  bool allows_non_temporal() const {
    return reinterpret_cast<uintptr_t>(data) % 64 == 0 && ld % kBlockDim == 0 && columns % kBlockDim == 0;
  }
  /// The rows, or the channels if `by_channel`, as the left or the right operand of a GEMM over the other dimension.
  Operand operand(bool left, bool by_channel) const {
    return {.data = data,
            .ld = ld,
            .extent = by_channel ? columns : rows,
            .k = by_channel ? rows : columns,
            .left = left,
            .k_contiguous = !by_channel};
  }
};

/// The heads of [batch, T, groups, heads, D], or of [batch, T, groups, D] with one head per group.
class Heads {
 public:
  static Heads read(const at::Tensor& t) { return {t, const_cast<void*>(t.const_data_ptr())}; }
  static Heads written(const at::Tensor& t) { return {t, t.mutable_data_ptr()}; }

  HeadRows rows(int64_t batch, int64_t group, int64_t head = 0) const {
    return {data_ + batch * batch_stride_ + group * group_stride_ + head * head_stride_, ld_, rows_, columns_};
  }

 private:
  Heads(const at::Tensor& t, void* data)
      : data_(static_cast<Bf16*>(data)),
        batch_stride_(t.stride(0)),
        group_stride_(t.stride(2)),
        head_stride_(t.dim() == 5 ? t.stride(3) : 0),
        ld_(t.stride(1)),
        rows_(t.size(1)),
        columns_(t.size(-1)) {}

  Bf16* data_;
  int64_t batch_stride_, group_stride_, head_stride_, ld_, rows_, columns_;
};

/// Offset of the statistics of one head in logsumexp [batch, heads, T], contiguous along T.
inline int64_t statistics_offset(const at::Tensor& logsumexp, int64_t batch, int64_t head) {
  return batch * logsumexp.stride(0) + head * logsumexp.stride(1);
}

/// Packs all of an operand, panel after panel, each over all of its k.
inline void pack_all(const Operand& m, Bf16* to) {
  pack_panels(m, 0, m.panels(), 0, static_cast<int>(panels_of(m.k)), to);
}

/// Which queries see which keys: query i sees the keys from i - before to i + after.
class Visibility {
 public:
  explicit Visibility(const DenseAttention& d)
      : queries_(d.queries()),
        keys_(d.keys()),
        before_((d.attention.left < 0 ? kAll : d.attention.left) + d.first_distance()),
        after_((d.attention.right < 0 ? kAll : d.attention.right) - d.first_distance()) {}

  /// The panels of keys that any query of a panel sees.
  Range keys_of(int64_t query_panel) const { return seen(query_panel, queries_, before_, after_, keys_); }
  /// The panels of queries that see any key of a panel.
  Range queries_of(int64_t key_panel) const { return seen(key_panel, keys_, after_, before_, queries_); }

  /// Sets the scores of a block to -inf where a query does not see a key, and for keys past the last one.
  void mask(float* scores, int64_t query_panel, int64_t key_panel) const {
    const auto query = query_panel * kBlockDim, key = key_panel * kBlockDim;
    const bool all_seen =
        key + kBlockDim <= keys_ && key >= query + kBlockDim - 1 - before_ && key + kBlockDim - 1 <= query + after_;
    if (all_seen) return;
    const auto hidden = _mm512_set1_ps(-kInfinity);
    for (int row = 0; row < kBlockDim; ++row) {
      const auto low = std::clamp<int64_t>(key + row - after_ - query, 0, kBlockDim);
      const auto high = key + row < keys_ ? std::clamp<int64_t>(key + row + before_ + 1 - query, low, kBlockDim) : low;
      const auto lanes = static_cast<uint32_t>(~((uint64_t{1} << high) - (uint64_t{1} << low)));
      float* const s = block_row(scores, row);
      _mm512_mask_store_ps(s, static_cast<__mmask16>(lanes), hidden);
      _mm512_mask_store_ps(s + kRightTile, static_cast<__mmask16>(lanes >> 16), hidden);
    }
  }

 private:
  static constexpr int64_t kAll = int64_t{1} << 41;  // more than any distance between positions

  /// The panels of [0, extent) within `before` and `after` of the positions of a panel of [0, count).
  static Range seen(int64_t panel, int64_t count, int64_t before, int64_t after, int64_t extent) {
    const auto first = panel * kBlockDim, last = std::min(first + kBlockDim, count) - 1;
    const auto low = std::clamp<int64_t>(first - before, 0, extent),
               high = std::clamp<int64_t>(last + after + 1, low, extent);
    return low == high ? Range{0, 0} : Range{low / kBlockDim, panels_of(high)};
  }

  int64_t queries_, keys_, before_, after_;
};

/// Two vectors: the queries 0 to 15 and 16 to 31 of a panel.
struct QueryLanes {
  __m512 low, high;
};

/// Scratch memory of a thread, aligned to cache lines and freed with this object.
class ScratchMemory {
 public:
  explicit ScratchMemory(int64_t bytes) : memory_(c10::GetCPUAllocator()->allocate(bytes)), size_(bytes) {}
  template <class T>
  T* take(int64_t count) {
    auto* const start = static_cast<char*>(memory_.get()) + used_;
    used_ += count * static_cast<int64_t>(sizeof(T));
    TORCH_INTERNAL_ASSERT(used_ % 64 == 0 && used_ <= size_);
    return reinterpret_cast<T*>(start);
  }

 private:
  at::DataPtr memory_;
  int64_t size_, used_ = 0;
};

/// Stores 16 rows of 32 channels at a row and column of `to`, without those past its end.
inline void store_lines(const __m512i* lines, const HeadRows& to, int64_t row, int64_t column) {
  const auto rows = std::min<int64_t>(16, to.rows - row), columns = to.columns - column;
  const bool non_temporal = to.allows_non_temporal();
  const auto lanes = columns >= kBlockDim ? ~__mmask32{0} : (__mmask32{1} << columns) - 1;
  auto* p = to.data + row * to.ld + column;
  for (int64_t i = 0; i < rows; ++i, p += to.ld)
    non_temporal ? _mm512_stream_si512(reinterpret_cast<__m512i*>(p), lines[i])
                 : _mm512_mask_storeu_epi16(p, lanes, lines[i]);
}

/// Stores a block of 32 channels × 32 queries, times one factor per query, transposed as rows of queries.
inline void store_transposed(const float* block, const QueryLanes& factors, const HeadRows& to, int64_t row,
                             int64_t column) {
  for (int half = 0; half < 2; ++half) {
    const auto factor = half ? factors.high : factors.low;
    const auto channel = [&](int i) {  // of 32, for 16 queries
      return _mm512_mul_ps(_mm512_load_ps(block_row(block, i) + half * kRightTile), factor);
    };
    __m512i lines[16];
    for (int i = 0; i < 16; ++i) lines[i] = interleave(pack_bf16(channel(2 * i), channel(2 * i + 1)));
    transpose16(lines);
    store_lines(lines, to, row + 16 * half, column);
  }
}

/// Stores a block of 32 rows × 32 channels, times `factor`.
inline void store_block(const float* block, float factor, const HeadRows& to, int64_t row, int64_t column) {
  const auto scale = _mm512_set1_ps(factor);
  for (int half = 0; half < 2; ++half) {
    __m512i lines[16];
    for (int i = 0; i < 16; ++i) {
      const float* const c = block_row(block, 16 * half + i);
      lines[i] =
          pack_bf16(_mm512_mul_ps(_mm512_load_ps(c), scale), _mm512_mul_ps(_mm512_load_ps(c + kRightTile), scale));
    }
    store_lines(lines, to, row + 16 * half, column);
  }
}

/// 2^t to 2.6e-6, 0 for -inf.
[[gnu::always_inline]] inline __m512 exp2_of(__m512 t) {
  return exp2<ActPrecision::bfloat16>(Vec(t), fraction(Vec(t)));
}

/// log2(x) for normal x > 0. With x = m·2^e, 2/3 ≤ m < 4/3:  log2(m) = 2/ln 2·artanh((m - 1)/(m + 1)).
inline __m512 log2_of(__m512 x) {
  const auto one = _mm512_set1_ps(1.F);
  auto e = _mm512_getexp_ps(x), m = _mm512_getmant_ps(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
  const auto large = _mm512_cmp_ps_mask(m, _mm512_set1_ps(4.F / 3), _CMP_GE_OQ);
  m = _mm512_mask_mul_ps(m, large, m, _mm512_set1_ps(0.5F));
  e = _mm512_mask_add_ps(e, large, e, one);
  const auto t = _mm512_div_ps(_mm512_sub_ps(m, one), _mm512_add_ps(m, one)), z = _mm512_mul_ps(t, t);
  auto sum = _mm512_set1_ps(2 * kLog2E / 9);
  for (const float divisor : {7.F, 5.F, 3.F, 1.F}) sum = _mm512_fmadd_ps(sum, z, _mm512_set1_ps(2 * kLog2E / divisor));
  return _mm512_fmadd_ps(sum, t, e);
}

constexpr int kBlockUnits = 16;  // of VectorWork, in a block of scores: 2 keys × 32 queries each

/// Work in vector registers that runs between tile multiplications, some units at a time. `Derived` has unit(number).
template <class Derived>
class VectorWork {
 public:
  template <int kUnits>
  [[gnu::always_inline]] void run() {
    if (next_ >= units_) return;
#pragma GCC unroll 8
    for (int i = 0; i < kUnits; ++i) static_cast<Derived*>(this)->unit(next_ + i);
    next_ += kUnits;
  }
  void finish() {
    for (; next_ < units_; ++next_) static_cast<Derived*>(this)->unit(next_);
  }

 protected:
  void start_units(int units) { next_ = 0, units_ = units; }

 private:
  int next_ = 0, units_ = 0;
};

/// Scores of the two keys of a unit: of the first, of the second kSecondKey further.
constexpr int kSecondKey = 16;
inline const float* unit_scores(const float* scores, int unit) { return block_row(scores, 2 * unit); }

/// Units of vector work to run in each k-step of the tile multiplications, if a block has `steps` k-steps: the least
/// power of two that finishes them.
constexpr int units_per_step(int64_t steps) {
  int units = 8;
  while (units > 1 && units / 2 * steps >= kBlockUnits) units /= 2;
  return units;
}
/// Calls run.template operator()<units_per_step(steps)>().
template <class Run>
void with_units_per_step(int64_t steps, const Run& run) {
  switch (units_per_step(steps)) {
    case 8:
      return run.template operator()<8>();
    case 4:
      return run.template operator()<4>();
    case 2:
      return run.template operator()<2>();
    default:
      return run.template operator()<1>();
  }
}

}  // namespace weft::kernels::CPU_CAPABILITY
