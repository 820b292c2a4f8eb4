#include "weft/kernels/rotary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "weft/te/bind.h"
#include "weft/te/enums.h"
#include "weft/te/host.h"
#include "weft/te/token_rows.h"

// Rotary position embeddings, in all layouts. Angles are given for each position and channel.

namespace weft::te {
namespace {

using kernels::RotaryDirection;
using OptionalTensor = std::optional<at::Tensor>;

/// The part of each sequence that a rank has: of n ranks, rank r has chunks r and 2n - 1 - r of 2n.
struct RankOfSequence {
  int64_t ranks, rank;

  /// The position of token `i` of the `count` tokens that the rank has.
  int64_t position(int64_t i, int64_t count) const {
    if (ranks == 1) return i;
    const auto half = count / 2;
    return i < half ? i + rank * half : i - half + (2 * ranks - 1 - rank) * half;
  }
};

struct RotaryArguments {
  const char* name;
  QkvFormat format;
  bool interleaved;
  RankOfSequence part;
  RotaryDirection direction;
};

/// The positions of the rows of x as [outer, T, inner]: the T positions are the same for all outer and inner rows.
struct RowPositions {
  int64_t outer, inner;
  std::vector<int64_t> positions;
};

std::vector<int64_t> start_positions(const OptionalTensor& starts, int64_t sequences, const char* name) {
  if (!starts) return std::vector<int64_t>(static_cast<size_t>(sequences), 0);
  TORCH_CHECK_VALUE(starts->dim() == 1 && starts->size(0) >= sequences, name, ": start_positions has shape ",
                    starts->sizes(), ", expected [", sequences, "], one for each sequence.");
  return read_offsets(host(*starts), "start_positions");
}

RowPositions batch_positions(const at::Tensor& x, const OptionalTensor& starts, const RotaryArguments& a) {
  TORCH_CHECK_VALUE(x.dim() == 4, a.name, ": input has shape ", x.sizes(), ", expected 4 dimensions.");
  const bool sequence_first = a.format == QkvFormat::sbhd;
  TORCH_CHECK_NOT_IMPLEMENTED(sequence_first || a.format == QkvFormat::bshd, a.name,
                              ": expected the format sbhd, bshd or thd.");
  const auto length = x.size(sequence_first ? 0 : 1), batch = x.size(sequence_first ? 1 : 0);
  TORCH_CHECK_VALUE(a.part.ranks == 1 || length % 2 == 0, a.name, ": the sequence length is ", length,
                    ", expected an even one with cp_size ", a.part.ranks, ".");
  if (!starts) {
    RowPositions result{sequence_first ? 1 : batch, sequence_first ? batch : 1, {}};
    for (int64_t i = 0; i < length; ++i) result.positions.push_back(a.part.position(i, length));
    return result;
  }
  const auto begin = start_positions(starts, batch, a.name);
  RowPositions result{1, 1, {}};
  for (int64_t row = 0; row < batch * length; ++row) {
    const auto sequence = sequence_first ? row % batch : row / length;
    const auto i = sequence_first ? row / batch : row % length;
    result.positions.push_back(begin[static_cast<size_t>(sequence)] + a.part.position(i, length));
  }
  return result;
}

/// cu_seqlens counts the tokens of all ranks.
RowPositions packed_positions(const at::Tensor& x, const OptionalTensor& starts, const OptionalTensor& cu_seqlens,
                              const RotaryArguments& a) {
  TORCH_CHECK_VALUE(x.dim() == 3 && cu_seqlens, a.name, ": input has shape ", x.sizes(),
                    ", expected [t, h, d] and cu_seqlens with the format thd.");
  const auto offsets = read_offsets(*cu_seqlens, "cu_seqlens");
  const auto begin = start_positions(starts, static_cast<int64_t>(offsets.size()) - 1, a.name);
  RowPositions result{1, 1, std::vector<int64_t>(static_cast<size_t>(x.size(0)), 0)};
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    const auto first = offsets[s] / a.part.ranks, end = offsets[s + 1] / a.part.ranks;
    TORCH_CHECK_VALUE(0 <= first && first <= end && end <= x.size(0), a.name, ": cu_seqlens give sequence ", s,
                      " the rows ", first, " to ", end, ", expected at most ", x.size(0), " and none that decrease.");
    for (auto row = first; row < end; ++row)
      result.positions[static_cast<size_t>(row)] = begin[s] + a.part.position(row - first, end - first);
  }
  return result;
}

/// The angles of the positions, [T, channels].
at::Tensor angles_of(const at::Tensor& freqs, const std::vector<int64_t>& positions, int64_t head_dim,
                     const char* name) {
  TORCH_CHECK_VALUE(freqs.dim() == 4 && freqs.size(1) == 1 && freqs.size(2) == 1 && freqs.size(3) % 2 == 0 &&
                        freqs.scalar_type() == at::kFloat,
                    name, ": freqs has shape ", freqs.sizes(), " and dtype ", freqs.scalar_type(),
                    ", expected float32 [positions, 1, 1, channels] with an even number of channels.");
  TORCH_CHECK_VALUE(head_dim >= freqs.size(3), name, ": freqs has ", freqs.size(3),
                    " channels, expected at most those of the input, ", head_dim, ".");
  for (const auto position : positions)
    TORCH_CHECK_VALUE(position >= 0 && position < freqs.size(0), name, ": the input has a token at position ", position,
                      ", freqs has ", freqs.size(0), " positions. Pass longer freqs.");
  return host(freqs).reshape({freqs.size(0), freqs.size(3)}).index_select(0, index_tensor(positions));
}

/// The two channels of each pair, views of the last dimension.
std::pair<at::Tensor, at::Tensor> pair_channels(const at::Tensor& t, bool interleaved) {
  const auto half = t.size(-1) / 2;
  if (!interleaved) return {t.narrow(-1, 0, half), t.narrow(-1, half, half)};
  const auto pairs = t.unflatten(-1, {half, 2});
  return {pairs.select(-1, 0), pairs.select(-1, 1)};
}
at::Tensor join_channels(const at::Tensor& a, const at::Tensor& b, bool interleaved) {
  return interleaved ? at::stack({a, b}, -1).flatten(-2) : at::cat({a, b}, -1);
}

/// x [outer, T, inner, heads, head_dim] rotated by angles that may differ within a pair: (a, b) becomes
/// (a·cos α - b·sin α, b·cos β + a·sin β). The inverse is the gradient of that.
at::Tensor rotate_channels(const at::Tensor& x, const at::Tensor& angles, const RotaryArguments& arguments) {
  const auto channels = angles.size(1);
  const auto broadcast = angles.view({1, angles.size(0), 1, 1, channels});
  const auto rotated = x.narrow(-1, 0, channels).to(at::kFloat);
  const auto [a, b] = pair_channels(rotated, arguments.interleaved);
  const auto [cos_a, cos_b] = pair_channels(broadcast.cos(), arguments.interleaved);
  const auto [sin_a, sin_b] = pair_channels(broadcast.sin(), arguments.interleaved);
  const bool forward = arguments.direction == RotaryDirection::forward;
  const auto first = forward ? a * cos_a - b * sin_a : a * cos_a + b * sin_b;
  const auto second = forward ? b * cos_b + a * sin_b : b * cos_b - a * sin_a;
  auto y = x.clone(at::MemoryFormat::Contiguous);
  y.narrow(-1, 0, channels).copy_(join_channels(first, second, arguments.interleaved));
  return y;
}

at::Tensor rotate_rows(const at::Tensor& x, const at::Tensor& freqs, const RowPositions& rows,
                       const RotaryArguments& arguments) {
  const auto heads = x.size(-2), head_dim = x.size(-1);
  const auto angles = angles_of(freqs, rows.positions, head_dim, arguments.name);
  const auto positions = angles.size(0);
  const auto grid = x.reshape({rows.outer, positions, rows.inner, heads, head_dim});
  const auto [first, second] = pair_channels(angles, arguments.interleaved);
  if (!at::equal(first, second)) return rotate_channels(grid, angles, arguments).view(x.sizes());
  const kernels::RotaryHeads layout{.head_dim = head_dim,
                                    .rotary_dim = angles.size(1),
                                    .blocks = 1,
                                    .rotated = heads,
                                    .kept = 0,
                                    .interleaved = arguments.interleaved};
  const auto y = kernels::rotary(grid.flatten(3), {first.cos(), first.sin()}, layout, arguments.direction);
  return y.view(x.sizes());
}

at::Tensor apply_rotary(const at::Tensor& x, const at::Tensor& freqs, const OptionalTensor& starts,
                        const OptionalTensor& cu_seqlens, const RotaryArguments& arguments) {
  TORCH_CHECK_VALUE(arguments.part.ranks >= 1 && arguments.part.rank >= 0 && arguments.part.rank < arguments.part.ranks,
                    arguments.name, ": cp_rank is ", arguments.part.rank, " with cp_size ", arguments.part.ranks,
                    ", expected a rank below the number of ranks.");
  const auto rows = arguments.format == QkvFormat::thd ? packed_positions(x, starts, cu_seqlens, arguments)
                                                       : batch_positions(x, starts, arguments);
  return rotate_rows(host(x), freqs, rows, arguments);
}

at::Tensor rope(const char* name, RotaryDirection direction, const at::Tensor& x, const at::Tensor& freqs,
                const OptionalTensor& starts, QkvFormat format, bool interleaved, const OptionalTensor& cu_seqlens,
                int64_t cp_size, int64_t cp_rank) {
  const RotaryArguments arguments{name, format, interleaved, {cp_size, cp_rank}, direction};
  return on_device(apply_rotary(x, freqs, starts, cu_seqlens, arguments), x.device());
}

/// The channels of queries, keys and values in a row of a buffer [.., groups, queries + keys + values]. A group has
/// queries / keys query heads.
struct QkvSplit {
  QkvSplit(const char* name, const std::vector<int64_t>& list) {
    TORCH_CHECK_VALUE(
        list.size() == 3 && list[1] > 0 && list[0] % list[1] == 0, name,
        ": expected qkv_split_arg_list with the channels of queries, keys and values, those of queries a ",
        "multiple of those of keys; got ", list, ".");
    queries = list[0], keys = list[1], values = list[2];
  }
  int64_t total() const { return queries + keys + values; }

