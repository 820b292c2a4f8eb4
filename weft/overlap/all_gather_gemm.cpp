#include "weft/kernels/row_chunks.h"
#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {
namespace {

class AllGatherGemm {
 public:
  AllGatherGemm(comm::Transport& transport, const at::Tensor& x, const kernels::Matrix& w, const kernels::Epilogue& e)
      : transport_(transport), x_(with_contiguous_rows(x)), w_(w), e_(e), rows_(x.size(0)) {
    owner_ = peers(transport);
    owner_.insert(owner_.begin(), transport.rank());
  }

  kernels::GemmResult run(at::Tensor* gathered) {
    if (!gathered && rows_ > 0 && transport_.zero_copy() &&
        kernels::supports_blocked_layout(x_.scalar_type(), w_.columns(), w_.rows())) {
      const auto columns = wire_columns(c10::multiply_integers(tiles()), rows_, x_.size(1));
      if (const auto collective = transport_.all_gather(rows_, columns, x_.scalar_type()))
        return run_on_tiles(*collective);
    }
    const auto collective = transport_.all_gather(x_);
    auto result = run_on_rows(*collective);
    if (gathered) *gathered = concatenate_blocks(transport_, *collective, x_);
    collective->finish();
    return result;
  }

 private:
  /// Shape of a block packed into AMX tiles (kernels/row_chunks.h).
  std::vector<int64_t> tiles() const { return {(rows_ + 31) / 32, (x_.size(1) + 31) / 32 * 2, 16, 32}; }

  /// Multiplies the rows of each block where they are.
  kernels::GemmResult run_on_rows(comm::InFlightCollective& collective) const {
    auto chunks = make_chunks(collective);
    for (const int rank : owner_)
      chunks.list.push_back({.a = rank == transport_.rank() ? x_ : collective.incoming(rank), .row = rank * rows_});
    if (!transport_.zero_copy()) chunks.progress = [&] { collective.progress(); };
    return kernels::gemm(chunks, w_, e_);
  }

  /// The GEMM also packs this rank's rows into the shared memory that the peers read, so that no rank copies or packs
  /// them again.
  kernels::GemmResult run_on_tiles(comm::InFlightCollective& collective) const {
    auto chunks = make_chunks(collective);
    const int rank = transport_.rank();
    chunks.list.push_back({.a = x_, .row = rank * rows_, .pack_dst = reshaped(collective.outgoing(rank), tiles())});
    for (size_t i = 1; i < owner_.size(); ++i)
      chunks.list.push_back(
          {.a = reshaped(collective.incoming(owner_[i]), tiles()), .row = owner_[i] * rows_, .packed_rows = rows_});
    chunks.on_packed = [&](int, int64_t to) { collective.mark_ready(rank, std::min(to, rows_)); };
    auto result = kernels::gemm(chunks, w_, e_);
    collective.finish();
    return result;
  }

  /// Row chunks in the order of `owner_`; this rank's own rows are ready.
  kernels::RowChunks make_chunks(comm::InFlightCollective& collective) const {
    kernels::RowChunks chunks{.rows = rows_ * transport_.size()};
    chunks.ready = [&](int chunk, int64_t from) {
      return chunk == 0 ? rows_ : arrived_from_all(collective, {owner_[chunk]}, from, rows_);
    };
    // Zero-copy: waiting for all rows is cheaper than another pass over the weight.
    if (transport_.zero_copy()) chunks.min_block_rows = chunks.rows;
    return chunks;
  }

  comm::Transport& transport_;
  at::Tensor x_;
  const kernels::Matrix& w_;
  const kernels::Epilogue& e_;
  int64_t rows_;            // of a block
  std::vector<int> owner_;  // rank that owns each row chunk
};

}  // namespace

kernels::GemmResult all_gather_gemm(comm::Transport& transport, const at::Tensor& x, const kernels::Matrix& w,
                                    const kernels::Epilogue& epilogue, at::Tensor* gathered) {
  return AllGatherGemm(transport, x, w, epilogue).run(gathered);
}

}  // namespace weft::overlap
