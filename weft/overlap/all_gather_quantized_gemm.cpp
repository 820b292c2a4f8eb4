#include <exception>

#include "weft/overlap/blocks.h"
#include "weft/overlap/schedules.h"

namespace weft::overlap {
namespace {

constexpr int64_t kUnit = 64;  // bytes of a row of the collective; a block consists of whole rows

class AllGatherQuantizedGemm {
 public:
  using Check = std::function<void(int, const at::Tensor&, const kernels::QuantizedMatrix&)>;

  AllGatherQuantizedGemm(comm::Transport& transport, const QuantizedBlock& x, const Check& check)
      : transport_(transport),
        x_(x),
        check_(check),
        sizes_(x.rows.quantization, x.rows.rows, x.rows.columns, false),
        collective_(transport.all_gather(x.bytes.view({-1, kUnit}))) {
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

  kernels::GemmResult run(const kernels::QuantizedOperand& w, const kernels::Epilogue& epilogue) {
    // The AMX GEMM progresses the network itself.
    splits_own_rows_ =
        !transport_.zero_copy() && !kernels::supports_blocked_layout(at::kBFloat16, w.matrix.rows, w.matrix.columns);
    auto y = kernels::quantized_gemm(chunks_, w, epilogue);
    collective_->finish();
    if (error_) std::rethrow_exception(error_);
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
    if (chunk == 0) return splits_own_rows_ ? std::min(rows, from + std::max(chunks_.min_block_rows, rows / 4)) : rows;
    const int peer = (transport_.rank() + chunk) % transport_.size();
    const auto units = x_.bytes.numel() / kUnit, needed = (bytes_before(from + 1) + kUnit - 1) / kUnit;
    const auto arrived = arrived_from_all(*collective_, {peer}, needed - 1, units);
    if (from == 0) check(peer, chunks_.list[chunk].matrix);
    return arrived == units ? rows : (arrived * kUnit - bytes_before(0)) / sizes_.row_bytes;
  }

  /// Keeps the error until all ranks have finished the collective, so that the group stays usable.
  void check(int peer, const kernels::QuantizedMatrix& rows) {
    try {
      check_(peer, collective_->incoming(peer).view({-1}).narrow(0, 0, x_.header_bytes), rows);
    } catch (...) {
      if (!error_) error_ = std::current_exception();
    }
  }

  comm::Transport& transport_;
  const QuantizedBlock& x_;
  const Check& check_;
  kernels::CopySizes<int64_t> sizes_;
  std::unique_ptr<comm::InFlightCollective> collective_;
  kernels::QuantizedRowChunks chunks_;
  bool splits_own_rows_ = false;  // a GEMM of MKL is not interrupted to progress the network
  std::exception_ptr error_;
};

}  // namespace

kernels::GemmResult all_gather_gemm(comm::Transport& transport, const QuantizedBlock& x,
                                    const kernels::QuantizedOperand& w, const kernels::Epilogue& epilogue,
                                    const AllGatherQuantizedGemm::Check& check) {
  return AllGatherQuantizedGemm(transport, x, check).run(w, epilogue);
}

}  // namespace weft::overlap
