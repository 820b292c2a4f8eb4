#include "weft/comm/host_meeting.h"

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
#include "weft/comm/roll_call.h"

namespace weft::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Token = std::array<uint64_t, 2>;

constexpr int kQueue = 1024;         // callers that may wait; strangers can take places too
constexpr int kAcceptedAtOnce = 64;  // between two looks at the deadline, however many strangers call

Token random_token() {
  Token token{};
  TORCH_CHECK(::getrandom(token.data(), sizeof(token), 0) == sizeof(token), "The system gave no random number.");
  return token;
}

/// What a rank tells its peers through the Store.
struct Card {
  size_t bytes = 0;  // of its memory
  Token token{};     // known only to those who can read the Store
  std::string socket;
  Place place;

  std::string text() const {
    return c10::str("weft1 ", bytes, " ", token[0], " ", token[1], " ", socket, " ", place.text());
  }
  static Card parse(const std::string& text) {
    Card card;
    std::string version, place;
    std::istringstream in(text);
    in >> version >> card.bytes >> card.token[0] >> card.token[1] >> card.socket >> std::ws;
    std::getline(in, place);
    TORCH_CHECK_VALUE(!in.fail() && version == "weft1", "'", text, "' is not the card of a rank.");
    card.place = Place::parse(place);
    return card;
  }
};

Card own_card(size_t bytes) {
  const auto place = Place::here();
  const auto random = random_token();
  std::ostringstream name;
  name << "weft-" << place.pid << "-" << std::hex << random[0] << random[1];
  return {bytes, random_token(), name.str(), place};
}

/// What goes over a connection, each way, with the descriptor.
struct Hello {
  char mark[8] = {'w', 'e', 'f', 't', 'm', 'e', 'm', '1'};
  uint64_t rank = 0;
  Token token{};  // of the sender's card
};

}  // namespace

/// One meeting. Ranks connect to lower ranks and say hello; those answer. So no rank waits for one that waits for it.
class HostMeeting::Gathering {
 public:
  Gathering(HostMeeting& meeting, std::shared_ptr<Memory> mine, const std::function<void()>& look);
  Memories run();
  uint64_t group() const { return cards_[0].token[0]; }

 private:
  int rank() const { return meeting_.rank(); }
  int size() const { return meeting_.size(); }
  std::string name(int peer) const;
  [[noreturn]] void fail(int peer, const std::string& what) const;
  void fail_if_ended(int peer) const;
  [[noreturn]] void fail_disconnected(int peer, const std::string& what) const;
  void look_after(int peer, const char* doing) const;
  int poll_ms() const;

  void exchange_cards();
  void accept_card(int peer, const std::string& text);
  void call(int peer);
  void greet(const Descriptor& connection, int peer);
  void serve();
  bool is_known(const Descriptor& connection) const;
  bool answer(const Descriptor& connection);
  void hear(int peer);
  bool is_hello_of(const Hello& hello, int peer) const;
  void take(int peer, Descriptor file);

  HostMeeting& meeting_;
  const std::function<void()>& look_;
  Clock::time_point deadline_;
  std::string prefix_;
  Descriptor listener_;
  std::vector<Card> cards_;
  std::vector<Descriptor> calls_;    // to lower ranks
  std::vector<Descriptor> waiting_;  // admitted, but yet silent
  int strangers_ = 0;                // refused at the door
  Memories memories_;
};

HostMeeting::Gathering::Gathering(HostMeeting& meeting, std::shared_ptr<Memory> mine, const std::function<void()>& look)
    : meeting_(meeting),
      look_(look),
      deadline_(Clock::now() + meeting.timeout()),
      prefix_(c10::str(meeting.options_.prefix, "/", meeting.generation_++)),
      cards_(meeting.size()),
      calls_(meeting.size()),
      memories_(meeting.size()) {
  cards_[rank()] = own_card(mine->bytes());
  memories_[rank()] = std::move(mine);
}

std::string HostMeeting::Gathering::name(int peer) const {
  const auto pid = cards_[peer].place.pid;
  return pid ? c10::str("rank ", peer, " (pid ", pid, ")") : c10::str("rank ", peer);
}

