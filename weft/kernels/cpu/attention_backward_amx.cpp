#include <ATen/Parallel.h>

#include <atomic>
#include <memory>
#include <vector>

#include "weft/kernels/cpu/attention_blocks_amx.h"
#include "weft/kernels/cpu/shared_panels_amx.h"

// For each head, by regions of at most kKeyPanels × kQueryPanels blocks of scores Sᵀ, f = scale·log2 e:
//   P = 2^(f·S - log2 e·logsumexp);  dP = dO Vᵀ;  dS = P·(dP - δ),  δ = Σ_channels dO·O
//   dV += Pᵀ dO;  dK += scale·dSᵀ Q;  dQ += scale·dS K
// P and dS of a region stay in L2, packed as the operands of the three sums. While they are computed in vector
// registers, the tiles multiply the scores of the next block and the sums of the previous region.

namespace weft::kernels::CPU_CAPABILITY {
namespace {

constexpr int64_t kKeyPanels = 4, kQueryPanels = 8;
constexpr int64_t kRegionElems = kKeyPanels * kQueryPanels * kBlockElems;

/// P and dS of a region. The left operands are [key panel][query panel][block], the right operand
/// [query panel][key panel][block].
struct RegionBuffers {
  Bf16 *p_left, *ds_left, *ds_right;
};

/// Turns a block of Sᵀ and dPᵀ into P and dS.
class ScoreGradient : public VectorWork<ScoreGradient> {
 public:
  explicit ScoreGradient(float scale) : factor_(_mm512_set1_ps(scale * kLog2E)) {}

  /// `to` are the places of the block; `negative_lse` and `delta` are those of 32 queries.
  void start(const float* scores, const RegionBuffers& to, const float* negative_lse, const float* delta) {
    start_units(kBlockUnits);
    scores_ = scores, to_ = to;
    lse_ = {_mm512_load_ps(negative_lse), _mm512_load_ps(negative_lse + 16)};
    delta_ = {_mm512_load_ps(delta), _mm512_load_ps(delta + 16)};
  }

 private:
  friend VectorWork<ScoreGradient>;

  /// The rounding error of large scores must not make it more than 1. NaN stays NaN.
  [[gnu::always_inline]] __m512 probability(const float* s, __m512 lse) const {
    return exp2_of(_mm512_min_ps(_mm512_setzero_ps(), _mm512_fmadd_ps(_mm512_load_ps(s), factor_, lse)));
  }
  [[gnu::always_inline]] static __m512 gradient(__m512 p, const float* s, __m512 delta) {
    return _mm512_mul_ps(p, _mm512_sub_ps(_mm512_load_ps(s + kBlockElems), delta));
  }
  [[gnu::always_inline]] void unit(int u) const {
    const float *const s = unit_scores(scores_, u), *const high = s + kRightTile;
    auto low0 = probability(s, lse_.low), low1 = probability(s + kSecondKey, lse_.low);
    auto high0 = probability(high, lse_.high), high1 = probability(high + kSecondKey, lse_.high);
    _mm512_store_si512(to_.p_left + 64 * u, pack_bf16(low0, high0));
    _mm512_store_si512(to_.p_left + 64 * u + 32, pack_bf16(low1, high1));
    low0 = gradient(low0, s, delta_.low), low1 = gradient(low1, s + kSecondKey, delta_.low);
    high0 = gradient(high0, high, delta_.high), high1 = gradient(high1, high + kSecondKey, delta_.high);
    _mm512_store_si512(to_.ds_left + 64 * u, pack_bf16(low0, high0));
    _mm512_store_si512(to_.ds_left + 64 * u + 32, pack_bf16(low1, high1));
    _mm512_store_si512(to_.ds_right + 32 * u, interleave(pack_bf16(low0, low1)));
    _mm512_store_si512(to_.ds_right + kTileElems + 32 * u, interleave(pack_bf16(high0, high1)));
  }

