#include "weft/comm/host_rendezvous.h"

#include <c10/util/Exception.h>
#include <c10/util/error.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "weft/comm/interrupt.h"
#include "weft/comm/local_socket.h"
#include "weft/comm/store_exchange.h"

namespace weft::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr int kBacklog = 1024;          // of the listener; connections of unknown processes use it, too
constexpr int kMaxAcceptsPerPoll = 64;  // bounds the delay of the deadline check in a connection flood

/// What a rank writes to the Store for its peers.
struct EndpointRecord {
  size_t bytes = 0;  // size of its memory
  Token token{};     // known only to processes that can read the Store
  std::string socket;
  HostIdentity host;

  std::string text() const {
    return c10::str("weft1 ", bytes, " ", token[0], " ", token[1], " ", socket, " ", host.text());
  }
  static EndpointRecord parse(const std::string& text) {
    EndpointRecord endpoint;
    std::string version, host;
    std::istringstream in(text);
    in >> version >> endpoint.bytes >> endpoint.token[0] >> endpoint.token[1] >> endpoint.socket >> std::ws;
    std::getline(in, host);
    TORCH_CHECK_VALUE(!in.fail() && version == "weft1", "'", text, "' is not an endpoint record.");
    endpoint.host = HostIdentity::parse(host);
    return endpoint;
  }
};

EndpointRecord local_endpoint(size_t bytes) {
  const auto host = HostIdentity::local();
  const auto suffix = random_token();
  std::ostringstream socket;
  socket << "weft-" << host.pid << "-" << std::hex << suffix[0] << suffix[1];
  return {bytes, random_token(), socket.str(), host};
}

/// Message that each side of a connection sends with its file descriptor.
struct Hello {
  char magic[8] = {'w', 'e', 'f', 't', 'm', 'e', 'm', '1'};
  uint64_t rank = 0;
  Token token{};  // of the sender's endpoint record
};

}  // namespace

/// One exchange. A rank sends a Hello to every lower rank, then replies to every higher one, then reads the replies of
/// the lower ones. This order cannot deadlock.
class HostRendezvous::Handshake {
 public:
  Handshake(HostRendezvous& rendezvous, std::shared_ptr<SharedMemory> local, const std::function<void()>& poll);
  SharedMemories run();
  uint64_t group_id() const { return endpoints_[0].token[0]; }

 private:
  int rank() const { return rendezvous_.rank(); }
  int size() const { return rendezvous_.size(); }
  std::string name(int peer) const;
  [[noreturn]] void fail(int peer, const std::string& what) const;
  void fail_if_exited(int peer) const;
  [[noreturn]] void fail_disconnected(int peer, const std::string& what) const;
  void check_wait(int peer, const char* awaited) const;
  int poll_timeout_ms() const;

  void exchange_endpoints();
  void accept_endpoint(int peer, const std::string& text);
  void connect_peer(int peer);
  void send_hello(const UniqueFd& connection, int peer);
  void accept_peers();
  bool is_known(const UniqueFd& connection) const;
  bool handle_hello(const UniqueFd& connection);
  void receive_reply(int peer);
  bool is_hello_of(const Hello& hello, int peer) const;
  void map_memory(int peer, UniqueFd file);

  HostRendezvous& rendezvous_;
  const std::function<void()>& poll_;
  Clock::time_point deadline_;
  std::string prefix_;
  UniqueFd listener_;
  std::vector<EndpointRecord> endpoints_;
  std::vector<UniqueFd> connections_;  // to lower ranks
  std::vector<UniqueFd> accepted_;     // accepted, no Hello yet
  int rejected_ = 0;                   // number of unknown connections
  SharedMemories memories_;
};

HostRendezvous::Handshake::Handshake(HostRendezvous& rendezvous, std::shared_ptr<SharedMemory> local,
                                     const std::function<void()>& poll)
    : rendezvous_(rendezvous),
      poll_(poll),
      deadline_(Clock::now() + rendezvous.timeout()),
      prefix_(c10::str(rendezvous.options_.prefix, "/", rendezvous.generation_++)),
      endpoints_(rendezvous.size()),
      connections_(rendezvous.size()),
      memories_(rendezvous.size()) {
  endpoints_[rank()] = local_endpoint(local->bytes());
  memories_[rank()] = std::move(local);
}

std::string HostRendezvous::Handshake::name(int peer) const {
  const auto pid = endpoints_[peer].host.pid;
  return pid ? c10::str("rank ", peer, " (pid ", pid, ")") : c10::str("rank ", peer);
}

