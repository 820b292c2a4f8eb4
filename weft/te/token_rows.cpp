#include "weft/te/token_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <numeric>

namespace weft::te {
namespace {

at::IntArrayRef leading_sizes(const at::Tensor& t, int64_t trailing) {
  return t.sizes().slice(0, static_cast<size_t>(t.dim() - trailing));
}

/// `t` with its leading dimensions as one.
at::Tensor as_rows(const at::Tensor& t, int64_t trailing) {
  auto sizes = t.sizes().slice(static_cast<size_t>(t.dim() - trailing)).vec();
  sizes.insert(sizes.begin(), c10::multiply_integers(leading_sizes(t, trailing)));
  return t.reshape(sizes);
}

/// Collects row(i, j) of token j of sequence i. There are `rows` rows.
template <class Row>
TokenRows collect_rows(const Sequences& sequences, int64_t rows, const Row& row) {
  std::vector<int64_t> offsets{0}, index;
  for (int64_t i = 0; i < sequences.size(); ++i) {
    const auto count = sequences.counts[static_cast<size_t>(i)];
    for (int64_t j = 0; j < count; ++j) index.push_back(row(i, j));
    offsets.push_back(offsets.back() + count);
  }
  bool in_order = static_cast<int64_t>(index.size()) == rows;
  for (int64_t i = 0; in_order && i < rows; ++i) in_order = index[static_cast<size_t>(i)] == i;
  return {index_tensor(offsets), in_order ? at::Tensor() : index_tensor(index)};
}

void check_sequences(const char* what, at::IntArrayRef sizes, int64_t batch, int64_t length,
                     const Sequences& sequences) {
  TORCH_CHECK_VALUE(sequences.size() <= batch, "attention: cu_seqlens has ", sequences.size(), " sequences, expected ",
                    "at most ", batch, " for ", what, " ", sizes, ".");
  for (const auto count : sequences.counts)
    TORCH_CHECK_VALUE(count <= length, "attention: cu_seqlens has a sequence of ", count, " tokens, expected at most ",
                      length, " for ", what, " ", sizes, ".");
}

}  // namespace

at::Tensor index_tensor(const std::vector<int64_t>& values) {
  auto result = at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), result.mutable_data_ptr<int64_t>());
  return result;
}

std::vector<int64_t> read_offsets(const at::Tensor& cu_seqlens, const char* name) {
  const bool integers = cu_seqlens.scalar_type() == at::kInt || cu_seqlens.scalar_type() == at::kLong;
  TORCH_CHECK_VALUE(cu_seqlens.dim() == 1 && cu_seqlens.size(0) > 0 && integers, name, " has shape ",
                    cu_seqlens.sizes(), " and dtype ", cu_seqlens.scalar_type(),
                    ", expected a vector of int32 or int64 with one element more than there are sequences.");
  const auto values = cu_seqlens.to(at::TensorOptions(at::kCPU).dtype(at::kLong)).contiguous();
  const auto* data = values.const_data_ptr<int64_t>();
  return {data, data + values.numel()};
}

Sequences read_sequences(const at::Tensor& cu_seqlens, const at::Tensor& cu_seqlens_padded, const char* name) {
  const auto ends = read_offsets(cu_seqlens, name);
  auto starts = cu_seqlens_padded.defined() ? read_offsets(cu_seqlens_padded, name) : ends;
  TORCH_CHECK_VALUE(starts.size() >= ends.size(), name, "_padded has ", starts.size(), " elements, expected ",
                    ends.size(), ", as many as ", name, ".");
  Sequences result;
  for (size_t i = 0; i + 1 < ends.size(); ++i) {
    TORCH_CHECK_VALUE(ends[i] <= ends[i + 1], name, " decreases from ", ends[i], " to ", ends[i + 1],
                      "; expected offsets that do not decrease.");
    result.counts.push_back(ends[i + 1] - ends[i]);
    result.starts.push_back(starts[i]);
  }
  return result;
}

at::Tensor TokenRows::gather(const at::Tensor& t, int64_t trailing) const {
  const auto rows = as_rows(t, trailing);
  return index.defined() ? rows.index_select(0, index) : rows;
}

void TokenRows::scatter(const at::Tensor& tokens, const at::Tensor& t, int64_t trailing, double fill) const {
  if (!index.defined()) {
    t.copy_(tokens.view(t.sizes()));
    return;
  }
  const auto count = c10::multiply_integers(leading_sizes(t, trailing));
  auto sizes = t.sizes().slice(static_cast<size_t>(t.dim() - trailing)).vec();
  sizes.insert(sizes.begin(), count);
  const auto rows = at::full(sizes, fill, t.options());
  t.copy_(rows.index_copy_(0, index, tokens.to(t.scalar_type())).view(t.sizes()));
}

TokenRows token_rows(QkvFormat format, at::IntArrayRef sizes, const Sequences& sequences) {
  if (format == QkvFormat::thd) {
    const auto rows = sizes[0];
    return collect_rows(sequences, rows, [&](int64_t i, int64_t j) {
      const auto row = sequences.starts[static_cast<size_t>(i)] + j;
      TORCH_CHECK_VALUE(row >= 0 && row < rows, "attention: cu_seqlens place a token of sequence ", i, " in row ", row,
                        ", expected less than ", rows, ", the number of rows.");
      return row;
    });
  }
  const bool batch_first = format == QkvFormat::bshd;
  const auto batch = sizes[batch_first ? 0 : 1], length = sizes[batch_first ? 1 : 0];
  check_sequences("a batch of sizes", sizes, batch, length, sequences);
  return collect_rows(sequences, batch * length,
                      [&](int64_t i, int64_t j) { return batch_first ? i * length + j : j * batch + i; });
}

TokenRows paged_rows(QkvFormat format, at::IntArrayRef sizes, const at::Tensor& page_table,
                     const Sequences& sequences) {
  const bool page_first = format == QkvFormat::bshd;
  const auto pages = sizes[page_first ? 0 : 1], length = sizes[page_first ? 1 : 0];
  TORCH_CHECK_VALUE(page_table.dim() == 2, "attention: the page table has shape ", page_table.sizes(),
                    ", expected [sequences, pages].");
  check_sequences("page tables of sizes", page_table.sizes(), page_table.size(0), page_table.size(1) * length,
                  sequences);
  const auto table = page_table.to(at::kLong).contiguous();
  const auto* data = table.const_data_ptr<int64_t>();
  return collect_rows(sequences, pages * length, [&](int64_t i, int64_t j) {
    const auto page = data[i * page_table.size(1) + j / length], row = j % length;
    TORCH_CHECK_VALUE(page >= 0 && page < pages, "attention: the page table of sequence ", i, " names page ", page,
                      ", expected less than ", pages, ", the number of pages.");
    return page_first ? page * length + row : row * pages + page;
  });
}

}  // namespace weft::te
