#include "weft/comm/ucx/ucx_transport.h"

#include <c10/util/Exception.h>

#include <utility>

namespace weft::comm::ucx {
namespace {

class UcxCollective final : public InFlightCollective {
 public:
  UcxCollective(std::shared_ptr<Communicator> communicator, CollectiveState& state)
      : communicator_(std::move(communicator)), state_(state) {}
  ~UcxCollective() override {
    if (!finished_) communicator_->abandon(state_);
  }

  at::Tensor outgoing(int to) override { return state_.outgoing(check_rank(to)); }

  void mark_ready(int to, int64_t rows) override {
    const auto before = state_.ready_rows(check_rank(to)), all = state_.header().rows;
    TORCH_CHECK_VALUE(before <= rows && rows <= all, "mark_ready: expected ", before, " (already marked) to ", all,
                      " rows for rank ", to, ", got ", rows, ".");
    state_.mark_ready(to, rows);
  }

  at::Tensor incoming(int from) override { return state_.incoming(check_rank(from)); }

  int64_t arrived(int from) override {
    communicator_->progress();
    return state_.arrived(check_rank(from));
  }

  void wait(int from, int64_t rows) override {
    TORCH_CHECK_VALUE(rows <= state_.header().rows, "wait: expected at most ", state_.header().rows, " rows, got ",
                      rows, ".");
    communicator_->wait_rows(state_, check_rank(from), rows);
  }

  void progress() override { communicator_->progress_throttled(); }

  void finish() override {
    for (int r = 0; r < communicator_->size(); ++r) {
      TORCH_CHECK(r == communicator_->rank() || state_.ready_rows(r) == state_.header().rows, "finish: only ",
                  state_.ready_rows(r), " of ", state_.header().rows, " rows for rank ", r,
                  " are marked ready in collective ", state_.header().seq, ".");
    }
    communicator_->finish(state_);
    finished_ = true;
  }

 private:
  int check_rank(int rank) const {
    TORCH_CHECK_INDEX(0 <= rank && rank < communicator_->size(), "Rank ", rank, " is out of range for a group of ",
                      communicator_->size(), ".");
    return rank;
  }

  std::shared_ptr<Communicator> communicator_;
  CollectiveState& state_;
  bool finished_ = false;
};

}  // namespace

UcxTransport::UcxTransport(const UcxOptions& options) : communicator_(std::make_shared<Communicator>(options)) {}

std::unique_ptr<InFlightCollective> UcxTransport::all_gather(const at::Tensor& block) {
  TORCH_CHECK_VALUE(block.dim() == 2 && block.device().is_cpu(), "all_gather: expected a 2-D CPU tensor, got shape ",
                    block.sizes(), " on ", block.device(), ".");
  const auto local = block.contiguous();
  auto& state = communicator_->start({CommOp::all_gather, local.scalar_type(), local.size(0), local.size(1)}, local);
  auto collective = std::make_unique<UcxCollective>(communicator_, state);
  for (int step = 0; step < size(); ++step) collective->mark_ready((rank() + step) % size(), local.size(0));
  return collective;
}

std::unique_ptr<InFlightCollective> UcxTransport::reduce_scatter(int64_t rows, int64_t columns, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(rows >= 0 && columns >= 0, "reduce_scatter: expected at least 0 rows and columns, got [", rows,
                    ", ", columns, "].");
  auto& state = communicator_->start({CommOp::reduce_scatter, dtype, rows, columns}, {});
  return std::make_unique<UcxCollective>(communicator_, state);
}

}  // namespace weft::comm::ucx

weft::comm::Transport* weft_ucx_transport_1(const weft::comm::UcxOptions& options) {
  return new weft::comm::ucx::UcxTransport(options);
}