/// Also lists other ranks whose process has exited: they may be the cause.
void HostRendezvous::Handshake::fail(int peer, const std::string& what) const {
  std::string others;
  for (int other = 0; other < size(); ++other)
    if (other != peer && other != rank() && !rendezvous_.processes_[other].alive())
      others += c10::str("; the process of ", name(other), " has exited");
  C10_THROW_ERROR(DistError, c10::str("Rank ", rank(), " of ", size(), ", rendezvous '", prefix_, "' with ", name(peer),
                                      ": ", what, others, "."));
}

void HostRendezvous::Handshake::fail_if_exited(int peer) const {
  if (!rendezvous_.processes_[peer].alive()) fail(peer, "its process has exited");
}

/// The peer's connection broke. The kernel closes the sockets of a killed process before its pidfd becomes readable, so
/// this first waits for a pidfd of the group.
void HostRendezvous::Handshake::fail_disconnected(int peer, const std::string& what) const {
  constexpr int kProcessExitMs = 500;
  std::vector<pollfd> pidfds;
  for (const auto& process : rendezvous_.processes_) pidfds.push_back({process.pidfd(), POLLIN, 0});
  ::poll(pidfds.data(), pidfds.size(), kProcessExitMs);
  fail_if_exited(peer);
  fail(peer, what);
}

/// Raises at the deadline, on an interrupt, or if the peer's process has exited.
void HostRendezvous::Handshake::check_wait(int peer, const char* awaited) const {
  poll_();
  check_interrupt();
  fail_if_exited(peer);
  if (Clock::now() < deadline_) return;
  const auto rejections = rejected_ ? c10::str("; rejected ", rejected_, " unknown connections") : "";
  fail(peer, c10::str("no ", awaited, " within ", rendezvous_.timeout().count(), " ms", rejections));
}

int HostRendezvous::Handshake::poll_timeout_ms() const {
  const auto remaining = std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now());
  return static_cast<int>(std::clamp(remaining, milliseconds(1), milliseconds(100)).count());
}

SharedMemories HostRendezvous::Handshake::run() {
  listener_ = listen_at(endpoints_[rank()].socket, kBacklog);
  if (!listener_) fail(rank(), "cannot listen on a socket: " + c10::utils::str_error(errno));
  exchange_endpoints();
  for (int peer = 0; peer < rank(); ++peer) connect_peer(peer);
  accept_peers();
  for (int peer = 0; peer < rank(); ++peer) receive_reply(peer);
  return std::move(memories_);
}

void HostRendezvous::Handshake::exchange_endpoints() {
  const auto store = rendezvous_.options_.store();
  if (!store) fail(rank(), "the process group and its Store were destroyed");
  const StoreExchangeOptions exchange{prefix_, rank(), size(), rendezvous_.timeout(),
                                      [&](int peer) { check_wait(peer, "endpoint record"); }};
  const auto records = exchange_through_store(store, exchange, endpoints_[rank()].text());
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank()) accept_endpoint(peer, records[peer]);
}

/// Raises if memory cannot be shared with the peer.
void HostRendezvous::Handshake::accept_endpoint(int peer, const std::string& text) {
  auto endpoint = EndpointRecord::parse(text);
  const auto& local = endpoints_[rank()];
  const auto reason = not_colocated_reason(local.host, endpoint.host);
  if (!reason.empty()) fail(peer, "cannot share memory: " + reason);
  auto& process = rendezvous_.processes_[peer];
  if (!process.pid()) process = Process(endpoint.host.pid);
  if (process.pid() != endpoint.host.pid) fail(peer, c10::str("its pid changed, was ", process.pid()));
  if (endpoint.bytes != local.bytes)
    fail(peer, c10::str("size mismatch: it has ", endpoint.bytes, " bytes, this rank has ", local.bytes));
  endpoints_[peer] = std::move(endpoint);
}

void HostRendezvous::Handshake::connect_peer(int peer) {
  auto& connection = connections_[peer];
  while (!(connection = connect_to(endpoints_[peer].socket))) {
    const int error = errno;
    check_wait(peer, "free slot in its listen queue");
    if (error != EAGAIN) fail_disconnected(peer, "cannot connect: " + c10::utils::str_error(error));
    std::this_thread::sleep_for(milliseconds(1));
  }
  const auto credentials = peer_credentials(connection);
  const auto& host = endpoints_[peer].host;
  if (!credentials || credentials->uid != host.uid || credentials->pid != host.pid)
    fail(peer, c10::str("its socket belongs to process ", credentials ? credentials->pid : 0, " of user ",
                        credentials ? static_cast<int64_t>(credentials->uid) : -1, ", expected process ", host.pid,
                        " of user ", host.uid));
  send_hello(connection, peer);
}

