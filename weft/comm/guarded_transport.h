#pragma once
#include <memory>

#include "weft/comm/group_failure.h"
#include "weft/comm/transport.h"

namespace weft::comm {

/// A link as part of its group. It refuses use once the group has failed, and what fails on it fails the group. It
/// belongs to one thread at a time: to the one that started a round, until all rounds are finished or dropped. Any
/// other thread gets an error that names the group; waiting instead would leave the order of rounds to chance, and it
/// must be the same on all ranks.
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
  class ThreadGuard;        // who uses the link
  class GuardedCollective;  // an exchange of it

  template <class Start>
  std::unique_ptr<InFlightCollective> start(Start&& start);

  std::unique_ptr<Transport> transport_;
  std::shared_ptr<ThreadGuard> guard_;
};

}  // namespace weft::comm
