#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {
namespace {

constexpr int64_t kWireRow = 64;  // bytes of a row of the collective; blocks are multiples of it

class AllGatherQuantizedGemm {
 public:
  using Check = std::function<void(int, const at::Tensor&, const kernels::QuantizedMatrix&)>;

  AllGatherQuantizedGemm(comm::Transport& transport, const QuantizedBlock& x, const Check& check)
      : transport_(transport),
        x_(x),
        check_(check),
        sizes_(x.rows.quantization, x.rows.rows, x.rows.columns, false),
        collective_(transport.all_gather(x.bytes.view({-1, kWireRow}))) {
    chunks_.rows = x.rows.rows * transport.size();
    chunks_.list.push_back({x.rows, transport.rank() * x.rows.rows});
    for (const int peer : peers(transport))
      chunks_.list.push_back({matrix_of(collective_->incoming(peer)), peer * x.rows.rows});
    chunks_.ready = [this](int chunk, int64_t from) { return ready(chunk, from); };
    if (transport.zero_copy())
      chunks_.min_block_rows = chunks_.rows;  // another pass over the weight takes longer than waiting for all rows
    else
      chunks_.progress = [this] { collective_->progress(); };
  }
  AllGatherQuantizedGemm(const AllGatherQuantizedGemm&) = delete;
  AllGatherQuantizedGemm& operator=(const AllGatherQuantizedGemm&) = delete;

  at::Tensor run(const kernels::QuantizedOperand& w, const kernels::Epilogue& epilogue) {
    auto y = kernels::quantized_gemm(chunks_, w, epilogue);
    collective_->finish();
    return y;
  }

 private:
  kernels::QuantizedMatrix matrix_of(const at::Tensor& block) const {
    return kernels::matrix_of_copy(x_.rows.quantization, x_.rows.dtype, x_.rows.rows, x_.rows.columns, false,
                                   block.view({-1}).slice(0, x_.header_bytes));
  }

  /// Bytes of a block up to row `row`.
  int64_t bytes_before(int64_t row) const { return x_.header_bytes + sizes_.data_offset() + row * sizes_.row_bytes; }

  int64_t ready(int chunk, int64_t from) {
    const auto rows = x_.rows.rows;
    if (chunk == 0) return transport_.zero_copy() ? rows : std::min(rows, from + own_rows_between_progress());
    const int peer = (transport_.rank() + chunk) % transport_.size();
    const auto wire_rows = x_.bytes.numel() / kWireRow;
    const auto needed = (bytes_before(from + 1) + kWireRow - 1) / kWireRow;
    const auto arrived = arrived_from_all(*collective_, {peer}, needed - 1, wire_rows);
    if (from == 0)
      check_(peer, collective_->incoming(peer).view({-1}).narrow(0, 0, x_.header_bytes), chunks_.list[chunk].matrix);
    return arrived == wire_rows ? rows : (arrived * kWireRow - bytes_before(0)) / sizes_.row_bytes;
  }

  /// A GEMM of MKL is not interrupted to progress the network, so own rows are multiplied in parts.
  int64_t own_rows_between_progress() const { return std::max<int64_t>(chunks_.min_block_rows, x_.rows.rows / 4); }

  comm::Transport& transport_;
  const QuantizedBlock& x_;
  const Check& check_;
  kernels::CopySizes<int64_t> sizes_;
  std::unique_ptr<comm::InFlightCollective> collective_;
  kernels::QuantizedRowChunks chunks_;
};

}  // namespace

at::Tensor all_gather_gemm(comm::Transport& transport, const QuantizedBlock& x, const kernels::QuantizedOperand& w,
                           const kernels::Epilogue& epilogue, const AllGatherQuantizedGemm::Check& check) {
  return AllGatherQuantizedGemm(transport, x, check).run(w, epilogue);
}

}  // namespace weft::overlap