  __m512 factor_;
  QueryLanes lse_ = {}, delta_ = {};
  const float* scores_ = nullptr;  // a block of Sᵀ, then one of dPᵀ
  RegionBuffers to_ = {};
};

/// One block of a sum: C += A B over `steps` k-steps.
struct SumGemm {
  const Bf16 *a, *b;
  float* c;
  int steps;
  bool accumulate;
  bool reuses_a;  // the next one has the same A; otherwise the same B
};

/// A block of scores within a region.
struct RegionBlock {
  int64_t key, query;  // panels, from those of the region
};

/// dK and dV of a range of keys, and what these keys contribute to dQ of the heads that share them.
class BackwardGroup {
 public:
  static int64_t scratch_bytes(int64_t query_panels, int64_t key_panels, int64_t steps) {
    const auto packed = (4 * query_panels + 3 * key_panels) * steps * kBlockElems * 2;
    const auto sums = (query_panels + 2 * key_panels) * steps * kBlockElems * 4;
    return packed + sums + 2 * 3 * kRegionElems * 2 + 2 * 2 * kBlockElems * 4 + 2 * query_panels * kBlockDim * 4;
  }
  BackwardGroup(const DenseAttention& d, ScratchMemory& memory)
      : visibility_(d),
        scale_(static_cast<float>(d.attention.scale)),
        steps_(static_cast<int>(panels_of(d.in.q.size(-1)))),
        queries_(panels_of(d.queries())),
        keys_(panels_of(d.keys())),
        vector_work_(scale_) {
    for (auto* p : {&k_rows_, &v_rows_, &k_channels_}) *p = memory.take<Bf16>(keys_ * steps_ * kBlockElems);
    for (auto* p : {&q_rows_, &do_rows_, &q_channels_, &do_channels_})
      *p = memory.take<Bf16>(queries_ * steps_ * kBlockElems);
    for (auto* p : {&dk_, &dv_}) *p = memory.take<float>(keys_ * steps_ * kBlockElems);
    dq_ = memory.take<float>(queries_ * steps_ * kBlockElems);
    for (auto& region : regions_)
      for (auto* p : {&region.p_left, &region.ds_left, &region.ds_right}) *p = memory.take<Bf16>(kRegionElems);
    for (auto& s : scores_) s = memory.take<float>(2 * kBlockElems);
    for (auto* p : {&negative_lse_, &delta_}) *p = memory.take<float>(queries_ * kBlockDim);
  }

  /// Packs a range of the keys and starts the sums dK and dV.
  void start(const HeadRows& k, const HeadRows& v, Range range) {
    range_ = range;
    seen_by_ = queries_of(range);
    pack_rows(k, /*left=*/true, range, k_rows_);
    pack_rows(v, /*left=*/true, range, v_rows_);
    pack_channels(k, /*left=*/true, range, keys_, k_channels_);
    has_key_sums_.assign(keys_, false);
  }

  /// Adds a head to dK and dV, and computes dQ/scale.
  void add_head(const HeadRows& q, const HeadRows& out, const HeadRows& dout, const float* logsumexp) {
    if (seen_by_.size() > 0) {
      pack_rows(q, /*left=*/false, seen_by_, q_rows_);
      pack_rows(dout, /*left=*/false, seen_by_, do_rows_);
      pack_channels(q, /*left=*/false, seen_by_, queries_, q_channels_);
      pack_channels(dout, /*left=*/false, seen_by_, queries_, do_channels_);
      load_statistics(out, dout, logsumexp);
    }
    has_query_sums_.assign(queries_, false);
    with_units_per_step(int64_t{5} * steps_, [&]<int kUnits>() { run_regions<kUnits>(); });
    for (int64_t panel = 0; panel < queries_; ++panel)
      if (!has_query_sums_[panel]) std::fill_n(dq_ + panel * steps_ * kBlockElems, steps_ * kBlockElems, 0.F);
  }

  /// dQ/scale of a head: [panel][channel panel][block].
  float* dq() const { return dq_; }
  /// Adds up `parts` consecutive dQ/scale in place and stores the sum.
  void store_dq(float* sums, int64_t parts, const HeadRows& dq) const {
    const QueryLanes scale{_mm512_set1_ps(scale_), _mm512_set1_ps(scale_)};
    const auto elements = queries_ * steps_ * kBlockElems;
    for (int64_t panel = 0; panel < queries_; ++panel)
      for (int64_t channel = 0; channel < steps_; ++channel) {
        float* const block = sums + (panel * steps_ + channel) * kBlockElems;
        for (int64_t part = 1; part < parts; ++part)
          for (int i = 0; i < kBlockElems; ++i) block[i] += block[part * elements + i];
        store_transposed(block, scale, dq, panel * kBlockDim, channel * kBlockDim);
      }
  }

  void store(const HeadRows& dk, const HeadRows& dv) {
    for (int64_t panel = range_.begin; panel < range_.end; ++panel)
      for (int64_t channel = 0; channel < steps_; ++channel) {
        store_block(sum(dk_, panel, channel, has_key_sums_), scale_, dk, panel * kBlockDim, channel * kBlockDim);
        store_block(sum(dv_, panel, channel, has_key_sums_), 1, dv, panel * kBlockDim, channel * kBlockDim);
      }
  }

