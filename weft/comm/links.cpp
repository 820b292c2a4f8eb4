#include "weft/comm/links.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "weft/comm/group.h"
#include "weft/comm/guarded_link.h"
#include "weft/comm/host_meeting.h"
#include "weft/comm/roll_call.h"
#include "weft/comm/route.h"
#include "weft/comm/shared_link.h"
#include "weft/comm/ucx_plugin.h"

namespace weft::comm {
namespace {

using Store = c10::intrusive_ptr<c10d::Store>;
using WeakGroup = c10::weak_intrusive_ptr<c10d::ProcessGroup>;

/// What is known of a group: its link, why it has none, or why making one failed.
struct Entry {
  explicit Entry(const Group& group) : c10d(group.c10d()) {}
  const WeakGroup c10d;
  const pid_t pid = ::getpid();
  std::mutex making;
  bool made = false;
  FoundLink found;
  std::string failure;
};

/// A roll call of the group under keys that no other link uses.
RollCall roll_of(const Group& group, const Store& store) {
  RollCall roll{"weft/" + group.common_name(), group.rank(), group.size(), group.timeout()};
  roll.prefix += c10::str("/", next_generation(store, roll));
  return roll;
}

/// Which way the ranks take, and why none. UCX is loaded only where it was chosen.
std::pair<Transport, std::string> agree_on_transport(const Store& store, const RollCall& roll) {
  const Introductions said = call_roll(store, roll, own_introduction());
  auto chosen = choose(said);
  if (chosen.first != Transport::ucx) return chosen;
  auto loaded = roll;
  loaded.prefix += "/loaded";
  return choose_loaded(said, call_roll(store, loaded, load_ucx()));
}

std::unique_ptr<Link> make_shared_link(const Group& group, const std::string& prefix) {
  // The link outlives no group: it finds the Store, when memory grows, through the group.
  const auto find_store = [weak = WeakGroup(group.c10d())]() -> Store {
    const auto group = weak.lock();
    return group ? group->getStore() : nullptr;
  };
  return std::make_unique<SharedLink>(std::make_shared<HostMeeting>(
      HostMeeting::Options{find_store, prefix + "/memory", group.rank(), group.size(), group.timeout()}));
}

FoundLink make_link(const Group& group) {
  if (group.size() == 1) return {nullptr, "the group has one rank"};
  const auto store = group.c10d()->getStore();
  if (!store) return {nullptr, "the group has no Store"};
  const auto roll = roll_of(group, store);
  const auto [transport, reason] = agree_on_transport(store, roll);
  if (transport == Transport::plain) return {nullptr, reason};
  auto link = transport == Transport::shm
                  ? make_shared_link(group, roll.prefix)
                  : make_ucx_link({c10::make_intrusive<c10d::PrefixStore>(roll.prefix + "/ucx", store), roll.rank,
                                   roll.size, roll.prefix, roll.timeout});
  return {std::make_shared<GuardedLink>(group.failure(), std::move(link)), ""};
}

/// The entry of a group, made if there is none. Those of groups that are gone go too.
std::shared_ptr<Entry> entry_of(const Group& group, const std::string& name) {
  static std::mutex mutex;
  static auto* entries = new std::map<std::string, std::shared_ptr<Entry>>;  // never destroyed: used at exit
  std::vector<std::shared_ptr<Entry>> gone;  // destroyed after the lock is released: closing a link takes its time
  const std::lock_guard lock(mutex);
  const auto found = entries->find(name);
  if (found != entries->end() && found->second->c10d.lock() == group.c10d()) return found->second;
  std::erase_if(*entries, [&](const auto& item) {
    const bool over = item.second->c10d.expired() || item.first == name;
    if (over) gone.push_back(item.second);
    return over;
  });
  return (*entries)[name] = std::make_shared<Entry>(group);
}

}  // namespace

FoundLink link_of(const std::string& name) {
  const Group group(name);
  const auto entry = entry_of(group, name);
  TORCH_CHECK(entry->pid == ::getpid(), "The link of group '", name, "' belongs to process ", entry->pid,
              ", of which this is a fork. Start ranks and their helpers by spawn.");
  const std::lock_guard lock(entry->making);
  if (!entry->failure.empty()) C10_THROW_ERROR(DistError, entry->failure);
  group.failure()->check();
  if (entry->made) return entry->found;
  try {
    entry->found = make_link(group);
  } catch (const c10::Error& error) {
    entry->failure = c10::str("No link for group '", name, "': ", error.what_without_backtrace());
    group.failure()->put(entry->failure);
    C10_THROW_ERROR(DistError, entry->failure);
  } catch (...) {  // an interrupt: the other ranks wait for this one
    group.failure()->put("Making its link was interrupted.");
    throw;
  }
  entry->made = true;
  return entry->found;
}

}  // namespace weft::comm
