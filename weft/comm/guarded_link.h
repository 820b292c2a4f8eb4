#pragma once
#include <memory>

#include "weft/comm/exchange.h"
#include "weft/comm/group_failure.h"

namespace weft::comm {

/// A link as part of its group. It refuses use once the group has failed, and what fails on it fails the group. It
/// belongs to one thread at a time: to the one that started a round, until all rounds are finished or dropped. Any
/// other thread gets an error that names the group; waiting instead would leave the order of rounds to chance, and it
/// must be the same on all ranks.
class GuardedLink final : public Link {
 public:
  GuardedLink(std::shared_ptr<GroupFailure> failure, std::unique_ptr<Link> link);
  ~GuardedLink() override;

  int rank() const override { return link_->rank(); }
  int size() const override { return link_->size(); }
  std::string_view name() const override { return link_->name(); }
  bool in_place() const override { return link_->in_place(); }

  std::unique_ptr<Exchange> all_gather(const at::Tensor& mine) override;
  std::unique_ptr<Exchange> all_gather(int64_t rows, int64_t columns, at::ScalarType dtype) override;
  std::unique_ptr<Exchange> reduce_scatter(int64_t rows, int64_t columns, at::ScalarType dtype) override;

 private:
  class Use;    // who uses the link
  class Round;  // an exchange of it

  template <class Start>
  std::unique_ptr<Exchange> start(Start&& start);

  std::unique_ptr<Link> link_;
  std::shared_ptr<Use> use_;
};

}  // namespace weft::comm
