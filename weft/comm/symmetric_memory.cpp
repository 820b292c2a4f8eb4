#include "weft/comm/symmetric_memory.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "weft/comm/group.h"
#include "weft/comm/host_rendezvous.h"
#include "weft/comm/settings.h"

namespace weft::comm {
namespace {

size_t round_up(size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

}  // namespace

// ---- signals --------------------------------------------------------------------------------------------------------

size_t SharedSymmetricMemory::Layout::signals_offset() const { return round_up(buffer); }
size_t SharedSymmetricMemory::Layout::sticky_error_offset() const { return signals_offset() + round_up(signals); }
size_t SharedSymmetricMemory::Layout::bytes() const { return sticky_error_offset() + round_up(sizeof(StickyError)); }

struct SharedSymmetricMemory::SignalRequest {
  CommOp op;
  int peer;
  int channel;
  Milliseconds timeout;
};

SharedSymmetricMemory::SharedSymmetricMemory(std::shared_ptr<Rendezvous> rendezvous, SharedMemories memories,
                                             const Layout& layout)
    : rendezvous_(std::move(rendezvous)), memories_(std::move(memories)), layout_(layout) {
  for (const auto& memory : memories_) {
    buffers_.push_back(memory->data());
    signals_.push_back(memory->data() + layout_.signals_offset());
  }
}

StickyError& SharedSymmetricMemory::sticky_error(int rank) const {
  return *reinterpret_cast<StickyError*>(memories_[rank]->data() + layout_.sticky_error_offset());
}

void SharedSymmetricMemory::check() const {
  const auto& local = sticky_error(rendezvous_->rank());
  if (!local.empty()) C10_THROW_ERROR(DistError, text(local.get()));
}

/// The word in the signal pad of `owner` that `sender` sets.
std::atomic<uint32_t>& SharedSymmetricMemory::signal_word(int owner, int sender, int channel) const {
  const int size = rendezvous_->size();
  TORCH_CHECK_INDEX(owner >= 0 && owner < size && sender >= 0 && sender < size, "Rank ",
                    owner == rendezvous_->rank() ? sender : owner, " is out of range for a group of ", size, ".");
  const int64_t channels = static_cast<int64_t>(layout_.signals / sizeof(uint32_t)) / size;
  TORCH_CHECK_INDEX(channel >= 0 && channel < channels, "Channel ", channel, " is out of range: the signal pad has ",
                    channels, " channels.");
  return static_cast<std::atomic<uint32_t>*>(signals_[owner])[channel * size + sender];
}

/// Waits until the word is `from` and changes it to `to`.
void SharedSymmetricMemory::wait_compare_exchange(const SignalRequest& request, std::atomic<uint32_t>& word,
                                                  uint32_t from, uint32_t to) {
  check();
  store_fence();
  const auto swapped = [&] {
    uint32_t expected = from;
    return word.compare_exchange_strong(expected, to, std::memory_order_acq_rel, std::memory_order_relaxed);
  };
  const auto fail = [&](FailureReason reason, Milliseconds waited) {
    Failure failure{.reason = reason, .reporter = rendezvous_->rank(), .peer = request.peer};
    failure.pid = rendezvous_->process(request.peer).pid();
    failure.seq = static_cast<uint64_t>(request.channel);
    failure.waited_ms = waited.count();
    failure.local.op = request.op;
    for (int r = 0; r < rendezvous_->size(); ++r) sticky_error(r).put(failure);
    check();
  };
  wait_until(
      [&] {
        if (swapped()) return true;
        check();
        return false;
      },
      [&](Milliseconds waited) {
        if (!rendezvous_->process(request.peer).alive() && word.load() != from)
          fail(FailureReason::peer_exited, waited);
        if (waited >= request.timeout) fail(FailureReason::timeout, waited);
      });
}

void SharedSymmetricMemory::put(const SignalRequest& request) {
  wait_compare_exchange(request, signal_word(request.peer, rendezvous_->rank(), request.channel), 0, 1);
}

void SharedSymmetricMemory::wait(const SignalRequest& request) {
  wait_compare_exchange(request, signal_word(rendezvous_->rank(), request.peer, request.channel), 1, 0);
}

namespace {

Milliseconds timeout_or(size_t timeout_ms, const Rendezvous& rendezvous) {
  return timeout_ms ? Milliseconds(timeout_ms) : rendezvous.timeout();
}

}  // namespace

void SharedSymmetricMemory::put_signal(int dst_rank, int channel, size_t timeout_ms) {
  put({CommOp::put_signal, dst_rank, channel, timeout_or(timeout_ms, *rendezvous_)});
}

void SharedSymmetricMemory::wait_signal(int src_rank, int channel, size_t timeout_ms) {
  wait({CommOp::wait_signal, src_rank, channel, timeout_or(timeout_ms, *rendezvous_)});
}

void SharedSymmetricMemory::barrier(int channel, size_t timeout_ms) {
  const auto timeout = timeout_or(timeout_ms, *rendezvous_);
  for (int peer = 0; peer < rendezvous_->size(); ++peer)
    if (peer != rendezvous_->rank()) put({CommOp::barrier, peer, channel, timeout});
  for (int peer = 0; peer < rendezvous_->size(); ++peer)
    if (peer != rendezvous_->rank()) wait({CommOp::barrier, peer, channel, timeout});
}

// ---- memory ---------------------------------------------------------------------------------------------------------

void* SharedSymmetricMemoryAllocator::alloc(size_t size, int, const std::optional<std::string>& group_name) {
  const SharedSymmetricMemory::Layout layout{size, c10d::symmetric_memory::get_signal_pad_size()};
  auto memory = SharedMemory::make(layout.bytes());
  void* data = memory->data();
  const std::lock_guard lock(mutex_);
  allocations_[data] = {std::move(memory), layout, group_name, {}};
  return data;
}

void SharedSymmetricMemoryAllocator::free(void* ptr) {
  const std::lock_guard lock(mutex_);
  allocations_.erase(ptr);
}

SharedSymmetricMemoryAllocator::Allocation& SharedSymmetricMemoryAllocator::allocation(void* ptr) {
  const auto found = allocations_.find(ptr);
  TORCH_CHECK_VALUE(found != allocations_.end(),
                    "The tensor was not allocated by torch.distributed._symmetric_memory.empty.");
  return found->second;
}

size_t SharedSymmetricMemoryAllocator::get_alloc_size(void* ptr) {
  const std::lock_guard lock(mutex_);
  return allocation(ptr).layout.buffer;
}

bool SharedSymmetricMemoryAllocator::has_allocation(void* ptr) {
  const std::lock_guard lock(mutex_);
  return allocations_.contains(ptr);
}

/// Rendezvous of a registered process group or, if there is none, of the ranks given to set_group_info.
std::shared_ptr<Rendezvous> SharedSymmetricMemoryAllocator::make_rendezvous(const std::string& name) {
  HostRendezvous::Options options;
  std::string common = name;  // a name that is equal on all ranks
  try {
    const Group group(name);
    common = group.common_name();
    options.store = [store = group.c10d()->getStore()] { return store; };
    options.rank = group.rank();
    options.size = group.size();
    options.timeout = group.timeout();
  } catch (const c10::ValueError&) {
    const auto& info = c10d::symmetric_memory::get_group_info(name);
    options.store = [store = info.store] { return store; };
    options.rank = info.rank;
    options.size = info.world_size;
    options.timeout = timeout_from_env().value_or(info.store->getTimeout());
    TORCH_CHECK_VALUE(options.timeout.count() > 0, "The Store of group '", name, "' has a timeout of ",
                      options.timeout.count(), " ms, expected more than 0.");
  }
  // Groups may share a Store, so the prefix contains the group and a count.
  options.prefix = c10::str("weft/symmetric_memory/", common, "/", rendezvous_counts_[name]++);
  return std::make_shared<HostRendezvous>(std::move(options));
}

c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> SharedSymmetricMemoryAllocator::rendezvous(
    void* ptr, const std::optional<std::string>& group_name) {
  std::unique_lock lock(mutex_);
  const auto& local = allocation(ptr);
  const auto name = group_name ? *group_name : local.group.value_or("0");
  if (const auto found = local.handles.find(name); found != local.handles.end()) return found->second;
  const auto [memory, layout] = std::pair(local.memory, local.layout);
  const auto rendezvous = make_rendezvous(name);
  lock.unlock();  // peers may be threads of this process
  const auto handle =
      c10::make_intrusive<SharedSymmetricMemory>(rendezvous, rendezvous->exchange_memory(memory, [] {}), layout);
  lock.lock();
  allocation(ptr).handles[name] = handle;
  return handle;
}

namespace {

[[maybe_unused]] const bool registered = [] {
  if (c10d::symmetric_memory::has_allocator(c10::kCPU)) return false;
  c10d::symmetric_memory::register_allocator(c10::kCPU, c10::make_intrusive<SharedSymmetricMemoryAllocator>());
  return true;
}();

}  // namespace

}  // namespace weft::comm