void HostRendezvous::Handshake::send_hello(const UniqueFd& connection, int peer) {
  const Hello hello{.rank = static_cast<uint64_t>(rank()), .token = endpoints_[rank()].token};
  if (!send_fd(connection, &hello, sizeof(hello), memories_[rank()]->file()))
    fail_disconnected(peer, "its connection failed: " + c10::utils::str_error(errno));
}

/// Replies to all higher ranks; closes unknown connections.
void HostRendezvous::Handshake::accept_peers() {
  const auto first_missing = [&] {
    for (int peer = rank() + 1; peer < size(); ++peer)
      if (!memories_[peer]) return peer;
    return size();
  };
  while (first_missing() < size()) {
    for (int peer = first_missing(); peer < size(); ++peer)
      if (!memories_[peer]) check_wait(peer, "connection");
    std::vector<pollfd> events{{listener_.get(), POLLIN, 0}};
    for (const auto& connection : accepted_) events.push_back({connection.get(), POLLIN, 0});
    ::poll(events.data(), events.size(), poll_timeout_ms());
    std::erase_if(accepted_, [&](const UniqueFd& connection) { return handle_hello(connection); });
    for (int i = 0; i < kMaxAcceptsPerPoll; ++i) {
      auto connection = accept_one(listener_);
      if (!connection) break;
      if (is_known(connection)) {
        accepted_.push_back(std::move(connection));
      } else {
        ++rejected_;
      }
    }
  }
}

/// True if the process and user of the connection are those of a rank.
bool HostRendezvous::Handshake::is_known(const UniqueFd& connection) const {
  const auto credentials = peer_credentials(connection);
  return credentials && std::any_of(endpoints_.begin(), endpoints_.end(), [&](const EndpointRecord& endpoint) {
           return endpoint.host.pid == credentials->pid && endpoint.host.uid == credentials->uid;
         });
}

/// Handles the Hello of an accepted connection, if it has arrived: maps the peer's memory and sends this rank's. True
/// if the connection is no longer needed.
bool HostRendezvous::Handshake::handle_hello(const UniqueFd& connection) {
  Hello hello;
  auto received = receive_fd(connection, &hello, sizeof(hello));
  if (!received.arrived) return false;
  const bool expected = received.error.empty() && hello.rank > static_cast<uint64_t>(rank()) &&
                        hello.rank < static_cast<uint64_t>(size()) && !memories_[hello.rank];
  if (!expected || !is_hello_of(hello, static_cast<int>(hello.rank))) {
    ++rejected_;
    return true;
  }
  const int peer = static_cast<int>(hello.rank);
  map_memory(peer, std::move(received.file));
  send_hello(connection, peer);
  return true;
}

/// Waits for the reply of a lower rank.
void HostRendezvous::Handshake::receive_reply(int peer) {
  Hello hello;
  ReceivedFd received;
  while (!(received = receive_fd(connections_[peer], &hello, sizeof(hello))).arrived) {
    check_wait(peer, "reply");
    std::array<pollfd, 2> events{
        {{connections_[peer].get(), POLLIN, 0}, {rendezvous_.processes_[peer].pidfd(), POLLIN, 0}}};
    ::poll(events.data(), events.size(), poll_timeout_ms());
  }
  if (!received.error.empty()) fail_disconnected(peer, "no reply: " + received.error);
  if (!is_hello_of(hello, peer)) fail(peer, "its reply has a wrong token");
  map_memory(peer, std::move(received.file));
}

bool HostRendezvous::Handshake::is_hello_of(const Hello& hello, int peer) const {
  const Hello expected{.rank = static_cast<uint64_t>(peer), .token = endpoints_[peer].token};
  return std::memcmp(&hello, &expected, sizeof(hello)) == 0;
}

void HostRendezvous::Handshake::map_memory(int peer, UniqueFd file) {
  memories_[peer] = SharedMemory::map(std::move(file), endpoints_[peer].bytes, name(peer));
}

SharedMemories HostRendezvous::exchange_memory(std::shared_ptr<SharedMemory> local, const std::function<void()>& poll) {
  Handshake handshake(*this, std::move(local), poll);
  auto memories = handshake.run();
  if (!group_id_) group_id_ = handshake.group_id();
  return memories;
}

}  // namespace weft::comm
