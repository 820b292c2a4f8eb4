#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <string>
#include <vector>

#include "weft/te/bind.h"
#include "weft/te/host.h"
#include "weft/te/strict.h"
#include "weft/te/token_rows.h"

// Packed sequences (`thd`) under context parallelism. Each of n ranks has two of the 2n chunks of each sequence: rank r
// has chunks r and 2n - 1 - r, so that all ranks do the same work under a causal mask.

namespace weft::te {
namespace {

/// Offsets of packed sequences, and their halves, which have equal lengths.
class Halves {
 public:
  explicit Halves(const at::Tensor& cu_seqlens) : offsets_(read_offsets(cu_seqlens, "cu_seqlens")) {}

  int64_t sequences() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  int64_t begin(int64_t i) const { return offsets_[static_cast<size_t>(i)]; }
  int64_t rows(int64_t i) const { return begin(i + 1) - begin(i); }
  int64_t half_begin(int64_t i) const { return begin(i) / 2; }
  int64_t half_rows(int64_t i) const { return begin(i + 1) / 2 - begin(i) / 2; }
  int64_t end() const { return offsets_.back(); }

  /// Raises unless `name` has enough rows for the sequences.
  void check(const char* function, const at::Tensor& t, int64_t dim, int64_t rows) const {
    TORCH_CHECK_VALUE(t.dim() > dim && t.size(dim) >= rows, function, ": a tensor has shape ", t.sizes(),
                      ", expected at least ", rows, " rows in dimension ", dim, " for cu_seqlens that end at ", end(),
                      ".");
  }

