#include "weft/device/memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "weft/device/devices.h"

namespace weft::device {
namespace {

using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;
using c10::Storage;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kBlockBytes = 512;              // torch's allocator rounds each allocation to it
constexpr size_t kSmallBlock = size_t{1} << 20;  // blocks up to this size count as the small pool
constexpr size_t kSegmentBytes = size_t{2} << 20;

/// The statistics and the limit of one device.
class Account {
 public:
  void add(size_t bytes, Device device) {
    const auto rounded = round_up(bytes, kBlockBytes);
    std::lock_guard lock(mutex_);
    const auto allowed = static_cast<size_t>(fraction_ * static_cast<double>(total_memory()));
    const auto used = static_cast<size_t>(stats_.allocated_bytes[0].current);
    if (used + rounded > allowed) {
      ++stats_.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", rounded >> 20, " MiB (",
                       rounded, " bytes). Simulated ", device, " has ", total_memory() >> 20, " MiB, of which ",
                       allowed >> 20, " MiB may be allocated and ", used >> 20, " MiB are.");
    }
    for_pools(rounded, [&](size_t pool) {
      stats_.allocation[pool].increase(1);
      stats_.active[pool].increase(1);
      stats_.allocated_bytes[pool].increase(rounded);
      stats_.active_bytes[pool].increase(rounded);
      stats_.requested_bytes[pool].increase(bytes);
      const auto needed = round_up(static_cast<size_t>(stats_.allocated_bytes[pool].current), kSegmentBytes);
      const auto reserved = static_cast<size_t>(stats_.reserved_bytes[pool].current);
      if (needed > reserved) {
        stats_.reserved_bytes[pool].increase(needed - reserved);
        stats_.segment[pool].increase(1);
        if (pool == 0) ++stats_.num_device_alloc;
      }
    });
  }

  void remove(size_t bytes) {
    const auto rounded = round_up(bytes, kBlockBytes);
    std::lock_guard lock(mutex_);
    for_pools(rounded, [&](size_t pool) {
      stats_.allocation[pool].decrease(1);
      stats_.active[pool].decrease(1);
      stats_.allocated_bytes[pool].decrease(rounded);
      stats_.active_bytes[pool].decrease(rounded);
      stats_.requested_bytes[pool].decrease(bytes);
    });
  }

  /// Calls change(statistics) under the lock.
  template <class F>
  auto with_stats(const F& change) {
    std::lock_guard lock(mutex_);
    return change(stats_);
  }

  double fraction() {
    std::lock_guard lock(mutex_);
    return fraction_;
  }
  void set_fraction(double fraction) {
    std::lock_guard lock(mutex_);
    fraction_ = fraction;
  }

 private:
  static size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }
  template <class F>
  static void for_pools(size_t bytes, const F& change) {
    change(static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE));
    change(static_cast<size_t>(bytes <= kSmallBlock ? c10::CachingAllocator::StatType::SMALL_POOL
                                                    : c10::CachingAllocator::StatType::LARGE_POOL));
  }

  std::mutex mutex_;
  DeviceStats stats_;
  double fraction_ = 1;
};

/// Calls change(array) for each array of statistics.
template <class F>
void for_stats(DeviceStats& s, const F& change) {
  for (auto* array : {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes, &s.reserved_bytes,
                      &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes})
    for (auto& stat : *array) change(stat);
}

std::atomic<size_t> memory_of_device{size_t{80} << 30};

Account& account(DeviceIndex device) {
  static auto* accounts = new std::array<Account, kMaxDevices>;  // tensors may be freed after the program's destructors
  return (*accounts)[place(device)];
}

/// What a storage on a device owns: its host storage, and its entry in the statistics.
struct Block {
  Block(size_t bytes, DeviceIndex device) : bytes(bytes), device(device) {
    if (bytes) account(device).add(bytes, cuda_device(device));
  }
  Block(const Block&) = delete;
  ~Block() {
    if (bytes) account(device).remove(bytes);
  }

  Storage host;
  size_t bytes;
  DeviceIndex device;
};

void free_block(void* block) { delete static_cast<Block*>(block); }

DataPtr own(std::unique_ptr<Block> block) {
  auto* data = block->host.mutable_data();
  const auto device = cuda_device(block->device);
  return {data, block.release(), &free_block, device};
}

/// Counts the memory of `host` on the device.
DataPtr own(Storage host, Device device) {
  auto block = std::make_unique<Block>(host.nbytes(), with_index(device).index());
  block->host = std::move(host);
  return own(std::move(block));
}

/// Counts first: beyond the limit nothing is allocated.
DataPtr allocate_memory(size_t bytes, Device device) {
  auto block = std::make_unique<Block>(bytes, with_index(device).index());
  block->host = {Storage::use_byte_size_t(), static_cast<int64_t>(bytes), c10::GetCPUAllocator(), /*resizable=*/true};
  return own(std::move(block));
}

