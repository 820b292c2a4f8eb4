#include "weft/te/fused_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/exp2.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <bit>
#include <limits>

namespace weft::te {
namespace {

bool is_padding(MaskType mask) {
  return mask == MaskType::padding || mask == MaskType::padding_causal || mask == MaskType::padding_causal_bottom_right;
}
bool is_causal(MaskType mask) { return mask != MaskType::none && mask != MaskType::padding; }
bool is_bottom_right(MaskType mask) {
  return mask == MaskType::causal_bottom_right || mask == MaskType::padding_causal_bottom_right;
}

/// A view of `t` with the batch first, [b, s, h, d]; [t, h, d] as it is.
at::Tensor batch_first(const at::Tensor& t, QkvFormat format) {
  if (format == QkvFormat::sbhd) return t.transpose(0, 1);
  return format == QkvFormat::bhsd ? t.transpose(1, 2) : t;
}

/// `t` with zeros appended to its last dimension.
at::Tensor widen(const at::Tensor& t, int64_t channels) {
  return t.size(-1) == channels ? t : at::constant_pad_nd(t, {0, channels - t.size(-1)});
}

/// The slopes of ALiBi: 2^(-8i/n) for the first n heads, n a power of two, and every second of 2^(-4i/n) for the rest.
at::Tensor alibi_slopes(int64_t heads) {
  const auto n = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(heads)));
  const auto slopes = [](double exponent, const at::Tensor& i) { return at::exp2(i.to(at::kFloat).mul_(exponent)); };
  const auto count = static_cast<double>(n);
  return at::cat({slopes(-8 / count, at::arange(1, n + 1)), slopes(-4 / count, at::arange(1, 1 + 2 * (heads - n), 2))});
}

/// Brings the tensors of a call into the form of the kernels and back: as a batch of equal lengths, or, with padding,
/// `thd` or pages, packed in a batch of 1.
class Arrangement {
 public:
  Arrangement(const FusedAttention& attention, const kernels::Qkv& in)
      : attention_(attention), parts_(layout_parts(attention.layout)), groups_(Extents::of(in.k, parts_.keys).heads) {
    const auto queries = Extents::of(in.q, parts_.queries);
    heads_ = queries.heads, batch_ = queries.batch, length_ = queries.length;
    TORCH_CHECK_VALUE(groups_ > 0 && heads_ % groups_ == 0, "fused attention: there are ", heads_, " query heads and ",
                      groups_, " key heads, expected a multiple of those.");
    packed_ =
        is_padding(attention.mask) || parts_.paged || parts_.queries == QkvFormat::thd || parts_.keys == QkvFormat::thd;
    if (!packed_) return;
    queries_ = read_sequences(attention.cu_seqlens_q, attention.cu_seqlens_q_padded, "cu_seqlens_q");
    keys_ = read_sequences(attention.cu_seqlens_kv, attention.cu_seqlens_kv_padded, "cu_seqlens_kv");
  }

  const LayoutParts& parts() const { return parts_; }
  bool packed() const { return packed_; }

  /// [batch, T, groups, heads/groups, D] of queries, an output or its gradient.
  at::Tensor queries(const at::Tensor& t, QkvFormat format) const {
    return arrange(t, format, queries_, {}).unflatten(2, {groups_, heads_ / groups_});
  }
  /// [batch, T, groups, D].
  at::Tensor keys(const at::Tensor& t, const at::Tensor& page_table) const {
    return arrange(t, parts_.keys, keys_, page_table);
  }

  /// Fills `t` with a result in the form of `queries` or of `keys`, of which it may have fewer channels.
  void store_queries(const at::Tensor& result, const at::Tensor& t, QkvFormat format) const {
    store(result.flatten(2, 3), t, format, queries_);
  }
  void store_keys(const at::Tensor& result, const at::Tensor& t, QkvFormat format) const {
    store(result, t, format, keys_);
  }

  /// [batch, heads, T] as Transformer Engine has it, and back.
  at::Tensor store_statistics(const at::Tensor& values, double padding) const {
    if (!packed_) return values.unsqueeze(-1);
    const auto tokens = values.select(0, 0).transpose(0, 1);
    const bool thd = parts_.queries == QkvFormat::thd;
    auto result =
        thd ? at::empty({length_, heads_}, values.options()) : at::empty({batch_, length_, heads_}, values.options());
    statistics_rows().scatter(tokens.contiguous(), result, 1, padding);
    return thd ? result.unsqueeze(-1) : result.transpose(1, 2).unsqueeze(-1).contiguous();
  }
  at::Tensor read_statistics(const at::Tensor& t) const {
    const bool thd = parts_.queries == QkvFormat::thd;
    const auto expected =
        thd ? std::vector<int64_t>{length_, heads_, 1} : std::vector{batch_, heads_, length_, int64_t{1}};
    TORCH_CHECK_VALUE(t.sizes() == expected && t.scalar_type() == at::kFloat,
                      "fused attention: the saved logsumexp has shape ", t.sizes(), " and dtype ", t.scalar_type(),
                      ", expected float32 ", expected, ".");
    const auto values = t.squeeze(-1);
    if (!packed_) return values;
    return statistics_rows().gather(thd ? values : values.transpose(1, 2), 1).transpose(0, 1).unsqueeze(0).contiguous();
  }

