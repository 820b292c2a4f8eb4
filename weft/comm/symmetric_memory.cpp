#include "weft/comm/symmetric_memory.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "weft/comm/group.h"
#include "weft/comm/host_meeting.h"
#include "weft/comm/settings.h"

namespace weft::comm {
namespace {

constexpr size_t kLine = 64;

size_t round_up(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

}  // namespace

// ---- signals --------------------------------------------------------------------------------------------------------

size_t SharedSymmetricMemory::Layout::signals_at() const { return round_up(buffer); }
size_t SharedSymmetricMemory::Layout::poison_at() const { return signals_at() + round_up(signals); }
size_t SharedSymmetricMemory::Layout::bytes() const { return poison_at() + round_up(sizeof(Poison)); }

struct SharedSymmetricMemory::Call {
  Operation operation;
  int peer;
  int channel;
  Milliseconds timeout;
};

SharedSymmetricMemory::SharedSymmetricMemory(std::shared_ptr<Meeting> meeting, Memories memories, const Layout& layout)
    : meeting_(std::move(meeting)), memories_(std::move(memories)), layout_(layout) {
  for (const auto& memory : memories_) {
    buffers_.push_back(memory->data());
    signals_.push_back(memory->data() + layout_.signals_at());
  }
}

Poison& SharedSymmetricMemory::poison(int rank) const {
  return *reinterpret_cast<Poison*>(memories_[rank]->data() + layout_.poison_at());
}

void SharedSymmetricMemory::check() const {
  const auto& mine = poison(meeting_->rank());
  if (!mine.empty()) C10_THROW_ERROR(DistError, text(mine.get()));
}

/// The word in the pad of `owner` that `sender` sets.
std::atomic<uint32_t>& SharedSymmetricMemory::word(int owner, int sender, int channel) const {
  const int size = meeting_->size();
  TORCH_CHECK_INDEX(owner >= 0 && owner < size && sender >= 0 && sender < size, "Rank ",
                    owner == meeting_->rank() ? sender : owner, " is none of ", size, ".");
  const int64_t channels = static_cast<int64_t>(layout_.signals / sizeof(uint32_t)) / size;
  TORCH_CHECK_INDEX(channel >= 0 && channel < channels, "Channel ", channel, " is none of ", channels, ".");
  return static_cast<std::atomic<uint32_t>*>(signals_[owner])[channel * size + sender];
}

/// Waits until the word is `from`, and makes it `to`.
void SharedSymmetricMemory::exchange(const Call& call, std::atomic<uint32_t>& word, uint32_t from, uint32_t to) {
  check();
  flush_stores();
  const auto exchanged = [&] {
    uint32_t expected = from;
    return word.compare_exchange_strong(expected, to, std::memory_order_acq_rel, std::memory_order_relaxed);
  };
  const auto fail = [&](Reason reason, Milliseconds waited) {
    Failure failure{.reason = reason, .finder = meeting_->rank(), .peer = call.peer};
    failure.pid = meeting_->process(call.peer).pid();
    failure.round = static_cast<uint64_t>(call.channel);
    failure.waited_ms = waited.count();
    failure.mine.operation = call.operation;
    for (int r = 0; r < meeting_->size(); ++r) poison(r).put(failure);
    check();
  };
  wait_until(
      [&] {
        if (exchanged()) return true;
        check();
        return false;
      },
      [&](Milliseconds waited) {
        if (!meeting_->process(call.peer).alive() && word.load() != from) fail(Reason::ended, waited);
        if (waited >= call.timeout) fail(Reason::timeout, waited);
      });
}

void SharedSymmetricMemory::put(const Call& call) {
  exchange(call, word(call.peer, meeting_->rank(), call.channel), 0, 1);
}

void SharedSymmetricMemory::wait(const Call& call) {
  exchange(call, word(meeting_->rank(), call.peer, call.channel), 1, 0);
}

namespace {

Milliseconds timeout_or(size_t timeout_ms, const Meeting& meeting) {
  return timeout_ms ? Milliseconds(timeout_ms) : meeting.timeout();
}

}  // namespace

void SharedSymmetricMemory::put_signal(int dst_rank, int channel, size_t timeout_ms) {
  put({Operation::put_signal, dst_rank, channel, timeout_or(timeout_ms, *meeting_)});
}

void SharedSymmetricMemory::wait_signal(int src_rank, int channel, size_t timeout_ms) {
  wait({Operation::wait_signal, src_rank, channel, timeout_or(timeout_ms, *meeting_)});
}

void SharedSymmetricMemory::barrier(int channel, size_t timeout_ms) {
  const auto timeout = timeout_or(timeout_ms, *meeting_);
  for (int peer = 0; peer < meeting_->size(); ++peer)
    if (peer != meeting_->rank()) put({Operation::barrier, peer, channel, timeout});
  for (int peer = 0; peer < meeting_->size(); ++peer)
    if (peer != meeting_->rank()) wait({Operation::barrier, peer, channel, timeout});
}

// ---- memory ---------------------------------------------------------------------------------------------------------

void* SharedSymmetricMemoryAllocator::alloc(size_t size, int, const std::optional<std::string>& group_name) {
  const SharedSymmetricMemory::Layout layout{size, c10d::symmetric_memory::get_signal_pad_size()};
  auto memory = Memory::make(layout.bytes());
  void* data = memory->data();
  const std::lock_guard lock(mutex_);
  blocks_[data] = {std::move(memory), layout, group_name, {}};
  return data;
}

void SharedSymmetricMemoryAllocator::free(void* ptr) {
  const std::lock_guard lock(mutex_);
  blocks_.erase(ptr);
}

SharedSymmetricMemoryAllocator::Block& SharedSymmetricMemoryAllocator::block(void* ptr) {
  const auto found = blocks_.find(ptr);
  TORCH_CHECK_VALUE(found != blocks_.end(), "The tensor was not made by torch.distributed._symmetric_memory.empty.");
  return found->second;
}

size_t SharedSymmetricMemoryAllocator::get_alloc_size(void* ptr) {
  const std::lock_guard lock(mutex_);
  return block(ptr).layout.buffer;
}

bool SharedSymmetricMemoryAllocator::has_allocation(void* ptr) {
  const std::lock_guard lock(mutex_);
  return blocks_.contains(ptr);
}

/// Of the ranks of a registered process group, else of those that set_group_info has named.
std::shared_ptr<Meeting> SharedSymmetricMemoryAllocator::meeting(const std::string& name) {
  HostMeeting::Options options;
  std::string common = name;  // equal on all ranks
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
    options.timeout = given_timeout().value_or(info.store->getTimeout());
    TORCH_CHECK_VALUE(options.timeout.count() > 0, "The Store of group '", name, "' has a timeout of ",
                      options.timeout.count(), " ms, expected more than 0.");
  }
  // Groups may share a Store.
  options.prefix = c10::str("weft/symmetric_memory/", common, "/", meetings_[name]++);
  return std::make_shared<HostMeeting>(std::move(options));
}

c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> SharedSymmetricMemoryAllocator::rendezvous(
    void* ptr, const std::optional<std::string>& group_name) {
  std::unique_lock lock(mutex_);
  const auto& mine = block(ptr);
  const auto name = group_name ? *group_name : mine.group.value_or("0");
  if (const auto met = mine.met.find(name); met != mine.met.end()) return met->second;
  const auto [memory, layout] = std::pair(mine.memory, mine.layout);
  const auto meeting = this->meeting(name);
  lock.unlock();  // peers may be threads of this process
  const auto met = c10::make_intrusive<SharedSymmetricMemory>(meeting, meeting->meet(memory, [] {}), layout);
  lock.lock();
  block(ptr).met[name] = met;
  return met;
}

namespace {

[[maybe_unused]] const bool registered = [] {
  if (c10d::symmetric_memory::has_allocator(c10::kCPU)) return false;
  c10d::symmetric_memory::register_allocator(c10::kCPU, c10::make_intrusive<SharedSymmetricMemoryAllocator>());
  return true;
}();

}  // namespace

}  // namespace weft::comm
