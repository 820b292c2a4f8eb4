#include <ATen/ops/empty.h>

#include "weft/kernels/pieces.h"
#include "weft/kernels/rows.h"
#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {
namespace {

constexpr int64_t kFewRows = 256;  // of all ranks: cut, they would meet the weight twice for little

at::ScalarType stored(const at::Tensor& x, const kernels::Epilogue& e) {
  return e.dtype == at::ScalarType::Undefined ? x.scalar_type() : e.dtype;
}

}  // namespace

at::Tensor gemm_reduce_scatter(comm::Link& link, const at::Tensor& x, const kernels::Matrix& w,
                               const kernels::Epilogue& epilogue) {
  const int64_t rows = x.size(0) / link.size(), columns = w.columns();
  const auto dtype = stored(x, epilogue);
  const auto others = peers(link);
  const auto round = link.reduce_scatter(rows, columns, dtype);
  auto y = at::empty({rows, columns}, x.options().dtype(dtype));
  const bool together = x.size(0) <= kFewRows;
  kernels::Pieces pieces{.rows = x.size(0)};
  const auto block = [&](int rank) { return x.narrow(0, rank * rows, rows); };
  for (const int peer : others)
    pieces.list.push_back({.a = block(peer), .out = round->outgoing(peer), .row = peer * rows});
  std::vector<at::Tensor> parts;
  for (const int peer : others) parts.push_back(round->incoming(peer));
  pieces.list.push_back({.a = block(link.rank()), .out = y, .row = link.rank() * rows});
  if (!together) {
    pieces.list.back().add = parts;
    pieces.ready = [&](int piece, int64_t from) {
      const bool own = piece + 1 == link.size();
      return own ? arrived_from_all(*round, others, from, rows) : rows;
    };
  }
  pieces.done = [&](int piece, int64_t to) {
    if (piece + 1 < link.size()) round->publish(others[piece], to);
  };
  if (!link.in_place()) pieces.between = [&] { round->advance(); };
  kernels::gemm(pieces, w, epilogue);
  if (together) {
    for (const int peer : others) round->wait(peer, rows);
    parts.insert(parts.begin(), y);
    kernels::add_up(parts, y);
  }
  round->finish();
  return y;
}

}  // namespace weft::overlap