  /// The mask, the window and the sequences of the call.
  kernels::Attention mask() const {
    const auto& a = attention_;
    kernels::Attention result{.scale = a.scale,
                              .left = a.left,
                              .right = is_causal(a.mask) ? 0 : a.right,
                              .bottom_right = is_bottom_right(a.mask) || (!is_causal(a.mask) && a.bottom_right),
                              .dropout = a.dropout,
                              .seed = a.seed};
    if (packed_) result.cu_seqlens_q = offsets_of(queries_), result.cu_seqlens_kv = offsets_of(keys_);
    return result;
  }

  kernels::ScoreTerms terms() const {
    kernels::ScoreTerms result;
    if (attention_.bias_type == BiasType::post_scale) {
      TORCH_CHECK_VALUE(attention_.bias.defined(), "fused attention: expected a bias with post_scale_bias, got None.");
      result.bias = attention_.bias;
    }
    if (attention_.bias_type == BiasType::alibi) result.slopes = alibi_slopes(heads_);
    if (attention_.softmax == SoftmaxType::vanilla) return result;
    result.sink = attention_.sink.defined() ? attention_.sink.reshape({-1}) : at::zeros({heads_}, at::kFloat);
    return result;
  }

 private:
  static at::Tensor offsets_of(const Sequences& sequences) {
    std::vector<int64_t> offsets{0};
    for (const auto count : sequences.counts) offsets.push_back(offsets.back() + count);
    return index_tensor(offsets);
  }

  static TokenRows rows_of(const at::Tensor& t, QkvFormat format, const Sequences& sequences) {
    return token_rows(format, t.sizes().slice(0, static_cast<size_t>(t.dim()) - 2), sequences);
  }
  TokenRows statistics_rows() const {
    if (parts_.queries == QkvFormat::thd) return token_rows(QkvFormat::thd, {length_}, queries_);
    return token_rows(QkvFormat::bshd, {batch_, length_}, queries_);
  }

  at::Tensor arrange(const at::Tensor& t, QkvFormat format, const Sequences& sequences,
                     const at::Tensor& page_table) const {
    if (!packed_) return batch_first(t, format);
    if (page_table.defined())
      return paged_rows(format, t.sizes().slice(0, 2), page_table, sequences).gather(t, 2).unsqueeze(0);
    if (format != QkvFormat::bhsd) return rows_of(t, format, sequences).gather(t, 2).unsqueeze(0);
    return arrange(batch_first(t, format), QkvFormat::bshd, sequences, page_table);
  }

  void store(const at::Tensor& result, const at::Tensor& t, QkvFormat format, const Sequences& sequences) const {
    const auto values = result.narrow(-1, 0, t.size(-1));
    if (!packed_) {
      batch_first(t, format).copy_(values);
    } else if (format == QkvFormat::bhsd) {
      store(result, batch_first(t, format), QkvFormat::bshd, sequences);
    } else {
      rows_of(t, format, sequences).scatter(values.select(0, 0).contiguous(), t, 2);
    }
  }

  const FusedAttention& attention_;
  LayoutParts parts_;
  int64_t groups_, heads_, batch_, length_;
  bool packed_;
  Sequences queries_, keys_;
};

kernels::Qkv arranged(const Arrangement& arrangement, const FusedAttention& attention, const kernels::Qkv& in) {
  return {arrangement.queries(in.q, arrangement.parts().queries), arrangement.keys(in.k, attention.page_table_k),
          arrangement.keys(in.v, attention.page_table_v)};
}

/// Queries, keys and values with equal channels, which weft's kernel requires.
kernels::Qkv with_equal_channels(const kernels::Qkv& in) {
  const auto channels = std::max(in.q.size(-1), in.v.size(-1));
  return {widen(in.q, channels), widen(in.k, channels), widen(in.v, channels)};
}

at::Tensor result_like(const at::Tensor& t, int64_t channels) {
  auto sizes = t.sizes().vec();
  sizes.back() = channels;
  return at::empty(sizes, t.options());
}
kernels::Qkv results_like(const kernels::Qkv& in) {
  const auto like = [](const at::Tensor& t) { return result_like(t, t.size(-1)); };
  return {like(in.q), like(in.k), like(in.v)};
}

}  // namespace

