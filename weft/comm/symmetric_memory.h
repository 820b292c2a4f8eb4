#pragma once
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "weft/comm/failure.h"
#include "weft/comm/rendezvous.h"
#include "weft/comm/waiting.h"

// torch.distributed._symmetric_memory for CPU tensors: memory that every rank of a group on one host can read and
// write. Loading weft registers the allocator, unless one is already registered for the CPU.

namespace weft::comm {

/// One allocation per rank, mapped by all ranks. A signal is a word that the sender sets and the receiver clears; each
/// channel has its own words. A timeout of 0 means the group's timeout. An error makes the object unusable on every
/// rank.
class SharedSymmetricMemory final : public c10d::symmetric_memory::SymmetricMemory {
 public:
  struct Layout {
    size_t buffer = 0, signals = 0;  // bytes
    size_t signals_offset() const;
    size_t sticky_error_offset() const;
    size_t bytes() const;
  };

  /// `rendezvous`: the one that exchanged `memories`.
  SharedSymmetricMemory(std::shared_ptr<Rendezvous> rendezvous, SharedMemories memories, const Layout& layout);

  std::vector<void*> get_buffer_ptrs() override { return buffers_; }
  std::vector<void*> get_signal_pad_ptrs() override { return signals_; }
  void** get_buffer_ptrs_dev() override { return buffers_.data(); }
  void** get_signal_pad_ptrs_dev() override { return signals_.data(); }
  size_t get_buffer_size() override { return layout_.buffer; }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  bool world_within_direct_access() override { return true; }
  int get_rank() override { return rendezvous_->rank(); }
  int get_world_size() override { return rendezvous_->size(); }
  c10::Device get_device() override { return c10::kCPU; }

  void barrier(int channel, size_t timeout_ms) override;
  void put_signal(int dst_rank, int channel, size_t timeout_ms) override;
  void wait_signal(int src_rank, int channel, size_t timeout_ms) override;

 private:
  struct SignalRequest;  // operation, peer, channel and timeout
  std::atomic<uint32_t>& signal_word(int owner, int sender, int channel) const;
  void put(const SignalRequest& request);
  void wait(const SignalRequest& request);
  void wait_compare_exchange(const SignalRequest& request, std::atomic<uint32_t>& word, uint32_t from, uint32_t to);
  void check() const;
  StickyError& sticky_error(int rank) const;

  std::shared_ptr<Rendezvous> rendezvous_;
  SharedMemories memories_;
  Layout layout_;
  std::vector<void*> buffers_, signals_;
};

class SharedSymmetricMemoryAllocator final : public c10d::symmetric_memory::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int device_idx, const std::optional<std::string>& group_name) override;
  void free(void* ptr) override;
  size_t get_alloc_size(void* ptr) override;
  c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory> rendezvous(
      void* ptr, const std::optional<std::string>& group_name) override;
  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::kCPU; }
  std::string name() override { return "weft"; }
  bool has_allocation(void* ptr) override;

 private:
  struct Allocation {
    std::shared_ptr<SharedMemory> memory;
    SharedSymmetricMemory::Layout layout;
    std::optional<std::string> group;
    std::map<std::string, c10::intrusive_ptr<c10d::symmetric_memory::SymmetricMemory>> handles;
  };
  Allocation& allocation(void* ptr);
  std::shared_ptr<Rendezvous> make_rendezvous(const std::string& group);

  std::mutex mutex_;
  std::map<void*, Allocation> allocations_;
  std::map<std::string, int64_t> rendezvous_counts_;  // rendezvous created so far, by group
};

}  // namespace weft::comm