 private:
  std::vector<int64_t> offsets_;
};

/// The dimension of tokens of [t, h, d] and [2, t, h, d].
int64_t token_dim(const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.dim() == 3 || t.dim() == 4, name, ": a tensor has shape ", t.sizes(),
                    ", expected [t, h, d] or [2, t, h, d].");
  return t.dim() - 3;
}

/// One half of each sequence.
at::Tensor read_half(const at::Tensor& tensor, const at::Tensor& cu_seqlens, int64_t half_idx) {
  constexpr auto kName = "thd_read_half_tensor";
  TORCH_CHECK_VALUE(half_idx == 0 || half_idx == 1, kName, ": half_idx is ", half_idx, ", expected 0 or 1.");
  const auto dim = token_dim(kName, tensor);
  const Halves halves(cu_seqlens);
  halves.check(kName, tensor, dim, halves.end());
  const auto from = host(tensor);
  auto sizes = tensor.sizes().vec();
  sizes[static_cast<size_t>(dim)] /= 2;
  auto half = at::empty(sizes, from.options());
  for (int64_t i = 0; i < halves.sequences(); ++i) {
    const auto rows = halves.half_rows(i);
    half.narrow(dim, halves.half_begin(i), rows).copy_(from.narrow(dim, halves.begin(i) + half_idx * rows, rows));
  }
  return on_device(std::move(half), tensor.device());
}

/// Rows of logsumexp, [heads, t] if packed, otherwise [batch, heads, s]: those of sequence i from its `first` one.
at::Tensor lse_rows(const at::Tensor& lse, const Halves& halves, bool packed, int64_t i, int64_t first, int64_t rows) {
  return packed ? lse.narrow(1, halves.begin(i) + first, rows) : lse.select(0, i).narrow(1, first, rows);
}
/// The same of a tensor that has only the second halves.
at::Tensor second_lse_rows(const at::Tensor& lse, const Halves& halves, bool packed, int64_t i) {
  const auto rows = halves.half_rows(i);
  return packed ? lse.narrow(1, halves.half_begin(i), rows) : lse.select(0, i).narrow(1, 0, rows);
}

void check_lse(const char* name, const at::Tensor& lse, bool packed) {
  TORCH_CHECK_VALUE(lse.dim() == (packed ? 2 : 3) && lse.scalar_type() == at::kFloat, name, ": logsumexp has shape ",
                    lse.sizes(), " and dtype ", lse.scalar_type(), ", expected float32 [", packed ? "h, t" : "b, h, s",
                    "] with lse_packed ", packed, ".");
}

/// lse = log(exp(lse) + exp(lse_per_step)) in the second half of each sequence.
void correct_second_half_lse(const at::Tensor& lse, const at::Tensor& lse_per_step, const at::Tensor& cu_seqlens,
                             bool lse_packed) {
  constexpr auto kName = "thd_second_half_lse_correction";
  check_lse(kName, lse, lse_packed), check_lse(kName, lse_per_step, lse_packed);
  const Halves halves(cu_seqlens);
  const auto all = host(lse), step = host(lse_per_step);
  for (int64_t i = 0; i < halves.sequences(); ++i) {
    const auto rows = halves.half_rows(i);
    const auto target = lse_rows(all, halves, lse_packed, i, rows, rows);
    target.copy_(at::logaddexp(target, second_lse_rows(step, halves, lse_packed, i)));
  }
}

at::Tensor read_second_half_lse(const at::Tensor& lse, const at::Tensor& cu_seqlens, bool lse_packed,
                                int64_t second_half_lse_seqlen) {
  check_lse("thd_read_second_half_lse", lse, lse_packed);
  const Halves halves(cu_seqlens);
  const auto all = host(lse);
  auto sizes = lse.sizes().vec();
  sizes.back() = second_half_lse_seqlen;
  auto half = at::zeros(sizes, all.options());
  for (int64_t i = 0; i < halves.sequences(); ++i) {
    const auto rows = halves.half_rows(i);
    second_lse_rows(half, halves, lse_packed, i).copy_(lse_rows(all, halves, lse_packed, i, rows, rows));
  }
  return on_device(std::move(half), lse.device());
}

/// The logsumexp before this step (undefined: `out` needs no scaling), after it, and that of the step.
struct StepLse {
  at::Tensor before, after, step;
};

/// out = out·exp(before - after) + out_per_step·exp(step - after), in all rows of each sequence or in its second half.
void correct_out(const at::Tensor& out, const at::Tensor& out_per_step, const StepLse& lse,
                 const at::Tensor& cu_seqlens, bool only_second_half, bool lse_packed) {
  constexpr auto kName = "thd_out_correction";
  for (const auto* t : {&lse.after, &lse.step}) check_lse(kName, *t, lse_packed);
  TORCH_CHECK_VALUE(out.dim() == 3 && out_per_step.dim() == 3, kName, ": out and out_per_step have shapes ",
                    out.sizes(), " and ", out_per_step.sizes(), ", expected [t, h, d].");
  const Halves halves(cu_seqlens);
  const auto all = host(out), step = host(out_per_step);
  const auto before = host(lse.before), after = host(lse.after), per_step = host(lse.step);
  for (int64_t i = 0; i < halves.sequences(); ++i) {
    const auto rows = only_second_half ? halves.half_rows(i) : halves.rows(i);
    const auto first = only_second_half ? rows : 0;
    const auto target = all.narrow(0, halves.begin(i) + first, rows);
    const auto added = step.narrow(0, only_second_half ? halves.half_begin(i) : halves.begin(i), rows).to(at::kFloat);
    const auto new_lse = lse_rows(after, halves, lse_packed, i, first, rows);
    const auto step_lse = only_second_half ? second_lse_rows(per_step, halves, lse_packed, i)
                                           : lse_rows(per_step, halves, lse_packed, i, 0, rows);
    const auto factors = [&](const at::Tensor& t) { return (t - new_lse).exp_().transpose(0, 1).unsqueeze(-1); };
    // A value of 0 stays 0 where the logsumexp is infinite: of rows that see no key.
    const auto scale = [](const at::Tensor& t, const at::Tensor& factor) { return at::where(t == 0, t, t * factor); };
    auto sum = target.to(at::kFloat);
    if (before.defined()) sum = scale(sum, factors(lse_rows(before, halves, lse_packed, i, first, rows)));
    target.copy_(sum + scale(added, factors(step_lse)));
  }
}

/// What happens to one half of each sequence of a gradient.
enum class Correction { none, add, copy, zero };

Correction parse_correction(const std::string& text) {
  if (text == "none") return Correction::none;
  if (text == "add") return Correction::add;
  if (text == "copy") return Correction::copy;
  TORCH_CHECK_VALUE(text == "zero", "thd_grad_correction: expected 'none', 'add', 'copy' or 'zero', got '", text, "'.");
  return Correction::zero;
}

/// Whether the gradient of a step has rows for this half.
bool reads_step(Correction correction) { return correction == Correction::add || correction == Correction::copy; }

void correct_rows(const at::Tensor& grad, const at::Tensor& step, Correction correction) {
  if (correction == Correction::add) grad.add_(step);
  if (correction == Correction::copy) grad.copy_(step);
  if (correction == Correction::zero) grad.zero_();
}

/// Applies a correction to each half of the sequences of `grad`. `grad_per_step` has the rows of the halves that are
/// added or copied: of one half or of both.
void correct_grad(const at::Tensor& grad, const at::Tensor& grad_per_step, const at::Tensor& cu_seqlens,
                  const std::string& first_half, const std::string& second_half) {
  constexpr auto kName = "thd_grad_correction";
  const auto first = parse_correction(first_half), second = parse_correction(second_half);
  const auto dim = token_dim(kName, grad);
  const Halves halves(cu_seqlens);
  const bool both = reads_step(first) && reads_step(second);
  halves.check(kName, grad, dim, halves.end());
  halves.check(kName, grad_per_step, dim, both ? halves.end() : halves.end() / 2);
  const auto all = host(grad), step = host(grad_per_step);
  for (int64_t i = 0; i < halves.sequences(); ++i) {
    const auto rows = halves.half_rows(i);
    const auto begin = halves.begin(i), step_begin = both ? begin : halves.half_begin(i);
    correct_rows(all.narrow(dim, begin, rows), step.narrow(dim, step_begin, rows), first);
    correct_rows(all.narrow(dim, begin + rows, rows), step.narrow(dim, both ? step_begin + rows : step_begin, rows),
                 second);
  }
}

/// The rows of all sequences that a rank has, in its order.
std::vector<int64_t> rows_of_rank(const char* name, const at::Tensor& cu_seqlens, int64_t total, int64_t ranks,
                                  int64_t rank) {
  TORCH_CHECK_VALUE(ranks > 0 && rank >= 0 && rank < ranks, name, ": rank is ", rank, " of ", ranks,
                    ", expected a rank below the number of ranks.");
  TORCH_CHECK_VALUE(total > 0 && total % (2 * ranks) == 0, name, ": there are ", total,
                    " tokens, expected a multiple of ", 2 * ranks, ", two chunks for each rank.");
  const auto offsets = read_offsets(cu_seqlens, "cu_seqlens");
  TORCH_CHECK_VALUE(offsets.front() == 0 && offsets.back() == total, name, ": cu_seqlens goes from ", offsets.front(),
                    " to ", offsets.back(), ", expected 0 to ", total, ", the number of tokens.");
  std::vector<int64_t> rows;
  for (size_t i = 0; i + 1 < offsets.size(); ++i) {
    const auto count = offsets[i + 1] - offsets[i], chunk = count / (2 * ranks);
    TORCH_CHECK_VALUE(count >= 0 && count % (2 * ranks) == 0, name, ": sequence ", i, " has ", count,
                      " tokens, expected a multiple of ", 2 * ranks, ". Pad the sequences.");
    for (const auto part : {rank, 2 * ranks - 1 - rank})
      for (int64_t j = 0; j < chunk; ++j) rows.push_back(offsets[i] + part * chunk + j);
  }
  return rows;
}

at::Tensor partitioned_indices(const at::Tensor& cu_seqlens, int64_t total_tokens, int64_t world_size, int64_t rank) {
  require_on_gpu(cu_seqlens.scalar_type() == at::kInt, "thd_get_partitioned_indices",
                 "GPUs require cu_seqlens of int32, got ", cu_seqlens.scalar_type(), ".");
  const auto rows = rows_of_rank("thd_get_partitioned_indices", cu_seqlens, total_tokens, world_size, rank);
  return on_device(index_tensor(rows).to(at::kInt), cu_seqlens.device());
}

/// The row in sequence order of each row in the order of ranks.
at::Tensor rank_order(const char* name, const at::Tensor& x, const at::Tensor& cu_seqlens, int64_t ranks,
                      int64_t total) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(0) == total, name, ": inp has shape ", x.sizes(), ", expected ", total,
                    " rows, the number of tokens.");
  std::vector<int64_t> rows;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto part = rows_of_rank(name, cu_seqlens, total, ranks, rank);
    rows.insert(rows.end(), part.begin(), part.end());
  }
  return index_tensor(rows);
}

