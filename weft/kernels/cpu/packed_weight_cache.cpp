#include "weft/kernels/cpu/packed_weight_cache.h"

#include <c10/util/DimVector.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "weft/core/host_memory.h"
#include "weft/kernels/packing.h"

namespace weft::kernels {
namespace {

using Copy = std::shared_ptr<const PackedCopy>;

/// The memory of a tensor, from its first element to its last.
struct MemoryRange {
  const c10::StorageImpl* storage;
  const char *begin, *end;

  explicit MemoryRange(const at::Tensor& t)
      : storage(t.storage().unsafeGetStorageImpl()), begin(static_cast<const char*>(t.const_data_ptr())), end(begin) {
    if (t.numel() == 0) return;
    int64_t last = 0;
    for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    end += (last + 1) * static_cast<int64_t>(t.element_size());
  }
  bool operator==(const MemoryRange& r) const { return storage == r.storage && begin == r.begin && end == r.end; }
  bool overlaps(const MemoryRange& r) const { return storage == r.storage && begin < r.end && r.begin < end; }
};

struct MemoryRangeHash {
  size_t operator()(const MemoryRange& r) const { return c10::get_hash(r.storage, r.begin, r.end); }
};

/// The sizes and strides of the source, and the packing order.
struct PackLayout {
  at::DimVector sizes, strides;
  int64_t half;

  explicit PackLayout(const PackRequest& p) : sizes(p.source.sizes()), strides(p.source.strides()), half(p.half) {}
  bool operator==(const PackLayout& l) const { return half == l.half && sizes == l.sizes && strides == l.strides; }
};

using Version = std::optional<uint32_t>;  // empty: the tensor has no version counter, as in inference mode

struct CacheEntry {
  PackLayout layout;
  Copy copy;
  Version version;  // of the weight, read before packing
};

/// A frozen weight. The weak reference keeps the address of the StorageImpl from being reused; it is never locked,
/// because locking may acquire the GIL. The version counter is that of the tensor passed to `freeze`: views created
/// below autograd have counters of their own.
struct FrozenWeight {
  FrozenWeight(const at::Tensor& weight, std::string n, int64_t i)
      : storage(weight.storage().getWeakStorageImpl()),
        counter(weight.unsafeGetTensorImpl()->version_counter()),
        name(std::move(n)),
        id(i) {}

  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  c10::VariableVersion counter;
  std::string name;
  int64_t id;  // different for each call of `freeze`
  std::vector<CacheEntry> copies = {};
  std::optional<uint64_t> checksum = {};  // of the values, at the first call
  Version checked = {};                   // the version with that checksum

  Version version() const { return counter.enabled() ? Version(counter.current_version()) : std::nullopt; }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const auto& entry : copies) sum += entry.copy->bytes();
    return sum;
  }
  std::vector<CacheEntry>::iterator find(const PackLayout& layout) {
    return std::find_if(copies.begin(), copies.end(), [&](const CacheEntry& entry) { return entry.layout == layout; });
  }
};

/// The result of a cache lookup.
struct Lookup {
  int64_t id;
  Version version;     // current
  Copy copy = {};      // null: not packed yet
  bool valid = false;  // the version counter has not moved since the copy was made
  std::string name = {};
};

/// What is known of the values of a frozen weight.
struct FrozenValues {
  int64_t id;
  Version version;  // current
  std::optional<uint64_t> checksum;
  bool valid;  // the version counter has not moved since the checksum was computed
  std::string name;
};

/// Depends on the order of the values.
uint64_t checksum_of(const at::Tensor& weight) {
  const auto dense = weight.contiguous();
  const auto* bytes = static_cast<const char*>(dense.const_data_ptr());
  const auto size = static_cast<size_t>(dense.nbytes());
  std::array<uint64_t, 4> lanes{1, 2, 3, 4};
  size_t at = 0;
  for (; at + sizeof lanes <= size; at += sizeof lanes) {
    std::array<uint64_t, 4> words;
    std::memcpy(words.data(), bytes + at, sizeof words);
    for (size_t i = 0; i < 4; ++i) lanes[i] = (std::rotl(lanes[i], 29) ^ words[i]) * 0x9e3779b97f4a7c15;
  }
  uint64_t sum = 0;
  for (const auto lane : lanes) sum = (std::rotl(sum, 31) ^ lane) * 0xbf58476d1ce4e5b9;
  for (; at < size; ++at) sum = (sum ^ static_cast<uint8_t>(bytes[at])) * 0x100000001b3;
  return sum ^ sum >> 32;
}

[[noreturn]] void reject_change(const std::string& name) {
  TORCH_CHECK(false, "prepack: ", name, " was changed in place while it was frozen. Call prepack(module) again after ",
              "changing a weight, or prepack(module, frozen=False) before changing it.");
}

