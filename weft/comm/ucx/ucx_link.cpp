#include "weft/comm/ucx/ucx_link.h"

#include <c10/util/Exception.h>

#include <utility>

namespace weft::comm::ucx {
namespace {

class UcxExchange final : public Exchange {
 public:
  UcxExchange(std::shared_ptr<Channel> channel, Round& round) : channel_(std::move(channel)), round_(round) {}
  ~UcxExchange() override {
    if (!finished_) channel_->abandon(round_);
  }

  at::Tensor outgoing(int to) override { return round_.outgoing(checked(to)); }

  void publish(int to, int64_t rows) override {
    const auto before = round_.published(checked(to)), all = round_.header().rows;
    TORCH_CHECK_VALUE(before <= rows && rows <= all, "publish: ", rows, " rows for rank ", to, ", expected ", before,
                      " (already published) to ", all, ".");
    round_.publish(to, rows);
  }

  at::Tensor incoming(int from) override { return round_.incoming(checked(from)); }

  int64_t arrived(int from) override {
    channel_->advance();
    return round_.arrived(checked(from));
  }

  void wait(int from, int64_t rows) override {
    TORCH_CHECK_VALUE(rows <= round_.header().rows, "wait: ", rows, " rows, the block has ", round_.header().rows, ".");
    channel_->wait_rows(round_, checked(from), rows);
  }

  void advance() override { channel_->advance_now_and_then(); }

  void finish() override {
    for (int r = 0; r < channel_->size(); ++r) {
      TORCH_CHECK(r == channel_->rank() || round_.published(r) == round_.header().rows, "finish: ", round_.published(r),
                  " of ", round_.header().rows, " rows were published for rank ", r, ".");
    }
    channel_->finish(round_);
    finished_ = true;
  }

 private:
  int checked(int rank) const {
    TORCH_CHECK_INDEX(0 <= rank && rank < channel_->size(), "rank ", rank, " of a group of ", channel_->size());
    return rank;
  }

  std::shared_ptr<Channel> channel_;
  Round& round_;
  bool finished_ = false;
};

}  // namespace

UcxLink::UcxLink(const UcxOptions& options) : channel_(std::make_shared<Channel>(options)) {}

std::unique_ptr<Exchange> UcxLink::all_gather(const at::Tensor& given) {
  TORCH_CHECK_VALUE(given.dim() == 2 && given.device().is_cpu(), "all_gather over UCX: a block of ", given.sizes(),
                    " on ", given.device(), ", expected a matrix in CPU memory.");
  const auto mine = given.contiguous();
  auto& round = channel_->start({Operation::all_gather, mine.scalar_type(), mine.size(0), mine.size(1)}, mine);
  auto exchange = std::make_unique<UcxExchange>(channel_, round);
  for (int step = 0; step < size(); ++step) exchange->publish((rank() + step) % size(), mine.size(0));
  return exchange;
}

std::unique_ptr<Exchange> UcxLink::reduce_scatter(int64_t rows, int64_t columns, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(rows >= 0 && columns >= 0, "reduce_scatter over UCX: blocks of [", rows, ", ", columns, "].");
  auto& round = channel_->start({Operation::reduce_scatter, dtype, rows, columns}, {});
  return std::make_unique<UcxExchange>(channel_, round);
}

}  // namespace weft::comm::ucx

weft::comm::Link* weft_ucx_link_1(const weft::comm::UcxOptions& options) {
  return new weft::comm::ucx::UcxLink(options);
}