 private:
  /// A block of a sum; zero if nothing was added to its panel.
  float* sum(float* sums, int64_t panel, int64_t channel, const std::vector<bool>& has_sum) const {
    float* const block = sums + (panel * steps_ + channel) * kBlockElems;
    if (!has_sum[panel]) std::fill_n(block, kBlockElems, 0.F);
    return block;
  }

  /// Packs some panels of rows for GEMMs over the channels.
  void pack_rows(const HeadRows& t, bool left, Range range, Bf16* to) const {
    pack_panels(t.operand(left, /*by_channel=*/false), range.begin * kBlockDim, range.size(), 0, steps_,
                to + range.begin * steps_ * kBlockElems);
  }
  /// Packs the channels for GEMMs over some of the `panels` panels of rows.
  void pack_channels(const HeadRows& t, bool left, Range range, int64_t panels, Bf16* to) const {
    pack_panels(t.operand(left, /*by_channel=*/true), 0, steps_, range.begin * kKStep, static_cast<int>(range.size()),
                to + range.begin * kBlockElems, panels * kBlockElems);
  }

  /// Fills δ and -log2 e·logsumexp; the latter is -inf for queries that see no key, so that their P is 0.
  void load_statistics(const HeadRows& out, const HeadRows& dout, const float* logsumexp) {
    for (int64_t row = seen_by_.begin * kBlockDim; row < seen_by_.end * kBlockDim; ++row) {
      const bool sees_keys = row < out.rows && logsumexp[row] != -kInfinity;
      negative_lse_[row] = sees_keys ? -logsumexp[row] * kLog2E : -kInfinity;
      auto dot = _mm512_setzero_ps();
      for (int64_t c = 0; sees_keys && c < out.columns; c += 16) {
        const auto mask = lane_mask(out.columns - c);
        const auto load = [&](const HeadRows& t) {
          return widen_bf16(_mm256_maskz_loadu_epi16(mask, t.data + row * t.ld + c));
        };
        dot = _mm512_fmadd_ps(load(out), load(dout), dot);
      }
      delta_[row] = _mm512_reduce_add_ps(dot);
    }
  }

  template <int kUnits>
  void run_regions() {
    pending_.clear(), done_ = 0;
    for (int64_t key = range_.begin; key < range_.end; key += kKeyPanels) {
      const Range keys{key, std::min(key + kKeyPanels, range_.end)};
      const auto queries = queries_of(keys);
      for (auto query = queries.begin; query < queries.end; query += kQueryPanels)
        run_region<kUnits>(keys, {query, std::min(query + kQueryPanels, queries.end)});
    }
    tile_fence();
    multiply_sums<kUnits>(pending_.size());
  }

  /// The panels of queries that see any key of several panels.
  Range queries_of(Range keys) const {
    Range all{queries_, 0};
    for (auto key = keys.begin; key < keys.end; ++key) {
      const auto seen = visibility_.queries_of(key);
      if (seen.size() > 0) all = {std::min(all.begin, seen.begin), std::max(all.end, seen.end)};
    }
    return all;
  }

  /// Computes P and dS of a region and runs the sums of the previous one. Leaves those of this region in `pending_`.
  template <int kUnits>
  void run_region(Range keys, Range queries) {
    list_blocks(keys, queries);
    if (blocks_.empty()) return;
    const auto& buffers = regions_[region_ ^= 1];
    const auto sums = pending_.size();
    for (size_t n = 0; n < blocks_.size(); ++n) {
      const auto [key, query] = blocks_[n];
      float* const scores = scores_[n % 2];
      multiply_scores<kUnits>(keys.begin + key, queries.begin + query, scores);
      multiply_sums<kUnits>(sums * (n + 1) / blocks_.size());
      vector_work_.finish();
      visibility_.mask(scores, queries.begin + query, keys.begin + key);
      const auto left = (key * kQueryPanels + query) * kBlockElems, right = (query * kKeyPanels + key) * kBlockElems;
      const auto row = (queries.begin + query) * kBlockDim;
      vector_work_.start(scores, {buffers.p_left + left, buffers.ds_left + left, buffers.ds_right + right},
                         negative_lse_ + row, delta_ + row);
    }
    vector_work_.finish();
    tile_fence();
    list_sums(buffers, keys, queries);
  }