int64_t limit_from_environment() {
  const char* value = std::getenv("WEFT_PACKED_BYTES");
  if (!value) return int64_t{1} << 30;
  const std::string_view text(value);
  int64_t bytes = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bytes);
  TORCH_CHECK_VALUE(error == std::errc() && end == text.data() + text.size() && bytes >= 0, "WEFT_PACKED_BYTES: got '",
                    text, "', expected a number of bytes, 0 or more.");
  return bytes;
}

/// All frozen weights and their packed copies. The lock is held for lookups, not while a weight is packed.
class PackedWeightCache {
 public:
  static PackedWeightCache& instance() {
    static auto* cache = new PackedWeightCache;  // never destroyed: a thread may run a GEMM while the process exits
    return *cache;
  }

  bool empty() const { return count_.load(std::memory_order_relaxed) == 0; }

  /// Empty if the weight is not frozen or the copy would exceed the limit.
  std::optional<Lookup> look_up(const MemoryRange& range, const PackLayout& layout, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (++uses_ % kUsesBetweenPurges == 0) purge_expired();
    const auto w = weights_.find(range);
    if (w == weights_.end()) return {};
    auto& weight = w->second;
    Lookup found{.id = weight.id, .version = weight.version()};
    if (const auto entry = weight.find(layout); entry != weight.copies.end()) {
      found.copy = entry->copy;
      found.valid = entry->version == found.version;
      if (!found.valid) found.name = weight.name;
      ++counts_.reused;
      return found;
    }
    if (total_bytes_ + bytes > limit_) purge_expired();
    if (total_bytes_ + bytes > limit_) return {};
    return found;
  }

  /// Caches a copy, unless there is one, the limit is reached, or the weight was frozen again or unfrozen meanwhile.
  void insert(const MemoryRange& range, const PackLayout& layout, const Lookup& found, const Copy& copy) {
    const std::lock_guard lock(mutex_);
    const auto w = weights_.find(range);
    if (w == weights_.end() || w->second.id != found.id) return;
    if (w->second.find(layout) != w->second.copies.end() || total_bytes_ + copy->bytes() > limit_) return;
    w->second.copies.push_back({layout, copy, found.version});
    total_bytes_ += copy->bytes();
    ++counts_.packed;
  }

  /// Records that the copy still has the weight's values although the version counter moved.
  void mark_valid(const MemoryRange& range, const PackLayout& layout, const Lookup& found) {
    const std::lock_guard lock(mutex_);
    const auto w = weights_.find(range);
    if (w == weights_.end() || w->second.id != found.id) return;
    if (const auto entry = w->second.find(layout); entry != w->second.copies.end()) entry->version = found.version;
  }

  /// Empty if the weight is not frozen.
  std::optional<FrozenValues> values(const MemoryRange& range) {
    const std::lock_guard lock(mutex_);
    const auto w = weights_.find(range);
    if (w == weights_.end()) return {};
    const auto& weight = w->second;
    const auto version = weight.version();
    const bool valid = weight.checksum && weight.checked == version;
    return FrozenValues{weight.id, version, weight.checksum, valid, valid ? std::string() : weight.name};
  }
  void set_checksum(const MemoryRange& range, const FrozenValues& found, uint64_t checksum) {
    const std::lock_guard lock(mutex_);
    const auto w = weights_.find(range);
    if (w == weights_.end() || w->second.id != found.id) return;
    w->second.checksum = checksum;
    w->second.checked = found.version;
  }

  void freeze(const at::Tensor& weight, std::string name) {
    const MemoryRange range(weight);
    const std::lock_guard lock(mutex_);
    weights_.erase(range);
    for (auto& [other, frozen] : weights_)
      if (other.overlaps(range)) frozen.copies.clear();
    weights_.emplace(range, FrozenWeight(weight, std::move(name), ++ids_));
    purge_expired();
  }
  void unfreeze(const MemoryRange& range) {
    const std::lock_guard lock(mutex_);
    std::erase_if(weights_, [&](const auto& w) { return w.first.overlaps(range); });
    purge_expired();
  }

  int64_t bytes() {
    const std::lock_guard lock(mutex_);
    purge_expired();
    return total_bytes_;
  }
  int64_t limit() {
    const std::lock_guard lock(mutex_);
    return limit_;
  }
  void set_limit(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    limit_ = bytes;
    purge_expired();
    for (auto& [range, weight] : weights_) {
      if (total_bytes_ <= limit_) break;
      total_bytes_ -= weight.bytes();
      weight.copies.clear();
    }
  }
  PackingCounts counts() {
    const std::lock_guard lock(mutex_);
    return counts_;
  }

