#include <ATen/ops/empty.h>

#include "weft/kernels/row_chunks.h"
#include "weft/kernels/rows.h"
#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {

OverlappedReduceScatter::OverlappedReduceScatter(comm::Transport& transport, const at::Tensor& grad_output,
                                                 const kernels::Matrix& w, const kernels::Epilogue& epilogue,
                                                 const std::function<void()>& on_progress)
    : transport_(transport), dtype_(epilogue.result_dtype(grad_output.scalar_type())) {
  const auto dy = with_contiguous_rows(grad_output);
  const int64_t rows = dy.size(0) / transport.size(), columns = w.columns();
  collective_ = transport.reduce_scatter(rows, columns, dtype_);
  local_ = at::empty({rows, columns}, dy.options().dtype(dtype_ == at::kDouble ? at::kDouble : at::kFloat));
  auto chunks = reduce_scatter_chunks(transport, *collective_, dy, local_);
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
