#pragma once
#include <memory>

#include "weft/comm/group_failure.h"
#include "weft/comm/transport.h"

namespace weft::comm {

/// A transport that shares the failure state of its group: it raises once the group has failed, and its errors fail the
/// group. The thread that starts a collective owns the transport until all its collectives are finished or dropped; a
/// call from another thread raises. It does not block, because taking turns would not give all ranks the same order of
/// collectives.
class GuardedTransport final : public Transport {
 public:
  GuardedTransport(std::shared_ptr<GroupFailure> failure, std::unique_ptr<Transport> transport);
  ~GuardedTransport() override;

  int rank() const override { return transport_->rank(); }
  int size() const override { return transport_->size(); }
  std::string_view name() const override { return transport_->name(); }
  bool zero_copy() const override { return transport_->zero_copy(); }

  std::unique_ptr<InFlightCollective> all_gather(const at::Tensor& local) override;
  std::unique_ptr<InFlightCollective> all_gather(int64_t rows, int64_t columns, at::ScalarType dtype) override;
  std::unique_ptr<InFlightCollective> reduce_scatter(int64_t rows, int64_t columns, at::ScalarType dtype) override;

 private:
  class ThreadGuard;        // owner thread and failure state
  class GuardedCollective;  // a collective that checks the owner thread

  template <class Start>
  std::unique_ptr<InFlightCollective> start(Start&& start);

  std::unique_ptr<Transport> transport_;
  std::shared_ptr<ThreadGuard> guard_;
};

}  // namespace weft::comm