 private:
  static constexpr int64_t kUsesBetweenPurges = 64;

  /// Drops weights whose storage has been freed.
  void purge_expired() {
    std::erase_if(weights_, [](const auto& w) { return w.second.storage.expired(); });
    total_bytes_ = 0;
    for (const auto& [range, weight] : weights_) total_bytes_ += weight.bytes();
    count_.store(weights_.size(), std::memory_order_relaxed);
  }

  std::mutex mutex_;
  std::unordered_map<MemoryRange, FrozenWeight, MemoryRangeHash> weights_;
  std::atomic<size_t> count_ = 0;  // of frozen weights; without any, lookups skip the lock
  int64_t limit_ = limit_from_environment();
  int64_t total_bytes_ = 0;  // of all copies
  int64_t uses_ = 0, ids_ = 0;
  PackingCounts counts_;
};

/// The pool behind `acquire_buffer`. Never destroyed: tensors may release buffers while the process exits.
class BufferPool {
 public:
  static BufferPool& instance() {
    static auto* pool = new BufferPool;
    return *pool;
  }

  std::unique_ptr<PackedCopy> acquire(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    for (auto& copy : free_)
      if (copy && copy->bytes() >= bytes) return std::move(copy);
    return nullptr;
  }
  /// Pools the buffer in an empty slot, or in place of the smaller pooled buffer.
  void release(std::unique_ptr<PackedCopy> copy) {
    constexpr int64_t kMaxPooledBytes = 64 << 20;
    if (copy->bytes() > kMaxPooledBytes) return;
    const std::lock_guard lock(mutex_);
    const auto size = [](const auto& c) { return c ? c->bytes() : 0; };
    auto& slot = size(free_[0]) <= size(free_[1]) ? free_[0] : free_[1];
    if (size(slot) < copy->bytes()) std::swap(slot, copy);
  }

 private:
  std::mutex mutex_;
  std::array<std::unique_ptr<PackedCopy>, 2> free_;
};

}  // namespace

std::shared_ptr<const PackedCopy> packed_frozen_weight(const PackRequest& request) {
  auto& cache = PackedWeightCache::instance();
  if (cache.empty()) return nullptr;
  const MemoryRange range(request.source);
  const PackLayout layout(request);
  const auto found = cache.look_up(range, layout, request.bytes);
  if (!found) return nullptr;
  if (found->valid) return found->copy;
  auto copy = std::make_shared<const PackedCopy>(request.bytes);
  request.pack(copy->data());
  if (!found->copy) {
    cache.insert(range, layout, *found, copy);
    return copy;
  }
  if (std::memcmp(copy->data(), found->copy->data(), static_cast<size_t>(request.bytes)) != 0)
    reject_change(found->name);
  cache.mark_valid(range, layout, *found);
  return found->copy;
}

std::shared_ptr<PackedCopy> acquire_buffer(int64_t bytes) {
  auto memory = BufferPool::instance().acquire(bytes);
  if (!memory) memory = std::make_unique<PackedCopy>(bytes);
  return {memory.release(),
          [](PackedCopy* copy) { BufferPool::instance().release(std::unique_ptr<PackedCopy>(copy)); }};
}

void freeze(const at::Tensor& weight, std::string name) {
  if (weight.numel() == 0) return;
  TORCH_CHECK_VALUE(weight.storage().data(), "prepack: ", name,
                    " has no storage: it is on the meta device, or sharded (e.g. by FSDP2). Materialize it before "
                    "prepack. Do not prepack sharded modules: their storage is freed and reallocated.");
  PackedWeightCache::instance().freeze(weight, std::move(name));
}

void unfreeze(const at::Tensor& weight) {
  if (weight.numel() > 0) PackedWeightCache::instance().unfreeze(MemoryRange(weight));
}

bool any_frozen() { return !PackedWeightCache::instance().empty(); }

void check_frozen(const at::Tensor& weight) {
  if (!in_host_memory(weight.device()) || weight.numel() == 0) return;
  const MemoryRange range(weight);
  const auto found = PackedWeightCache::instance().values(range);
  if (!found || found->valid) return;
  const auto checksum = checksum_of(weight);
  if (found->checksum && *found->checksum != checksum) reject_change(found->name);
  PackedWeightCache::instance().set_checksum(range, *found, checksum);
}

int64_t packed_bytes() { return PackedWeightCache::instance().bytes(); }

int64_t packing_limit() { return PackedWeightCache::instance().limit(); }

void set_packing_limit(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "set_packing_limit: got ", bytes, " bytes, expected 0 or more.");
  PackedWeightCache::instance().set_limit(bytes);
}

PackingCounts packing_counts() { return PackedWeightCache::instance().counts(); }

}  // namespace weft::kernels
