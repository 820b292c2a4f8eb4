#pragma once
#include <memory>
#include <string_view>

#include "weft/comm/exchange.h"
#include "weft/comm/ucx/channel.h"

namespace weft::comm::ucx {

/// Between ranks that may be on different hosts. Each block is received into this rank's memory.
///   bytes: each block once over the network; a header of 48 bytes to each peer and round
class UcxLink final : public Link {
 public:
  explicit UcxLink(const UcxOptions& options);

  int rank() const override { return channel_->rank(); }
  int size() const override { return channel_->size(); }
  std::string_view name() const override { return "ucx"; }
  bool in_place() const override { return false; }
  std::unique_ptr<Exchange> all_gather(const at::Tensor& mine) override;
  std::unique_ptr<Exchange> reduce_scatter(int64_t rows, int64_t columns, at::ScalarType dtype) override;

 private:
  std::shared_ptr<Channel> channel_;  // also of the open exchanges
};

}  // namespace weft::comm::ucx