  int64_t queries, keys, values;
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> qkv_rope_forward(const at::Tensor& qkv, const at::Tensor& q_freqs,
                                                                const at::Tensor& k_freqs, const OptionalTensor& starts,
                                                                const std::vector<int64_t>& split_list,
                                                                QkvFormat format, bool interleaved, int64_t cp_size,
                                                                int64_t cp_rank) {
  constexpr auto kName = "fused_qkv_rope_forward";
  const QkvSplit split(kName, split_list);
  TORCH_CHECK_VALUE(qkv.dim() == 4 && qkv.size(3) == split.total(), kName, ": qkv_input has shape ", qkv.sizes(),
                    ", expected 4 dimensions, the last ", split.total(), ", the sum of qkv_split_arg_list.");
  const RotaryArguments arguments{kName, format, interleaved, {cp_size, cp_rank}, RotaryDirection::forward};
  // As in Transformer Engine, start positions are for one rank.
  const auto begin = cp_size == 1 ? starts : OptionalTensor();
  const auto all = host(qkv);
  const auto q = all.narrow(3, 0, split.queries).reshape({qkv.size(0), qkv.size(1), -1, split.keys});
  const auto k = all.narrow(3, split.queries, split.keys);
  const auto v = all.narrow(3, split.queries + split.keys, split.values);
  return {on_device(apply_rotary(q, q_freqs, begin, {}, arguments), qkv.device()),
          on_device(apply_rotary(k, k_freqs, begin, {}, arguments), qkv.device()),
          on_device(v.clone(at::MemoryFormat::Contiguous), qkv.device())};
}

at::Tensor qkv_rope_backward(const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv,
                             const at::Tensor& q_freqs, const at::Tensor& k_freqs,
                             const std::vector<int64_t>& split_list, QkvFormat format, bool interleaved,
                             int64_t cp_size, int64_t cp_rank) {
  constexpr auto kName = "fused_qkv_rope_backward";
  const QkvSplit split(kName, split_list);
  const auto fits = [&](const at::Tensor& t, int64_t heads, int64_t channels) {
    return t.dim() == 4 && t.sizes().slice(0, 2) == dv.sizes().slice(0, 2) && t.size(2) == heads &&
           t.size(3) == channels;
  };
  TORCH_CHECK_VALUE(dv.dim() == 4 && fits(dv, dv.size(2), split.values) && fits(dk, dv.size(2), split.keys) &&
                        fits(dq, dv.size(2) * (split.queries / split.keys), split.keys),
                    kName, ": the gradients have shapes ", dq.sizes(), ", ", dk.sizes(), " and ", dv.sizes(),
                    ", which do not fit qkv_split_arg_list ", split_list, ".");
  const RotaryArguments arguments{kName, format, interleaved, {cp_size, cp_rank}, RotaryDirection::inverse};
  const auto queries =
      apply_rotary(dq, q_freqs, {}, {}, arguments).view({dv.size(0), dv.size(1), dv.size(2), split.queries});
  return on_device(at::cat({queries, apply_rotary(dk, k_freqs, {}, {}, arguments), host(dv)}, -1), dq.device());
}

void bind_rope(py::module_& m, const char* name, const char* input, RotaryDirection direction) {
  m.def(
      name,
      [name, direction](const at::Tensor& x, const at::Tensor& freqs, const OptionalTensor& starts, QkvFormat format,
                        bool interleaved, const OptionalTensor& cu_seqlens, int64_t cp_size, int64_t cp_rank) {
        return rope(name, direction, x, freqs, starts, format, interleaved, cu_seqlens, cp_size, cp_rank);
      },
      py::arg(input), py::arg("freqs"), py::arg("start_positions"), py::arg("qkv_format"), py::arg("interleaved"),
      py::arg("cu_seqlens"), py::arg("cp_size"), py::arg("cp_rank"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_rotary(py::module_& m) {
  bind_rope(m, "fused_rope_forward", "input", RotaryDirection::forward);
  bind_rope(m, "fused_rope_backward", "output_grads", RotaryDirection::inverse);
  const auto release = py::call_guard<py::gil_scoped_release>();
  m.def("fused_qkv_rope_forward", qkv_rope_forward, py::arg("qkv_input"), py::arg("q_freqs"), py::arg("k_freqs"),
        py::arg("start_positions"), py::arg("qkv_split_arg_list"), py::arg("qkv_format"), py::arg("interleaved"),
        py::arg("cp_size"), py::arg("cp_rank"), release);
  m.def("fused_qkv_rope_backward", qkv_rope_backward, py::arg("q_grad_out"), py::arg("k_grad_out"),
        py::arg("v_grad_out"), py::arg("q_freqs"), py::arg("k_freqs"), py::arg("qkv_split_arg_list"),
        py::arg("qkv_format"), py::arg("interleaved"), py::arg("cp_size"), py::arg("cp_rank"), release);
}

}  // namespace weft::te
