#include "weft/comm/transports.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "weft/comm/group.h"
#include "weft/comm/guarded_transport.h"
#include "weft/comm/host_rendezvous.h"
#include "weft/comm/shm_transport.h"
#include "weft/comm/store_exchange.h"
#include "weft/comm/transport_selection.h"
#include "weft/comm/ucx_plugin.h"

namespace weft::comm {
namespace {

using Store = c10::intrusive_ptr<c10d::Store>;
using WeakGroup = c10::weak_intrusive_ptr<c10d::ProcessGroup>;

/// The transport of a group, the reason why it has none, or the error of its creation.
struct GroupTransport {
  explicit GroupTransport(const Group& group) : c10d(group.c10d()) {}
  const WeakGroup c10d;
  const pid_t pid = ::getpid();
  std::mutex mutex;
  bool created = false;
  TransportLookup lookup;
  std::string failure;
};

/// Options for a store exchange of the group, with keys that no other transport uses.
StoreExchangeOptions exchange_options(const Group& group, const Store& store) {
  StoreExchangeOptions exchange{"weft/" + group.common_name(), group.rank(), group.size(), group.timeout()};
  exchange.prefix += c10::str("/", next_generation(store, exchange));
  return exchange;
}

/// Agrees on a transport with the other ranks. Loads UCX only if it was selected.
std::pair<TransportKind, std::string> negotiate_transport(const Store& store, const StoreExchangeOptions& exchange) {
  const PeerInfoTexts peer_infos = exchange_through_store(store, exchange, local_peer_info());
  auto selected = select_transport(peer_infos);
  if (selected.first != TransportKind::ucx) return selected;
  auto loaded = exchange;
  loaded.prefix += "/loaded";
  return select_loaded_transport(peer_infos, exchange_through_store(store, loaded, load_ucx()));
}

std::unique_ptr<Transport> make_shm_transport(const Group& group, const std::string& prefix) {
  // A weak reference: the transport must not keep the group alive. It needs the Store again when the slots grow.
  const auto find_store = [weak = WeakGroup(group.c10d())]() -> Store {
    const auto alive = weak.lock();
    return alive ? alive->getStore() : nullptr;
  };
  return std::make_unique<ShmTransport>(std::make_shared<HostRendezvous>(
      HostRendezvous::Options{find_store, prefix + "/memory", group.rank(), group.size(), group.timeout()}));
}

TransportLookup make_transport(const Group& group) {
  if (group.size() == 1) return {nullptr, "the group has one rank"};
  const auto store = group.c10d()->getStore();
  if (!store) return {nullptr, "the group has no Store"};
  const auto exchange = exchange_options(group, store);
  const auto [kind, reason] = negotiate_transport(store, exchange);
  if (kind == TransportKind::plain) return {nullptr, reason};
  auto transport = kind == TransportKind::shm
                       ? make_shm_transport(group, exchange.prefix)
                       : make_ucx_transport({c10::make_intrusive<c10d::PrefixStore>(exchange.prefix + "/ucx", store),
                                             exchange.rank, exchange.size, exchange.prefix, exchange.timeout});
  return {std::make_shared<GuardedTransport>(group.failure(), std::move(transport)), ""};
}

/// Finds or creates the entry of a group. Creating one also removes the entries of destroyed groups.
std::shared_ptr<GroupTransport> entry_of(const Group& group, const std::string& name) {
  static std::mutex mutex;
  static auto* entries = new std::map<std::string, std::shared_ptr<GroupTransport>>;  // never destroyed: used at exit
  // Destroyed after the lock is released: closing a transport may take long.
  std::vector<std::shared_ptr<GroupTransport>> removed;
  const std::lock_guard lock(mutex);
  const auto found = entries->find(name);
  if (found != entries->end() && found->second->c10d.lock() == group.c10d()) return found->second;
  std::erase_if(*entries, [&](const auto& item) {
    const bool expired = item.second->c10d.expired() || item.first == name;
    if (expired) removed.push_back(item.second);
    return expired;
  });
  return (*entries)[name] = std::make_shared<GroupTransport>(group);
}

}  // namespace

TransportLookup get_transport(const std::string& name) {
  const Group group(name);
  const auto entry = entry_of(group, name);
  TORCH_CHECK(entry->pid == ::getpid(), "The transport of group '", name, "' belongs to process ", entry->pid,
              ", and this process was forked from it. Start processes with the spawn method.");
  const std::lock_guard lock(entry->mutex);
  if (!entry->failure.empty()) C10_THROW_ERROR(DistError, entry->failure);
  group.failure()->check();
  if (entry->created) return entry->lookup;
  try {
    entry->lookup = make_transport(group);
  } catch (const c10::Error& error) {
    entry->failure = c10::str("No transport for group '", name, "': ", error.what_without_backtrace());
    group.failure()->put(entry->failure);
    C10_THROW_ERROR(DistError, entry->failure);
  } catch (...) {  // an interrupt; the other ranks wait for this one
    group.failure()->put("The creation of its transport was interrupted.");
    throw;
  }
  entry->created = true;
  return entry->lookup;
}

}  // namespace weft::comm