  /// Fills `blocks_` with the blocks in which a query sees a key.
  void list_blocks(Range keys, Range queries) {
    blocks_.clear();
    for (auto query = queries.begin; query < queries.end; ++query) {
      const auto seen = within(visibility_.keys_of(query), keys);
      for (auto key = seen.begin; key < seen.end; ++key) blocks_.push_back({key - keys.begin, query - queries.begin});
    }
  }

  /// Fills `pending_` with the sums of a region.
  void list_sums(const RegionBuffers& from, Range keys, Range queries) {
    pending_.clear(), done_ = 0;
    for (int64_t channel = 0; channel < steps_; ++channel)
      for (const bool values : {true, false})
        for (auto key = keys.begin; key < keys.end; ++key) {
          const auto seen = within(visibility_.queries_of(key), queries);
          if (seen.size() <= 0) continue;
          const auto left = ((key - keys.begin) * kQueryPanels + seen.begin - queries.begin) * kBlockElems;
          pending_.push_back(
              {.a = (values ? from.p_left : from.ds_left) + left,
               .b = (values ? do_channels_ : q_channels_) + (channel * queries_ + seen.begin) * kBlockElems,
               .c = (values ? dv_ : dk_) + (key * steps_ + channel) * kBlockElems,
               .steps = static_cast<int>(seen.size()),
               .accumulate = has_key_sums_[key],
               .reuses_a = false});
        }
    for (int64_t channel = 0; channel < steps_; ++channel)
      for (auto query = queries.begin; query < queries.end; ++query) {
        const auto seen = within(visibility_.keys_of(query), keys);
        if (seen.size() <= 0) continue;
        const auto right = ((query - queries.begin) * kKeyPanels + seen.begin - keys.begin) * kBlockElems;
        pending_.push_back({.a = k_channels_ + (channel * keys_ + seen.begin) * kBlockElems,
                            .b = from.ds_right + right,
                            .c = dq_ + (query * steps_ + channel) * kBlockElems,
                            .steps = static_cast<int>(seen.size()),
                            .accumulate = has_query_sums_[query],
                            .reuses_a = true});
      }
    for (const auto& [key, query] : blocks_)
      has_key_sums_[keys.begin + key] = has_query_sums_[queries.begin + query] = true;
  }

  /// Sᵀ = K Qᵀ and dPᵀ = V dOᵀ of a block.
  template <int kUnits>
  void multiply_scores(int64_t key, int64_t query, float* scores) {
    const auto a = key * steps_ * kBlockElems, b = query * steps_ * kBlockElems;
    auto work = vector_work_;  // a local object stays in registers
    const auto vector_work = [&](int) __attribute__((always_inline)) { work.run<kUnits>(); };
    tile_fence();
    gemm_microkernel<false>(k_rows_ + a, q_rows_ + b, steps_, scores, /*accumulate=*/false, vector_work);
    gemm_microkernel<false>(v_rows_ + a, do_rows_ + b, steps_, scores + kBlockElems, /*accumulate=*/false, vector_work);
    tile_fence();
    vector_work_ = work;
  }

  /// Runs the pending sums up to number `end`.
  template <int kUnits>
  void multiply_sums(size_t end) {
    auto work = vector_work_;
    const auto vector_work = [&](int) __attribute__((always_inline)) { work.run<kUnits>(); };
    for (; done_ < end; ++done_) {
      const auto& s = pending_[done_];
      s.reuses_a ? gemm_microkernel<true>(s.a, s.b, s.steps, s.c, s.accumulate, vector_work)
                 : gemm_microkernel<false>(s.a, s.b, s.steps, s.c, s.accumulate, vector_work);
    }
    tile_fence();
    vector_work_ = work;
  }

  static Range within(Range range, Range bounds) {
    return {std::max(range.begin, bounds.begin), std::min(range.end, bounds.end)};
  }

