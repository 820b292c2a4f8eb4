#include "weft/comm/host_rendezvous.h"

#include <c10/util/Exception.h>
#include <c10/util/error.h>
#include <poll.h>
#include <sys/random.h>

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
using Token = std::array<uint64_t, 2>;

constexpr int kBacklog = 1024;          // callers that may wait; strangers can take places too
constexpr int kMaxAcceptsPerPoll = 64;  // between two looks at the deadline, however many strangers call

Token random_token() {
  Token token{};
  TORCH_CHECK(::getrandom(token.data(), sizeof(token), 0) == sizeof(token), "The system gave no random number.");
  return token;
}

/// What a rank tells its peers through the Store.
struct EndpointRecord {
  size_t bytes = 0;  // of its memory
  Token token{};     // known only to those who can read the Store
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
    TORCH_CHECK_VALUE(!in.fail() && version == "weft1", "'", text, "' is not the card of a rank.");
    endpoint.host = HostIdentity::parse(host);
    return endpoint;
  }
};

EndpointRecord local_endpoint(size_t bytes) {
  const auto host = HostIdentity::local();
  const auto random = random_token();
  std::ostringstream name;
  name << "weft-" << host.pid << "-" << std::hex << random[0] << random[1];
  return {bytes, random_token(), name.str(), host};
}

/// What goes over a connection, each way, with the descriptor.
struct Hello {
  char magic[8] = {'w', 'e', 'f', 't', 'm', 'e', 'm', '1'};
  uint64_t rank = 0;
  Token token{};  // of the sender's card
};

}  // namespace

/// One meeting. Ranks connect to lower ranks and say hello; those answer. So no rank waits for one that waits for it.
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
  std::vector<UniqueFd> accepted_;     // admitted, but yet silent
  int rejected_ = 0;                   // refused at the door
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

/// Names also whose process has ended: a peer that leaves may have left because of another.
void HostRendezvous::Handshake::fail(int peer, const std::string& what) const {
  std::string others;
  for (int other = 0; other < size(); ++other)
    if (other != peer && other != rank() && !rendezvous_.processes_[other].alive())
      others += c10::str("; the process of ", name(other), " has ended");
  C10_THROW_ERROR(DistError, c10::str("Rank ", rank(), " of ", size(), ", meeting '", prefix_, "' with ", name(peer),
                                      ": ", what, others, "."));
}

/// The peer's connection broke. The kernel closes the sockets of a process that was killed before it reports its end,
/// so this waits for the end of any process of the group.
void HostRendezvous::Handshake::fail_disconnected(int peer, const std::string& what) const {
  constexpr int kProcessExitMs = 500;
  std::vector<pollfd> ends;
  for (const auto& process : rendezvous_.processes_) ends.push_back({process.pidfd(), POLLIN, 0});
  ::poll(ends.data(), ends.size(), kProcessExitMs);
  fail(peer, rendezvous_.processes_[peer].alive() ? what : "its process has ended");
}

/// Raises if there is no use in waiting for the peer any longer.
void HostRendezvous::Handshake::check_wait(int peer, const char* awaited) const {
  poll_();
  check_interrupt();
  if (!rendezvous_.processes_[peer].alive()) fail(peer, "its process has ended");
  if (Clock::now() < deadline_) return;
  const auto rejections = rejected_ ? c10::str("; ", rejected_, " connections of strangers were refused") : "";
  fail(peer, c10::str("no ", awaited, " within ", rendezvous_.timeout().count(), " ms", rejections));
}

int HostRendezvous::Handshake::poll_timeout_ms() const {
  const auto remaining = std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now());
  return static_cast<int>(std::clamp(remaining, milliseconds(1), milliseconds(100)).count());
}

SharedMemories HostRendezvous::Handshake::run() {
  listener_ = listen_at(endpoints_[rank()].socket, kBacklog);
  if (!listener_) fail(rank(), "no socket to listen on: " + c10::utils::str_error(errno));
  exchange_endpoints();
  for (int peer = 0; peer < rank(); ++peer) connect_peer(peer);
  accept_peers();
  for (int peer = 0; peer < rank(); ++peer) receive_reply(peer);
  return std::move(memories_);
}