class Allocator final : public c10::DeviceAllocator {
 public:
  DataPtr allocate(size_t bytes) override { return allocate_memory(bytes, cuda_device(current_device())); }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return device_count() > 0; }
  void emptyCache(c10::MempoolId_t) override {
    for (DeviceIndex i = 0; i < device_count(); ++i)
      account(i).with_stats([](DeviceStats& stats) {
        for (size_t pool = 0; pool < stats.reserved_bytes.size(); ++pool) {
          auto& reserved = stats.reserved_bytes[pool];
          const auto needed = (stats.allocated_bytes[pool].current + static_cast<int64_t>(kSegmentBytes) - 1) /
                              static_cast<int64_t>(kSegmentBytes) * static_cast<int64_t>(kSegmentBytes);
          if (needed < reserved.current) reserved.decrease(static_cast<size_t>(reserved.current - needed));
        }
      });
  }
  void recordStream(const DataPtr&, c10::Stream) override {}
  DeviceStats getDeviceStats(DeviceIndex device) override {
    check_device(device);
    return account(device).with_stats([](DeviceStats& stats) { return stats; });
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    check_device(device);
    account(device).with_stats([](DeviceStats& stats) {
      for_stats(stats, [](auto& stat) { stat.reset_accumulated(); });
      stats.num_ooms = stats.num_device_alloc = stats.num_device_free = 0;
    });
  }
  void resetPeakStats(DeviceIndex device) override {
    check_device(device);
    account(device).with_stats([](DeviceStats& stats) { for_stats(stats, [](auto& stat) { stat.reset_peak(); }); });
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    const auto stats = getDeviceStats(device);
    const auto used = static_cast<size_t>(stats.reserved_bytes[0].current);
    return {total_memory() - std::min(total_memory(), used), total_memory()};
  }
};

/// Pinned memory: knows the ranges that it has allocated.
class PinnedAllocator final : public c10::Allocator {
 public:
  DataPtr allocate(size_t bytes) override {
    auto memory = std::make_unique<DataPtr>(c10::GetCPUAllocator()->allocate(bytes));
    auto* data = memory->get();
    if (!data) return {nullptr, c10::kCPU};
    std::lock_guard lock(mutex_);
    ranges_[static_cast<const char*>(data)] = bytes;
    return {data, memory.release(), &release, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  bool contains(const void* data) {
    const auto* place = static_cast<const char*>(data);
    std::lock_guard lock(mutex_);
    const auto after = ranges_.upper_bound(place);
    if (after == ranges_.begin()) return false;
    const auto& [start, bytes] = *std::prev(after);
    return place < start + bytes;
  }
  void forget(const void* data) {
    std::lock_guard lock(mutex_);
    ranges_.erase(static_cast<const char*>(data));
  }

 private:
  static void release(void* context);

  std::mutex mutex_;
  std::map<const char*, size_t> ranges_;  // start -> bytes
};

PinnedAllocator& pinned() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

void PinnedAllocator::release(void* context) {
  const std::unique_ptr<DataPtr> memory(static_cast<DataPtr*>(context));
  pinned().forget(memory->get());
}

}  // namespace

Storage host_storage(const Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  if (auto* block = impl->data_ptr().cast_context<Block>(&free_block)) return block->host;
  auto* data = impl->mutable_data();  // a copy-on-write storage becomes one of the allocator here
  if (auto* block = impl->data_ptr().cast_context<Block>(&free_block)) return block->host;
  auto kept = std::make_unique<Storage>(storage);
  DataPtr memory{data, kept.release(), [](void* s) { delete static_cast<Storage*>(s); }, c10::kCPU};
  return {Storage::use_byte_size_t(), impl->nbytes(), std::move(memory), c10::GetCPUAllocator(), /*resizable=*/false};
}

Storage device_storage(Storage host, Device device) {
  const auto bytes = host.nbytes();
  return {Storage::use_byte_size_t(), bytes, own(std::move(host), device), &device_allocator(), /*resizable=*/true};
}

Storage allocate(size_t bytes, Device device) {
  return {Storage::use_byte_size_t(), bytes, allocate_memory(bytes, device), &device_allocator(), /*resizable=*/true};
}

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  if (bytes == storage.nbytes()) return;
  auto memory = allocate_memory(bytes, storage.device());
  if (const auto kept = std::min(bytes, storage.nbytes())) std::memcpy(memory.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

void follow_host_storage(c10::StorageImpl& storage, const Storage& host) {
  storage.set_data_ptr_noswap(own(host, storage.device()));
  storage.set_nbytes(host.nbytes());
}

c10::DeviceAllocator& device_allocator() {
  static auto* allocator = new Allocator;
  return *allocator;
}

void set_total_memory(size_t bytes) { memory_of_device = bytes; }
size_t total_memory() { return memory_of_device; }

void set_memory_fraction(double fraction, DeviceIndex device) {
  check_device(device);
  account(device).set_fraction(fraction);
}
double memory_fraction(DeviceIndex device) {
  check_device(device);
  return account(device).fraction();
}

c10::Allocator* pinned_allocator() { return &pinned(); }
bool is_pinned(const void* data) { return pinned().contains(data); }

}  // namespace weft::device
