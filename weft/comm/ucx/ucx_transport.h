#pragma once
#include <memory>
#include <string_view>

#include "weft/comm/transport.h"
#include "weft/comm/ucx/communicator.h"

namespace weft::comm::ucx {

/// Transport over UCX, for ranks on different hosts. Blocks are received into this rank's memory.
///   bytes: each block once over the network; a 48-byte header per peer and collective
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
  std::shared_ptr<Communicator> communicator_;  // shared with the open collectives
};

}  // namespace weft::comm::ucx