void HostRendezvous::Handshake::exchange_endpoints() {
  const auto store = rendezvous_.options_.store();
  if (!store) fail(rank(), "the group and its Store are gone");
  const StoreExchangeOptions exchange{prefix_, rank(), size(), rendezvous_.timeout(),
                                      [&](int peer) { check_wait(peer, "card"); }};
  const auto records = exchange_through_store(store, exchange, endpoints_[rank()].text());
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank()) accept_endpoint(peer, records[peer]);
}

/// Refuses a peer with whom memory cannot be shared.
void HostRendezvous::Handshake::accept_endpoint(int peer, const std::string& text) {
  auto endpoint = EndpointRecord::parse(text);
  const auto& local = endpoints_[rank()];
  const auto reason = not_colocated_reason(local.host, endpoint.host);
  if (!reason.empty()) fail(peer, "it is on " + reason + ", and memory can be shared only within one");
  auto& process = rendezvous_.processes_[peer];
  if (!process.pid()) process = Process(endpoint.host.pid);
  if (process.pid() != endpoint.host.pid) fail(peer, c10::str("its process was ", process.pid(), " before"));
  if (endpoint.bytes != local.bytes)
    fail(peer, c10::str("it brings ", endpoint.bytes, " bytes, this rank ", local.bytes));
  endpoints_[peer] = std::move(endpoint);
}

void HostRendezvous::Handshake::connect_peer(int peer) {
  auto& connection = connections_[peer];
  while (!(connection = connect_to(endpoints_[peer].socket))) {
    const int error = errno;
    check_wait(peer, "free place in its queue");
    if (error != EAGAIN) fail_disconnected(peer, "no connection: " + c10::utils::str_error(error));
    std::this_thread::sleep_for(milliseconds(1));
  }
  const auto credentials = peer_credentials(connection);
  const auto& host = endpoints_[peer].host;
  if (!credentials || credentials->uid != host.uid || credentials->pid != host.pid)
    fail(peer, c10::str("its socket belongs to process ", credentials ? credentials->pid : 0, " of user ",
                        credentials ? static_cast<int64_t>(credentials->uid) : -1));
  send_hello(connection, peer);
}

void HostRendezvous::Handshake::send_hello(const UniqueFd& connection, int peer) {
  const Hello hello{.rank = static_cast<uint64_t>(rank()), .token = endpoints_[rank()].token};
  if (!send_fd(connection, &hello, sizeof(hello), memories_[rank()]->file()))
    fail_disconnected(peer, "its connection failed: " + c10::utils::str_error(errno));
}

/// Answers the calls of all higher ranks. Whoever else calls is turned away and holds nobody up.
void HostRendezvous::Handshake::accept_peers() {
  const auto missing = [&] {
    for (int peer = rank() + 1; peer < size(); ++peer)
      if (!memories_[peer]) return peer;
    return size();
  };
  while (missing() < size()) {
    for (int peer = missing(); peer < size(); ++peer)
      if (!memories_[peer]) check_wait(peer, "call");
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

/// A process of this user that some rank has named as its own.
bool HostRendezvous::Handshake::is_known(const UniqueFd& connection) const {
  const auto credentials = peer_credentials(connection);
  return credentials && std::any_of(endpoints_.begin(), endpoints_.end(), [&](const EndpointRecord& endpoint) {
           return endpoint.host.pid == credentials->pid && endpoint.host.uid == credentials->uid;
         });
}

/// Takes what a caller sends, if it has sent something, and gives this rank's memory in return. True if the connection
/// has served its purpose.
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

/// Waits for the answer of a lower rank.
void HostRendezvous::Handshake::receive_reply(int peer) {
  Hello hello;
  ReceivedFd received;
  while (!(received = receive_fd(connections_[peer], &hello, sizeof(hello))).arrived) {
    check_wait(peer, "answer");
    std::array<pollfd, 2> events{
        {{connections_[peer].get(), POLLIN, 0}, {rendezvous_.processes_[peer].pidfd(), POLLIN, 0}}};
    ::poll(events.data(), events.size(), poll_timeout_ms());
  }
  if (!received.error.empty()) fail_disconnected(peer, "no answer: " + received.error);
  if (!is_hello_of(hello, peer)) fail(peer, "its answer has a wrong token");
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