/// Names also whose process has ended: a peer that leaves may have left because of another.
void HostMeeting::Gathering::fail(int peer, const std::string& what) const {
  std::string others;
  for (int other = 0; other < size(); ++other)
    if (other != peer && other != rank() && !meeting_.processes_[other].alive())
      others += c10::str("; the process of ", name(other), " has ended");
  C10_THROW_ERROR(DistError, c10::str("Rank ", rank(), " of ", size(), ", meeting '", prefix_, "' with ", name(peer),
                                      ": ", what, others, "."));
}

void HostMeeting::Gathering::fail_if_ended(int peer) const {
  if (!meeting_.processes_[peer].alive()) fail(peer, "its process has ended");
}

/// The peer's connection broke. The kernel closes the sockets of a process that was killed before it reports its end,
/// so this waits for the end of any process of the group.
void HostMeeting::Gathering::fail_disconnected(int peer, const std::string& what) const {
  constexpr int kProcessEndMs = 500;
  std::vector<pollfd> ends;
  for (const auto& process : meeting_.processes_) ends.push_back({process.descriptor(), POLLIN, 0});
  ::poll(ends.data(), ends.size(), kProcessEndMs);
  fail_if_ended(peer);
  fail(peer, what);
}

/// Raises if there is no use in waiting for the peer any longer.
void HostMeeting::Gathering::look_after(int peer, const char* doing) const {
  look_();
  check_interrupt();
  fail_if_ended(peer);
  if (Clock::now() < deadline_) return;
  const auto refused = strangers_ ? c10::str("; ", strangers_, " connections of strangers were refused") : "";
  fail(peer, c10::str("no ", doing, " within ", meeting_.timeout().count(), " ms", refused));
}

int HostMeeting::Gathering::poll_ms() const {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline_ - Clock::now());
  return static_cast<int>(std::clamp(left, milliseconds(1), milliseconds(100)).count());
}

Memories HostMeeting::Gathering::run() {
  listener_ = listen_at(cards_[rank()].socket, kQueue);
  if (!listener_) fail(rank(), "no socket to listen on: " + c10::utils::str_error(errno));
  exchange_cards();
  for (int peer = 0; peer < rank(); ++peer) call(peer);
  serve();
  for (int peer = 0; peer < rank(); ++peer) hear(peer);
  return std::move(memories_);
}

void HostMeeting::Gathering::exchange_cards() {
  const auto store = meeting_.options_.store();
  if (!store) fail(rank(), "the group and its Store are gone");
  const RollCall roll{prefix_, rank(), size(), meeting_.timeout(), [&](int peer) { look_after(peer, "card"); }};
  const auto cards = call_roll(store, roll, cards_[rank()].text());
  for (int peer = 0; peer < size(); ++peer)
    if (peer != rank()) accept_card(peer, cards[peer]);
}

/// Refuses a peer with whom memory cannot be shared.
void HostMeeting::Gathering::accept_card(int peer, const std::string& text) {
  auto card = Card::parse(text);
  const auto& mine = cards_[rank()];
  const auto why = why_apart(mine.place, card.place);
  if (!why.empty()) fail(peer, "it is on " + why + ", and memory can be shared only within one");
  auto& process = meeting_.processes_[peer];
  if (!process.pid()) process = Process(card.place.pid);
  if (process.pid() != card.place.pid) fail(peer, c10::str("its process was ", process.pid(), " before"));
  if (card.bytes != mine.bytes) fail(peer, c10::str("it brings ", card.bytes, " bytes, this rank ", mine.bytes));
  cards_[peer] = std::move(card);
}

void HostMeeting::Gathering::call(int peer) {
  auto& connection = calls_[peer];
  while (!(connection = connect_to(cards_[peer].socket))) {
    const int error = errno;
    look_after(peer, "free place in its queue");
    if (error != EAGAIN) fail_disconnected(peer, "no connection: " + c10::utils::str_error(error));
    std::this_thread::sleep_for(milliseconds(1));
  }
  const auto caller = caller_of(connection);
  const auto& place = cards_[peer].place;
  if (!caller || caller->uid != place.uid || caller->pid != place.pid)
    fail(peer, c10::str("its socket belongs to process ", caller ? caller->pid : 0, " of user ",
                        caller ? static_cast<int64_t>(caller->uid) : -1));
  greet(connection, peer);
}