at::Tensor to_rank_order(const at::Tensor& inp, const at::Tensor& cu_seqlens, int64_t cp_size, int64_t total_tokens) {
  const auto order = rank_order("thd_sequence_order_to_cp_rank_order", inp, cu_seqlens, cp_size, total_tokens);
  return on_device(host(inp).index_select(0, order), inp.device());
}

at::Tensor to_sequence_order(const at::Tensor& inp, const at::Tensor& cu_seqlens, int64_t cp_size,
                             int64_t total_tokens) {
  const auto order = rank_order("thd_cp_rank_order_to_sequence_order", inp, cu_seqlens, cp_size, total_tokens);
  const auto from = host(inp);
  auto result = at::empty_like(from, at::MemoryFormat::Contiguous);
  return on_device(result.index_copy_(0, order, from), inp.device());
}

/// Copies the tokens of each sequence, which starts at its padded offset, and no padding.
void copy_valid_tokens(const at::Tensor& out, const at::Tensor& inp, const at::Tensor& cu_seqlens_padded,
                       const at::Tensor& cu_seqlens) {
  constexpr auto kName = "thd_copy_valid_tokens_from_per_split_to_rank_local";
  TORCH_CHECK_VALUE(out.sizes() == inp.sizes(), kName, ": out has shape ", out.sizes(), ", expected that of inp, ",
                    inp.sizes(), ".");
  const auto starts = read_offsets(cu_seqlens_padded, "cu_seqlens_padded");
  const auto sequences = read_sequences(cu_seqlens, cu_seqlens_padded, "cu_seqlens");
  const auto to = host(out), from = host(inp);
  for (size_t i = 0; i < sequences.counts.size(); ++i) {
    const auto rows = std::min(sequences.counts[i], starts[i + 1] - starts[i]);
    if (rows > 0) to.narrow(0, starts[i], rows).copy_(from.narrow(0, starts[i], rows));
  }
}

}  // namespace

