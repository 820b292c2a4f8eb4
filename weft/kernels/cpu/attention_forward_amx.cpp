#include <ATen/Parallel.h>

#include <cfloat>
#include <vector>

#include "weft/kernels/cpu/attention_blocks_amx.h"
#include "weft/kernels/cpu/shared_panels_amx.h"

// For each panel of queries, over groups of at most kGroupPanels panels of keys with scores Sᵀ, f = scale·log2 e:
//   m' = max(m, max_keys S);  P = 2^(f·(S - m'));  l' = l·2^(f·(m - m')) + Σ_keys P;  Oᵀ' = Oᵀ·2^(f·(m - m')) + Vᵀ Pᵀ
// and at the end out = O/l, logsumexp = ln 2·(f·m + log2 l). While P of a group is computed in vector registers, the
// tiles multiply the scores of the next group and the values of the previous one.

namespace weft::kernels::CPU_CAPABILITY {
namespace {

constexpr int kGroupPanels = 2;

/// Consecutive panels of keys for one panel of queries.
struct KeyGroup {
  int64_t query_panel, key_panel;
  int panels;
  bool first, last;  // of the panel of queries
};

/// The running maximum and sum of a panel of queries, and the probabilities of a group.
class Softmax : public VectorWork<Softmax> {
 public:
  explicit Softmax(float scale) : factor_(_mm512_set1_ps(scale * kLog2E)) {}

  /// Starts the probabilities of a group from its scores. Returns whether the maximum changed, so that earlier sums
  /// must be multiplied by `correction`.
  bool start(const float* scores, Bf16* probabilities, const KeyGroup& group, QueryLanes& correction) {
    start_units(group.panels * kBlockUnits);
    scores_ = scores, probabilities_ = probabilities;
    if (group.first) maximum_ = {_mm512_set1_ps(-FLT_MAX), _mm512_set1_ps(-FLT_MAX)};
    if (group.first) sum_ = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    auto low = maximum_.low, high = maximum_.high;
    for (const float* s = scores; s < scores + group.panels * kBlockElems; s += kLowerTiles)
      for (int row = 0; row < kRightTile; row += 16) {
        low = _mm512_max_ps(low, _mm512_load_ps(s + row));
        high = _mm512_max_ps(high, _mm512_load_ps(s + kRightTile + row));
      }
    const auto changed_low = _mm512_cmp_ps_mask(low, maximum_.low, _CMP_GT_OQ),
               changed_high = _mm512_cmp_ps_mask(high, maximum_.high, _CMP_GT_OQ);
    if ((changed_low | changed_high) == 0) return false;
    const auto one = _mm512_set1_ps(1.F);  // exactly, so that no error builds up over the groups
    correction = {_mm512_mask_mov_ps(one, changed_low, power(maximum_.low, low)),
                  _mm512_mask_mov_ps(one, changed_high, power(maximum_.high, high))};
    sum_ = {_mm512_mul_ps(sum_.low, correction.low), _mm512_mul_ps(sum_.high, correction.high)};
    maximum_ = {low, high};
    return !group.first;
  }

  /// 1/l, or 0 for queries that see no key.
  QueryLanes inverse_sum() const { return {inverse(sum_.low), inverse(sum_.high)}; }
  QueryLanes logsumexp() const { return {logsumexp(maximum_.low, sum_.low), logsumexp(maximum_.high, sum_.high)}; }

 private:
  friend VectorWork<Softmax>;

