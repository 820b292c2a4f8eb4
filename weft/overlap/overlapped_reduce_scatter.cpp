#include <ATen/ops/empty.h>

#include "weft/kernels/row_chunks.h"
#include "weft/kernels/rows.h"
#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {

OverlappedReduceScatter::OverlappedReduceScatter(comm::Transport& transport, const at::Tensor& grad_output,
                                                 const kernels::Matrix& w, const kernels::Epilogue& epilogue,
                                                 const std::function<void()>& on_progress)
    : transport_(transport),
      dtype_(epilogue.dtype == at::ScalarType::Undefined ? grad_output.scalar_type() : epilogue.dtype) {
  const auto dy = with_contiguous_rows(grad_output);
  const int64_t rows = dy.size(0) / transport.size(), columns = w.columns();
  const auto others = peers(transport);
  collective_ = transport.reduce_scatter(rows, columns, dtype_);
  local_ = at::empty({rows, columns}, dy.options().dtype(dtype_ == at::kDouble ? at::kDouble : at::kFloat));
  const auto block = [&](int rank) { return dy.narrow(0, rank * rows, rows); };
  kernels::RowChunks chunks{.rows = dy.size(0)};
  for (const int peer : others)
    chunks.list.push_back({.a = block(peer), .out = collective_->outgoing(peer), .row = peer * rows});
  chunks.list.push_back({.a = block(transport.rank()), .out = local_, .row = transport.rank() * rows});
  chunks.on_done = [&](int chunk, int64_t to) {
    if (chunk + 1 < transport.size()) collective_->mark_ready(others[chunk], to);
  };
  if (!transport.zero_copy())
    chunks.progress = [&] {
      collective_->progress();
      if (on_progress) on_progress();
    };
  kernels::gemm(chunks, w, epilogue);
}

void OverlappedReduceScatter::progress() noexcept {
  try {
    collective_->progress();
  } catch (const std::exception&) {  // the error is sticky: `wait` raises it
  }
}

at::Tensor OverlappedReduceScatter::wait() {
  std::vector<at::Tensor> parts{local_};
  for (const int peer : peers(transport_)) {
    collective_->wait(peer, local_.size(0));
    parts.push_back(collective_->incoming(peer));
  }
  auto dx = at::empty(local_.sizes(), local_.options().dtype(dtype_));
  kernels::sum_terms(parts, dx);
  collective_->finish();
  return dx;
}

}  // namespace weft::overlap