LayoutParts layout_parts(QkvLayout layout) {
  using enum QkvFormat;
  constexpr QkvFormat kFormats[] = {sbhd, bshd, thd};
  constexpr LayoutParts kOthers[] = {
      {sbhd, bshd},
      {bshd, sbhd},
      {thd, bshd},
      {thd, sbhd},
      {bshd, bshd, LayoutParts::Interleaved::none, true},
      {bshd, sbhd, LayoutParts::Interleaved::none, true},
      {sbhd, bshd, LayoutParts::Interleaved::none, true},
      {sbhd, sbhd, LayoutParts::Interleaved::none, true},
      {thd, bshd, LayoutParts::Interleaved::none, true},
      {thd, sbhd, LayoutParts::Interleaved::none, true},
      {bhsd, bhsd},
  };
  using enum LayoutParts::Interleaved;
  constexpr LayoutParts::Interleaved kInterleaved[] = {qkv_before_heads, qkv_after_heads, kv_before_heads,
                                                       kv_after_heads, none};
  const auto number = static_cast<size_t>(layout);
  TORCH_CHECK_VALUE(layout != QkvLayout::not_set,
                    "fused attention: the layout of queries, keys and values is not set.");
  if (number >= std::size(kFormats) * std::size(kInterleaved))
    return kOthers[number - std::size(kFormats) * std::size(kInterleaved)];
  const auto format = kFormats[number / std::size(kInterleaved)];
  return {format, format, kInterleaved[number % std::size(kInterleaved)]};
}

Extents Extents::of(const at::Tensor& t, QkvFormat format) {
  const int64_t dims = format == QkvFormat::thd ? 3 : 4;
  TORCH_CHECK_VALUE(t.dim() == dims, "fused attention: a tensor has shape ", t.sizes(), ", expected ", dims,
                    " dimensions in its format.");
  if (dims == 3) return {1, t.size(0), t.size(1), t.size(2)};
  const auto view = batch_first(t, format);
  return {view.size(0), view.size(1), view.size(2), view.size(3)};
}

std::vector<int64_t> Extents::sizes(QkvFormat format) const {
  switch (format) {
    case QkvFormat::sbhd:
      return {length, batch, heads, channels};
    case QkvFormat::bshd:
      return {batch, length, heads, channels};
    case QkvFormat::bhsd:
      return {batch, heads, length, channels};
    case QkvFormat::thd:
      return {batch * length, heads, channels};
    default:
      TORCH_CHECK_VALUE(false, "fused attention: expected the format sbhd, bshd, bhsd or thd of one tensor.");
  }
}

FusedStatistics fused_attention_forward(const FusedAttention& attention, const kernels::Qkv& in, const at::Tensor& out,
                                        QkvFormat out_format, bool want_largest) {
  const Arrangement arrangement(attention, in);
  const auto mask = arrangement.mask();
  const auto terms = arrangement.terms();
  const auto given = arranged(arrangement, attention, in);
  if (terms.any() || want_largest) {
    const auto result = result_like(given.q, given.v.size(-1));
    const auto statistics = kernels::scored_attention_forward(mask, terms, given, result);
    arrangement.store_queries(result, out, out_format);
    return {arrangement.store_statistics(statistics.logsumexp, 0),
            arrangement.store_statistics(statistics.largest, -std::numeric_limits<double>::infinity())};
  }
  const auto equal = with_equal_channels(given);
  const auto result = result_like(equal.q, equal.q.size(-1));
  const auto logsumexp = kernels::attention_forward(mask, equal, result);
  arrangement.store_queries(result, out, out_format);
  return {arrangement.store_statistics(logsumexp, 0), {}};
}

FusedTermGradients fused_attention_backward(const FusedAttention& attention, const kernels::Qkv& in,
                                            const FusedSaved& saved, const kernels::Qkv& grads, QkvLayout grad_layout) {
  const Arrangement arrangement(attention, in);
  TORCH_CHECK_NOT_IMPLEMENTED(!arrangement.parts().paged, "fused attention: a cache of pages has no backward.");
  const auto mask = arrangement.mask();
  const auto terms = arrangement.terms();
  const auto given = arranged(arrangement, attention, in);
  const auto logsumexp = arrangement.read_statistics(saved.logsumexp);
  const auto dout = arrangement.queries(saved.dout, saved.dout_format);
  kernels::Qkv results;
  FusedTermGradients sums;
  if (terms.any()) {
    results = results_like(given);
    const auto term_grads = kernels::scored_attention_backward(mask, terms, given, logsumexp, dout, results);
    sums = {term_grads.bias, term_grads.sink};
  } else {
    const auto equal = with_equal_channels(given);
    const auto channels = equal.q.size(-1);
    results = results_like(equal);
    const auto out = arrangement.queries(saved.out, saved.out_format);
    kernels::attention_backward(mask, equal, widen(out, channels), logsumexp, widen(dout, channels), results);
  }
  const auto formats = layout_parts(grad_layout);
  arrangement.store_queries(results.q, grads.q, formats.queries);
  arrangement.store_keys(results.k, grads.k, formats.keys);
  arrangement.store_keys(results.v, grads.v, formats.keys);
  return sums;
}

}  // namespace weft::te
