#include <ATen/ops/empty.h>

#include "weft/kernels/row_chunks.h"
#include "weft/kernels/rows.h"
#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {

ReduceUnder::ReduceUnder(comm::Link& link, const at::Tensor& given, const kernels::Matrix& w,
                         const kernels::Epilogue& epilogue, const std::function<void()>& between)
    : link_(link), dtype_(epilogue.dtype == at::ScalarType::Undefined ? given.scalar_type() : epilogue.dtype) {
  const auto dy = whole_rows(given);
  const int64_t rows = dy.size(0) / link.size(), columns = w.columns();
  const auto others = peers(link);
  round_ = link.reduce_scatter(rows, columns, dtype_);
  mine_ = at::empty({rows, columns}, dy.options().dtype(dtype_ == at::kDouble ? at::kDouble : at::kFloat));
  const auto block = [&](int rank) { return dy.narrow(0, rank * rows, rows); };
  kernels::RowChunks chunks{.rows = dy.size(0)};
  for (const int peer : others)
    chunks.list.push_back({.a = block(peer), .out = round_->outgoing(peer), .row = peer * rows});
  chunks.list.push_back({.a = block(link.rank()), .out = mine_, .row = link.rank() * rows});
  chunks.on_done = [&](int chunk, int64_t to) {
    if (chunk + 1 < link.size()) round_->publish(others[chunk], to);
  };
  if (!link.in_place())
    chunks.progress = [&] {
      round_->advance();
      if (between) between();
    };
  kernels::gemm(chunks, w, epilogue);
}

void ReduceUnder::advance() noexcept {
  try {
    round_->advance();
  } catch (const std::exception&) {  // `wait` meets it again
  }
}

at::Tensor ReduceUnder::wait() {
  std::vector<at::Tensor> parts{mine_};
  for (const int peer : peers(link_)) {
    round_->wait(peer, mine_.size(0));
    parts.push_back(round_->incoming(peer));
  }
  auto dx = at::empty(mine_.sizes(), mine_.options().dtype(dtype_));
  kernels::sum_terms(parts, dx);
  round_->finish();
  return dx;
}

}  // namespace weft::overlap