void bind_context_parallel(py::module_& m) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  const auto cu_seqlens = py::arg("cu_seqlens"), packed = py::arg("lse_packed"), inp = py::arg("inp");
  const auto lse = py::arg("lse"), lse_per_step = py::arg("lse_per_step");
  m.def("thd_read_half_tensor", read_half, py::arg("tensor"), cu_seqlens, py::arg("half_idx"), release);
  m.def("thd_second_half_lse_correction", correct_second_half_lse, lse, lse_per_step, cu_seqlens, packed, release);
  m.def("thd_read_second_half_lse", read_second_half_lse, lse, cu_seqlens, packed, py::arg("second_half_lse_seqlen"),
        release);
  m.def(
      "thd_out_correction",
      [](const at::Tensor& out, const at::Tensor& out_per_step, const at::Tensor& after, const at::Tensor& step,
         const at::Tensor& offsets, bool only_second_half,
         bool lse_packed) { correct_out(out, out_per_step, {{}, after, step}, offsets, only_second_half, lse_packed); },
      py::arg("out"), py::arg("out_per_step"), lse, lse_per_step, cu_seqlens, py::arg("only_second_half"), packed,
      release);
  m.def(  // since 2.20: `out` is a running result, not a sum of scaled ones
      "thd_out_correction",
      [](const at::Tensor& out, const at::Tensor& out_per_step, const at::Tensor& before, const at::Tensor& after,
         const at::Tensor& step, const at::Tensor& offsets, bool only_second_half, bool lse_packed) {
        correct_out(out, out_per_step, {before, after, step}, offsets, only_second_half, lse_packed);
      },
      py::arg("out"), py::arg("out_per_step"), py::arg("old_lse"), lse, lse_per_step, cu_seqlens,
      py::arg("only_second_half"), packed, release);
  m.def("thd_grad_correction", correct_grad, py::arg("grad"), py::arg("grad_per_step"), cu_seqlens,
        py::arg("first_half"), py::arg("second_half"), release);
  m.def("thd_get_partitioned_indices", partitioned_indices, cu_seqlens, py::arg("total_tokens"), py::arg("world_size"),
        py::arg("rank"), release);
  m.def("thd_sequence_order_to_cp_rank_order", to_rank_order, inp, cu_seqlens, py::arg("cp_size"),
        py::arg("total_tokens"), release);
  m.def("thd_cp_rank_order_to_sequence_order", to_sequence_order, inp, cu_seqlens, py::arg("cp_size"),
        py::arg("total_tokens"), release);
  m.def("thd_copy_valid_tokens_from_per_split_to_rank_local", copy_valid_tokens, py::arg("out"), inp,
        py::arg("cu_seqlens_padded"), cu_seqlens, release);
}

}  // namespace weft::te
