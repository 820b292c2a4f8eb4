#include "weft/comm/links.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "weft/comm/group.h"
#include "weft/comm/host_meeting.h"
#include "weft/comm/roll_call.h"
#include "weft/comm/route.h"
#include "weft/comm/shared_link.h"
#include "weft/comm/ucx_plugin.h"

namespace weft::comm {
namespace {

using WeakGroup = c10::weak_intrusive_ptr<c10d::ProcessGroup>;

/// What is known of a group: its link, why it has none, or why making one failed.
struct Entry {
  Entry(const Group& group, std::string keys) : c10d(group.c10d()), prefix(std::move(keys)) {}
  const WeakGroup c10d;
  const std::string prefix;  // of its keys in the Store
  const pid_t pid = ::getpid();
  std::mutex making;
  bool made = false;
  FoundLink found;
  std::string failure;
};

/// The group's own name, equal on all ranks, which the name it is registered under need not be.
std::string common_name(const c10d::ProcessGroup& group) {
  try {
    return group.getGroupName();
  } catch (const c10::Error&) {  // it has no backend to keep one
    return "";
  }
}

FoundLink make_link(const Group& group, const std::string& prefix) {
  if (group.size() == 1) return {nullptr, "the group has one rank"};
  const auto store = group.c10d()->getStore();
  if (!store) return {nullptr, "the group has no Store"};
  const Introductions said =
      call_roll(*store, {prefix, group.rank(), group.size(), group.timeout()}, own_introduction());
  const auto [transport, reason] = choose(said);
  if (transport == Transport::plain) return {nullptr, reason};
  if (transport == Transport::ucx) {
    const auto own_keys = c10::make_intrusive<c10d::PrefixStore>(prefix + "/ucx", store);
    return {make_ucx_link({own_keys, group.rank(), group.size(), prefix, group.timeout()}), ""};
  }
  // The link outlives no group: it finds the Store, when memory grows, through the group.
  const auto find_store = [weak = WeakGroup(group.c10d())]() -> c10::intrusive_ptr<c10d::Store> {
    const auto group = weak.lock();
    return group ? group->getStore() : nullptr;
  };
  return {std::make_shared<SharedLink>(std::make_shared<HostMeeting>(
              HostMeeting::Options{find_store, prefix + "/memory", group.rank(), group.size(), group.timeout()})),
          ""};
}

/// The entry of a group, made if there is none. Those of groups that are gone go too.
std::shared_ptr<Entry> entry_of(const Group& group, const std::string& name) {
  static std::mutex mutex;
  static auto* entries = new std::map<std::string, std::shared_ptr<Entry>>;  // never destroyed: used at exit
  static auto* made = new std::map<std::string, int64_t>;  // how often a name was used: a Store may outlive its groups
  const std::lock_guard lock(mutex);
  const auto found = entries->find(name);
  if (found != entries->end() && found->second->c10d.lock() == group.c10d()) return found->second;
  std::erase_if(*entries, [](const auto& item) { return item.second->c10d.expired(); });
  const auto entry =
      std::make_shared<Entry>(group, c10::str("weft/", common_name(*group.c10d()), "/", (*made)[name]++));
  return (*entries)[name] = entry;
}

}  // namespace

FoundLink link_of(const std::string& name) {
  const Group group(name);
  const auto entry = entry_of(group, name);
  TORCH_CHECK(entry->pid == ::getpid(), "The link of group '", name, "' belongs to process ", entry->pid,
              ", of which this is a fork. Start ranks and their helpers by spawn.");
  const std::lock_guard lock(entry->making);
  if (!entry->failure.empty()) C10_THROW_ERROR(DistError, entry->failure);
  if (entry->made) return entry->found;
  try {
    entry->found = make_link(group, entry->prefix);
  } catch (const c10::Error& error) {
    entry->failure = c10::str("No link for group '", name, "': ", error.what_without_backtrace());
    C10_THROW_ERROR(DistError, entry->failure);
  }
  entry->made = true;
  return entry->found;
}

}  // namespace weft::comm