void HostMeeting::Gathering::greet(const Descriptor& connection, int peer) {
  const Hello hello{.rank = static_cast<uint64_t>(rank()), .token = cards_[rank()].token};
  if (!send_file(connection, &hello, sizeof(hello), memories_[rank()]->file()))
    fail_disconnected(peer, "its connection failed: " + c10::utils::str_error(errno));
}

/// Answers the calls of all higher ranks. Whoever else calls is turned away and holds nobody up.
void HostMeeting::Gathering::serve() {
  const auto missing = [&] {
    for (int peer = rank() + 1; peer < size(); ++peer)
      if (!memories_[peer]) return peer;
    return size();
  };
  while (missing() < size()) {
    for (int peer = missing(); peer < size(); ++peer)
      if (!memories_[peer]) look_after(peer, "call");
    std::vector<pollfd> events{{listener_.get(), POLLIN, 0}};
    for (const auto& connection : waiting_) events.push_back({connection.get(), POLLIN, 0});
    ::poll(events.data(), events.size(), poll_ms());
    std::erase_if(waiting_, [&](const Descriptor& connection) { return answer(connection); });
    for (int i = 0; i < kAcceptedAtOnce; ++i) {
      auto connection = accept_one(listener_);
      if (!connection) break;
      if (is_known(connection)) {
        waiting_.push_back(std::move(connection));
      } else {
        ++strangers_;
      }
    }
  }
}

/// A process of this user that some rank has named as its own.
bool HostMeeting::Gathering::is_known(const Descriptor& connection) const {
  const auto caller = caller_of(connection);
  return caller && std::any_of(cards_.begin(), cards_.end(), [&](const Card& card) {
           return card.place.pid == caller->pid && card.place.uid == caller->uid;
         });
}

/// Takes what a caller sends, if it has sent something, and gives this rank's memory in return. True if the connection
/// has served its purpose.
bool HostMeeting::Gathering::answer(const Descriptor& connection) {
  Hello hello;
  auto delivery = receive_file(connection, &hello, sizeof(hello));
  if (!delivery.came) return false;
  const bool expected = delivery.wrong.empty() && hello.rank > static_cast<uint64_t>(rank()) &&
                        hello.rank < static_cast<uint64_t>(size()) && !memories_[hello.rank];
  if (!expected || !is_hello_of(hello, static_cast<int>(hello.rank))) {
    ++strangers_;
    return true;
  }
  const int peer = static_cast<int>(hello.rank);
  take(peer, std::move(delivery.file));
  greet(connection, peer);
  return true;
}

/// Waits for the answer of a lower rank.
void HostMeeting::Gathering::hear(int peer) {
  Hello hello;
  Delivery delivery;
  while (!(delivery = receive_file(calls_[peer], &hello, sizeof(hello))).came) {
    look_after(peer, "answer");
    std::array<pollfd, 2> events{
        {{calls_[peer].get(), POLLIN, 0}, {meeting_.processes_[peer].descriptor(), POLLIN, 0}}};
    ::poll(events.data(), events.size(), poll_ms());
  }
  if (!delivery.wrong.empty()) fail_disconnected(peer, "no answer: " + delivery.wrong);
  if (!is_hello_of(hello, peer)) fail(peer, "its answer has a wrong token");
  take(peer, std::move(delivery.file));
}

bool HostMeeting::Gathering::is_hello_of(const Hello& hello, int peer) const {
  const Hello right{.rank = static_cast<uint64_t>(peer), .token = cards_[peer].token};
  return std::memcmp(&hello, &right, sizeof(hello)) == 0;
}

void HostMeeting::Gathering::take(int peer, Descriptor file) {
  memories_[peer] = Memory::map(std::move(file), cards_[peer].bytes, name(peer));
}

Memories HostMeeting::meet(std::shared_ptr<Memory> mine, const std::function<void()>& look) {
  Gathering gathering(*this, std::move(mine), look);
  auto memories = gathering.run();
  if (!group_) group_ = gathering.group();
  return memories;
}

}  // namespace weft::comm
