#pragma once
#include <memory>
#include <string_view>

#include "weft/comm/transport.h"
#include "weft/comm/ucx/communicator.h"

namespace weft::comm::ucx {

/// Between ranks that may be on different hosts. Each block is received into this rank's memory.
///   bytes: each block once over the network; a header of 48 bytes to each peer and round
class UcxTransport final : public Transport {
 public:
  explicit UcxTransport(const UcxOptions& options);

  int rank() const override { return communicator_->rank(); }
  int size() const override { return communicator_->size(); }
  std::string_view name() const override { return "ucx"; }
  bool zero_copy() const override { return false; }
  std::unique_ptr<InFlightCollective> all_gather(const at::Tensor& local) override;
  std::unique_ptr<InFlightCollective> reduce_scatter(int64_t rows, int64_t columns, at::ScalarType dtype) override;

 private:
  std::shared_ptr<Communicator> communicator_;  // also of the open exchanges
};

}  // namespace weft::comm::ucx
