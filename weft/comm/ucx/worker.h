#pragma once
#include <ucp/api/ucp.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace weft::comm::ucx {

/// A message being sent or received. Must not move in memory while it is pending.
struct Transfer {
  enum class State : uint8_t { none, pending, done, failed };
  State state = State::none;
  ucs_status_t status = UCS_OK;  // if failed
  size_t bytes = 0;              // expected length; any other length is a failure
  void* request = nullptr;       // of a pending receive
  bool done() const { return state == State::done; }
  bool failed() const { return state == State::failed; }
};

/// A UCX worker and its endpoints to the peers of one group. Data moves only inside `progress`, on the calling thread;
/// a thread of UCX accepts connections. For one thread at a time.
class Worker {
 public:
  /// `devices`: value of UCX_NET_DEVICES unless the environment sets it. Raises if UCX finds no network device.
  Worker(int peers, const std::string& devices);
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  /// Flushes pending sends, unless `skip_flush` was called, and closes all endpoints; 200 ms each at most.
  ~Worker();

  std::string address() const;
  void connect(int peer, const std::string& address);

  void send(int peer, uint64_t tag, const void* data, size_t bytes, Transfer& transfer);
  void receive(uint64_t tag, void* data, size_t bytes, Transfer& transfer);
  /// Afterwards the transfer is no longer pending.
  void cancel_receive(Transfer& transfer);

  /// After a failure: a stopped peer would delay the flush until it times out.
  void skip_flush() { flush_ = false; }

  /// Returns false if there was nothing to do.
  bool progress() { return ucp_worker_progress(worker_.get()) != 0; }
  /// Sleeps until there may be something to progress, for at most `max_wait`.
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
  /// Receives unexpected messages, which remain after a failure, so that UCX prints no warning for each of them. Then
  /// destroys the worker.
  void drain();
  /// Progresses until `requests` complete, for at most `max_wait`, and frees them.
  void finish_requests(const std::vector<ucs_status_ptr_t>& requests, std::chrono::milliseconds max_wait);

  std::unique_ptr<ucp_context, decltype(&ucp_cleanup)> context_;
  std::unique_ptr<ucp_worker, decltype(&ucp_worker_destroy)> worker_;
  int event_ = -1;  // readable when there may be something to progress
  std::vector<Connection> connections_;
  bool flush_ = true;
};

}  // namespace weft::comm::ucx