  Visibility visibility_;
  float scale_;
  int steps_;               // k-steps over the channels, and their panels
  int64_t queries_, keys_;  // panels
  Range range_{0, 0};       // of the keys
  Range seen_by_{0, 0};     // queries
  ScoreGradient vector_work_;
  Bf16 *k_rows_, *v_rows_, *k_channels_;                  // left operands
  Bf16 *q_rows_, *do_rows_, *q_channels_, *do_channels_;  // right operands, of a head
  float *dk_, *dv_, *dq_;                                 // [panel][channel panel][block]; dQᵀ of a head
  std::vector<bool> has_key_sums_, has_query_sums_;       // whether the sums of a panel hold a value
  RegionBuffers regions_[2];
  int region_ = 0;
  float* scores_[2];
  float *negative_lse_, *delta_;
  std::vector<RegionBlock> blocks_;
  std::vector<SumGemm> pending_;
  size_t done_ = 0;  // of `pending_`
};

/// Splits the panels of keys into ranges of about equal work, as many as there are threads for each group. `sums`:
/// bytes of dQ of one range.
std::vector<Range> split_keys(const DenseAttention& d, int64_t groups, int64_t sums) {
  constexpr int64_t kMaxSums = 64 << 20;
  const auto panels = panels_of(d.keys());
  const auto limit = std::max<int64_t>(1, std::min(panels / kKeyPanels, kMaxSums / sums));
  const auto parts = std::clamp<int64_t>(thread_count() / groups, 1, limit);
  const Visibility visibility(d);
  std::vector<int64_t> work(panels + 1, 0);  // of the panels before
  for (int64_t key = 0; key < panels; ++key) work[key + 1] = work[key] + visibility.queries_of(key).size() + 1;
  std::vector<Range> ranges;
  for (int64_t part = 0, begin = 0; part < parts; ++part) {
    const auto bound = std::lower_bound(work.begin(), work.end(), work[panels] * (part + 1) / parts);
    const auto end = part + 1 == parts ? panels : std::max(begin, bound - work.begin());
    ranges.push_back({begin, end});
    begin = end;
  }
  return ranges;
}

/// The sums dQ/scale of each head over parts of the keys, and how many parts are done. Empty with one part.
struct QuerySums {
  QuerySums(int64_t heads, int64_t parts, int64_t elements)
      : sums(parts > 1 ? c10::GetCPUAllocator()->allocate(heads * parts * elements * 4) : at::DataPtr()),
        done(std::make_unique<std::atomic<int64_t>[]>(heads)) {}

  at::DataPtr sums;
  std::unique_ptr<std::atomic<int64_t>[]> done;
};

}  // namespace

void attention_backward(const DenseAttention& d, const at::Tensor& dout, const Qkv& grads) {
  const auto groups = d.in.q.size(2), per_group = d.heads_per_group(), steps = panels_of(d.in.q.size(-1));
  const auto heads = d.batch() * d.heads(), elements = panels_of(d.queries()) * steps * kBlockElems;
  const auto ranges = split_keys(d, d.batch() * groups, heads * elements * 4);
  const auto parts = static_cast<int64_t>(ranges.size());
  const QuerySums query_sums(heads, parts, elements);
  const auto q = Heads::read(d.in.q), k = Heads::read(d.in.k), v = Heads::read(d.in.v), out = Heads::read(d.out),
             g_out = Heads::read(dout);
  const auto dq = Heads::written(grads.q), dk = Heads::written(grads.k), dv = Heads::written(grads.v);
  const auto* const logsumexp = d.logsumexp.const_data_ptr<float>();
  at::parallel_for(0, d.batch() * groups * parts, 1, [&](int64_t begin, int64_t end) {
    ScratchMemory memory(BackwardGroup::scratch_bytes(panels_of(d.queries()), panels_of(d.keys()), steps));
    BackwardGroup backward(d, memory);
    const TileConfig tiles;
    // Stores dQ of a head when all parts of the keys are done.
    const auto finish_head = [&](int64_t number, int64_t part, const HeadRows& to) {
      if (parts == 1) return backward.store_dq(backward.dq(), 1, to);
      auto* const sums = static_cast<float*>(query_sums.sums.get()) + number * parts * elements;
      std::copy_n(backward.dq(), elements, sums + part * elements);
      if (query_sums.done[number].fetch_add(1, std::memory_order_acq_rel) + 1 == parts)
        backward.store_dq(sums, parts, to);
    };
    for (auto i = begin; i < end; ++i) {
      const auto part = i % parts, group = i / parts, batch = group / groups, g = group % groups;
      backward.start(k.rows(batch, g), v.rows(batch, g), ranges[part]);
      for (int64_t head = 0; head < per_group; ++head) {
        backward.add_head(q.rows(batch, g, head), out.rows(batch, g, head), g_out.rows(batch, g, head),
                          logsumexp + statistics_offset(d.logsumexp, batch, g * per_group + head));
        finish_head(group * per_group + head, part, dq.rows(batch, g, head));
      }
      backward.store(dk.rows(batch, g), dv.rows(batch, g));
    }
    _mm_sfence();
  });
}

}  // namespace weft::kernels::CPU_CAPABILITY

namespace weft::kernels::amx {
void attention_backward(const DenseAttention& dense, const at::Tensor& dout, const Qkv& grads) {
  CPU_CAPABILITY::attention_backward(dense, dout, grads);
}
}  // namespace weft::kernels::amx