  /// 2^(f·(s - maximum)). The difference is rounded first: it is exact near the maximum, whatever its size.
  [[gnu::always_inline]] __m512 power(__m512 s, __m512 maximum) const {
    return exp2_of(_mm512_mul_ps(_mm512_sub_ps(s, maximum), factor_));
  }
  /// Reads the rows of two keys, writes one row of each tile of a right operand.
  [[gnu::always_inline]] void unit(int u) {
    const float *const s = unit_scores(scores_, u), *const high = s + kRightTile;
    Bf16* const p = probabilities_ + 32 * (u + (u & ~15));
    const auto low0 = power(_mm512_load_ps(s), maximum_.low),
               low1 = power(_mm512_load_ps(s + kSecondKey), maximum_.low);
    const auto high0 = power(_mm512_load_ps(high), maximum_.high),
               high1 = power(_mm512_load_ps(high + kSecondKey), maximum_.high);
    sum_.low = _mm512_add_ps(sum_.low, _mm512_add_ps(low0, low1));
    sum_.high = _mm512_add_ps(sum_.high, _mm512_add_ps(high0, high1));
    _mm512_store_si512(p, interleave(pack_bf16(low0, low1)));
    _mm512_store_si512(p + kTileElems, interleave(pack_bf16(high0, high1)));
  }
  static __m512 inverse(__m512 sum) {
    const auto seen = _mm512_cmp_ps_mask(sum, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    return _mm512_maskz_div_ps(seen, _mm512_set1_ps(1.F), sum);
  }
  __m512 logsumexp(__m512 maximum, __m512 sum) const {
    const auto seen = _mm512_cmp_ps_mask(sum, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    const auto value = _mm512_mul_ps(_mm512_fmadd_ps(maximum, factor_, log2_of(sum)), _mm512_set1_ps(kLn2));
    return _mm512_mask_mov_ps(_mm512_set1_ps(-kInfinity), seen, value);
  }

  __m512 factor_;
  QueryLanes maximum_ = {}, sum_ = {};
  const float* scores_ = nullptr;
  Bf16* probabilities_ = nullptr;
};

/// Keys and values of a group of heads, packed: K by rows, V by channels.
struct PackedKeys {
  const Bf16 *k, *v;
  int64_t panels;
};

/// An operand that several threads pack together, or this thread alone.
class GroupOperand {
 public:
  /// For `threads` that pack it together as one of `shared`.
  GroupOperand(const Operand& m, int threads, SharedOperands& shared) : m_(m) {
    const auto steps = static_cast<int>(panels_of(m.k));
    if (threads > 1) shared_ = shared.add(m, PackingPieces::choose(m, steps, steps, m.panels(), threads));
  }
  /// The packed operand. `own` receives it if it is not shared, or if another thread takes too long.
  const Bf16* pack(int64_t part, int64_t parts, Bf16* own) {
    const auto first = share_of(m_.panels(), part, parts).begin;  // each thread starts at another panel
    for (int64_t i = 0; shared_ && i < m_.panels(); ++i) shared_->pack_free((first + i) % m_.panels(), 0);
    for (int64_t i = 0; i < m_.panels(); ++i)
      if (!shared_ || !shared_->wait(i, 0)) {
        pack_all(m_, own);
        return own;
      }
    return shared_->find(0, 0);
  }

 private:
  Operand m_;
  SharedPanels* shared_ = nullptr;  // null: this thread packs it alone
};

/// Attention of a range of query panels of one head.
class ForwardHead {
 public:
  static int64_t scratch_bytes(int64_t channel_panels) {
    return channel_panels * kBlockElems * (2 + 4) + int64_t{2} * kGroupPanels * kBlockElems * (4 + 2);
  }
  ForwardHead(const DenseAttention& d, ScratchMemory& memory)
      : visibility_(d), softmax_(static_cast<float>(d.attention.scale)), steps_(panels_of(d.in.q.size(-1))) {
    q_ = memory.take<Bf16>(steps_ * kBlockElems);
    out_ = memory.take<float>(steps_ * kBlockElems);
    for (auto& s : scores_) s = memory.take<float>(kGroupPanels * kBlockElems);
    for (auto& p : probabilities_) p = memory.take<Bf16>(kGroupPanels * kBlockElems);
  }

  void run(const HeadRows& q, const PackedKeys& keys, const HeadRows& out, float* logsumexp, Range query_panels) {
    plan(query_panels, out, logsumexp);
    with_units_per_step(2 * steps_, [&]<int kUnits>() {
      const auto count = static_cast<int64_t>(groups_.size());
      for (int64_t n = -1; n <= count; ++n) {
        const bool exponentiates = n >= 0 && n < count;
        bool corrects = false;
        QueryLanes correction{};
        if (exponentiates) corrects = start_softmax(n, correction);
        multiply<kUnits>(n, q, keys);
        if (n >= 1 && groups_[n - 1].last) store(groups_[n - 1].query_panel, out);
        if (exponentiates) finish_softmax(groups_[n], logsumexp, out.rows);
        if (corrects) correct(correction);
      }
    });
  }

 private:
  /// Lists the groups. Queries that see no key get their results at once.
  void plan(Range query_panels, const HeadRows& out, float* logsumexp) {
    groups_.clear();
    for (auto panel = query_panels.begin; panel < query_panels.end; ++panel) {
      const auto keys = visibility_.keys_of(panel);
      for (auto key = keys.begin; key < keys.end; key += kGroupPanels)
        groups_.push_back({panel, key, static_cast<int>(std::min<int64_t>(kGroupPanels, keys.end - key)),
                           key == keys.begin, key + kGroupPanels >= keys.end});
      if (keys.size() > 0) continue;
      for (auto row = panel * kBlockDim; row < std::min(out.rows, (panel + 1) * kBlockDim); ++row) {
        std::fill_n(out.data + row * out.ld, out.columns, Bf16{0});
        logsumexp[row] = -kInfinity;
      }
    }
  }

  /// The values of group n - 1 and the scores of group n + 1, over the probabilities of group n.
  template <int kUnits>
  void multiply(int64_t n, const HeadRows& q, const PackedKeys& keys) {
    auto softmax = softmax_;  // a local object stays in registers
    const auto vector_work = [&](int) __attribute__((always_inline)) { softmax.run<kUnits>(); };
    if (n >= 1) multiply_values(n - 1, keys, vector_work);
    if (n + 1 < static_cast<int64_t>(groups_.size())) multiply_scores(n + 1, q, keys, vector_work);
    softmax_ = softmax;
    tile_fence();
  }
  template <class VectorWork>
  [[gnu::always_inline]] void multiply_scores(int64_t n, const HeadRows& q, const PackedKeys& keys,
                                              const VectorWork& vector_work) {
    const auto& group = groups_[n];
    if (group.first) pack_panels(q.operand(false, false), group.query_panel * kBlockDim, 1, 0, steps_, q_);
    tile_fence();
    for (int i = 0; i < group.panels; ++i)
      gemm_microkernel<false>(keys.k + (group.key_panel + i) * steps_ * kBlockElems, q_, steps_,
                              scores_[n % 2] + i * kBlockElems, /*accumulate=*/false, vector_work);
  }
  template <class VectorWork>
  [[gnu::always_inline]] void multiply_values(int64_t n, const PackedKeys& keys, const VectorWork& vector_work) {
    const auto& group = groups_[n];
    tile_fence();
    for (int64_t channel = 0; channel < steps_; ++channel)
      gemm_microkernel<false>(keys.v + (channel * keys.panels + group.key_panel) * kBlockElems, probabilities_[n % 2],
                              group.panels, out_ + channel * kBlockElems, /*accumulate=*/!group.first, vector_work);
  }

  bool start_softmax(int64_t n, QueryLanes& correction) {
    const auto& group = groups_[n];
    for (int i = 0; i < group.panels; ++i)
      visibility_.mask(scores_[n % 2] + i * kBlockElems, group.query_panel, group.key_panel + i);
    return softmax_.start(scores_[n % 2], probabilities_[n % 2], group, correction);
  }

  void finish_softmax(const KeyGroup& group, float* logsumexp, int64_t rows) {
    softmax_.finish();
    if (!group.last) return;
    inverse_sum_ = softmax_.inverse_sum();
    const auto lse = softmax_.logsumexp();
    const auto row = group.query_panel * kBlockDim;
    _mm512_mask_storeu_ps(logsumexp + row, lane_mask(rows - row), lse.low);
    _mm512_mask_storeu_ps(logsumexp + row + 16, lane_mask(rows - row - 16), lse.high);
  }

  /// Multiplies the sums of the panel of queries, over all groups before the current one.
  void correct(const QueryLanes& correction) {
    for (float* c = out_; c < out_ + steps_ * kBlockElems; c += kLowerTiles)
      for (int row = 0; row < kRightTile; row += 16) {
        _mm512_store_ps(c + row, _mm512_mul_ps(_mm512_load_ps(c + row), correction.low));
        _mm512_store_ps(c + kRightTile + row, _mm512_mul_ps(_mm512_load_ps(c + kRightTile + row), correction.high));
      }
  }

  void store(int64_t query_panel, const HeadRows& out) const {
    for (int64_t channel = 0; channel < steps_; ++channel)
      store_transposed(out_ + channel * kBlockElems, inverse_sum_, out, query_panel * kBlockDim, channel * kBlockDim);
  }

  Visibility visibility_;
  Softmax softmax_;
  int steps_;   // k-steps over the channels, and their panels
  Bf16* q_;     // the panel of queries
  float* out_;  // Oᵀ
  float* scores_[2];
  Bf16* probabilities_[2];
  QueryLanes inverse_sum_ = {};  // of the panel of queries that `store` stores next
  std::vector<KeyGroup> groups_;
};

/// The parts into which the query panels of each head are split, so that every thread has work.
int64_t parts_per_head(int64_t heads, int64_t query_panels) {
  const auto threads = thread_count();
  if (threads == 1) return 1;
  return std::clamp<int64_t>(ceil_div(int64_t{2} * threads, heads), 1, std::max<int64_t>(1, query_panels / 2));
}

}  // namespace

void attention_forward(const DenseAttention& d) {
  const auto groups = d.in.q.size(2), per_group = d.heads_per_group(), heads = d.batch() * d.heads();
  const auto query_panels = panels_of(d.queries()), key_panels = panels_of(d.keys());
  const auto channel_panels = panels_of(d.in.q.size(-1));
  const auto parts = parts_per_head(heads, query_panels);
  const auto packed = key_panels * channel_panels * kBlockElems;
  const auto q = Heads::read(d.in.q), k = Heads::read(d.in.k), v = Heads::read(d.in.v), out = Heads::written(d.out);
  auto* const logsumexp = d.logsumexp.mutable_data_ptr<float>();
  const auto threads = static_cast<int>(parts > 1 ? parts * per_group : 1);  // at most, of a group
  SharedOperands shared;
  std::vector<GroupOperand> group_keys, group_values;
  for (int64_t group = 0; group < d.batch() * groups; ++group) {
    const auto batch = group / groups, g = group % groups;
    group_keys.emplace_back(k.rows(batch, g).operand(true, false), threads, shared);
    group_values.emplace_back(v.rows(batch, g).operand(true, true), threads, shared);
  }
  shared.allocate();
  at::parallel_for(0, heads * parts, 1, [&](int64_t begin, int64_t end) {
    ScratchMemory memory(2 * packed * 2 + ForwardHead::scratch_bytes(channel_panels));
    auto *const own_keys = memory.take<Bf16>(packed), *const own_values = memory.take<Bf16>(packed);
    ForwardHead forward(d, memory);
    const TileConfig tiles;
    PackedKeys keys{nullptr, nullptr, key_panels};
    int64_t packed_group = -1;
    for (auto i = begin; i < end; ++i) {
      const auto part = i % parts, group = i / parts / per_group, head = i / parts % per_group;
      const auto batch = group / groups, g = group % groups;
      if (group != packed_group) {
        keys.k = group_keys[group].pack(head * parts + part, per_group * parts, own_keys);
        keys.v = group_values[group].pack(head * parts + part, per_group * parts, own_values);
        packed_group = group;
      }
      forward.run(q.rows(batch, g, head), keys, out.rows(batch, g, head),
                  logsumexp + statistics_offset(d.logsumexp, batch, g * per_group + head),
                  share_of(query_panels, part, parts));
    }
    _mm_sfence();
  });
}

}  // namespace weft::kernels::CPU_CAPABILITY

namespace weft::kernels::amx {
void attention_forward(const DenseAttention& dense) { CPU_CAPABILITY::attention_forward(dense); }
}  // namespace weft::kernels::amx
