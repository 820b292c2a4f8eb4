#pragma once
#include <ucp/api/ucp.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace weft::comm::ucx {

/// A message on its way. Must stay where it is while it is pending.
struct Transfer {
  enum class State : uint8_t { none, pending, done, failed };
  State state = State::none;
  ucs_status_t status = UCS_OK;  // of a failed one
  size_t bytes = 0;              // a message of another length is a failure
  void* request = nullptr;       // of a pending receive
  bool done() const { return state == State::done; }
  bool failed() const { return state == State::failed; }
};

/// UCX's worker and its connections to the peers of one group. Bytes move only inside `progress`, on the thread that
/// calls it; UCX's own thread accepts connections. For one thread at a time.
class Worker {
 public:
  /// `devices`: UCX_NET_DEVICES, where the environment does not set it. Raises if UCX finds no network device.
  Worker(int peers, const std::string& devices);
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  /// Gives messages on their way a moment to leave, then ends all. Takes half a second at most.
  ~Worker();

  std::string address() const;
  void connect(int peer, const std::string& address);

  void send(int peer, uint64_t tag, const void* data, size_t bytes, Transfer& transfer);
  void receive(uint64_t tag, void* data, size_t bytes, Transfer& transfer);
  /// Afterwards it is no longer pending.
  void cancel_receive(Transfer& transfer);

  /// Moves what can be moved; false if nothing was.
  bool progress() { return ucp_worker_progress(worker_.get()) != 0; }
  /// Returns when something may be moved, at the latest after `max_wait`.
  void sleep(std::chrono::milliseconds max_wait);

  /// Whether the connection to `peer` broke, and when.
  bool broken(int peer) const { return connections_[peer].status != UCS_OK; }
  std::chrono::steady_clock::time_point broke_at(int peer) const { return connections_[peer].broke_at; }

 private:
  struct Connection {
    ucp_ep_h endpoint = nullptr;
    ucs_status_t status = UCS_OK;
    std::chrono::steady_clock::time_point broke_at;
  };
  /// Takes messages that nobody received, of each of which UCX would warn, though after a failure they are no news, and
  /// destroys the worker.
  void drain();
  /// Runs until `requests` are over, at the latest until `max_wait` has passed, and frees them.
  void finish_requests(const std::vector<ucs_status_ptr_t>& requests, std::chrono::milliseconds max_wait);

  std::unique_ptr<ucp_context, decltype(&ucp_cleanup)> context_;
  std::unique_ptr<ucp_worker, decltype(&ucp_worker_destroy)> worker_;
  int event_ = -1;  // readable when something may be moved
  std::vector<Connection> connections_;
};

}  // namespace weft::comm::ucx
