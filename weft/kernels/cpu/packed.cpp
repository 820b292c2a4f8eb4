#include "weft/kernels/cpu/packed.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <list>
#include <mutex>
#include <vector>

#include "weft/kernels/packing.h"

namespace weft::kernels {
namespace {

using StorageRef = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// Which memory a copy stands for. The storage is held weakly: another one at the same address is another weight.
struct Source {
  StorageRef storage;
  const void *base, *data;
  std::vector<int64_t> sizes, strides;
  int64_t half;

  Source(const at::Tensor& t, int64_t h)
      : storage(t.storage().getWeakStorageImpl()),
        base(t.storage().data()),
        data(t.const_data_ptr()),
        sizes(t.sizes().vec()),
        strides(t.strides().vec()),
        half(h) {}
  /// FSDP frees the memory of a parameter between uses and keeps the storage: so much for keeping a copy.
  bool moved() const {
    const auto alive = storage.lock();
    return alive && alive->data() != base;
  }
  bool same(const at::Tensor& t, int64_t h) const {
    return data == t.const_data_ptr() && half == h && sizes == t.sizes() && strides == t.strides() &&
           storage._unsafe_get_target() == t.storage().unsafeGetStorageImpl() && !storage.expired();
  }
};

struct Entry {
  explicit Entry(Source s) : source(std::move(s)) {}
  Source source;
  std::shared_ptr<const PackedCopy> copy;
  Checksum checksum{};
};

struct Shelf {
  std::mutex mutex;
  std::list<Entry> entries;  // most recently used first
  std::vector<StorageRef> frozen;
  std::vector<StorageRef> moving;  // memory that comes and goes between uses: not worth a copy
  int64_t limit = [] {
    const char* word = std::getenv("WEFT_PACKED_BYTES");
    return word ? std::strtoll(word, nullptr, 10) : int64_t{1} << 30;
  }();
  PackingCounts counts;

  static Shelf& instance() {
    static Shelf shelf;
    return shelf;
  }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const auto& e : entries) sum += e.copy ? e.copy->bytes() : 0;
    return sum;
  }
  static bool listed(std::vector<StorageRef>& list, const at::Tensor& t) {
    std::erase_if(list, [](const StorageRef& s) { return s.expired(); });
    return std::any_of(list.begin(), list.end(), [&](const StorageRef& s) {
      return s._unsafe_get_target() == t.storage().unsafeGetStorageImpl();
    });
  }
  /// Drops copies of weights that are gone, and the least recently used ones beyond the limit.
  void trim(int64_t room) {
    for (const auto& e : entries)
      if (e.source.moved()) moving.push_back(e.source.storage);
    std::erase_if(entries, [](const Entry& e) { return e.source.storage.expired() || e.source.moved(); });
    for (int64_t sum = bytes(); sum > room && !entries.empty();) {
      sum -= entries.back().copy ? entries.back().copy->bytes() : 0;
      entries.pop_back();
    }
  }
};

std::shared_ptr<const PackedCopy> make_copy(const Packing& packing) {
  auto copy = std::make_shared<PackedCopy>(packing.bytes);
  packing.pack(copy->data());
  return copy;
}

/// The entry of this weight, moved to the front; a new one if there is none.
Entry& find(Shelf& shelf, const Packing& packing) {
  for (auto e = shelf.entries.begin(); e != shelf.entries.end(); ++e) {
    if (!e->source.same(packing.source, packing.half)) continue;
    shelf.entries.splice(shelf.entries.begin(), shelf.entries, e);
    return shelf.entries.front();
  }
  shelf.trim(std::max<int64_t>(0, shelf.limit - packing.bytes));
  shelf.entries.emplace_front(Source(packing.source, packing.half));
  return shelf.entries.front();
}

}  // namespace

PackedCopy::PackedCopy(int64_t bytes) : bytes_(bytes) {
  constexpr int64_t kHuge = 2 << 20;
  const auto rounded = (bytes + kHuge - 1) / kHuge * kHuge;
  data_ = static_cast<uint16_t*>(std::aligned_alloc(kHuge, rounded));
  TORCH_CHECK(data_, "weft: no memory for a packed weight of ", bytes, " bytes. Lower WEFT_PACKED_BYTES.");
  madvise(data_, rounded, MADV_HUGEPAGE);
}

PackedCopy::~PackedCopy() { std::free(data_); }

std::shared_ptr<const PackedCopy> kept_copy(const Packing& packing) {
  auto& shelf = Shelf::instance();
  const std::lock_guard lock(shelf.mutex);
  if (packing.bytes > shelf.limit) return nullptr;
  shelf.trim(shelf.limit);
  if (Shelf::listed(shelf.moving, packing.source)) return nullptr;
  auto& entry = find(shelf, packing);
  const bool frozen = Shelf::listed(shelf.frozen, packing.source);
  if (entry.copy && frozen) {
    ++shelf.counts.frozen;
    return entry.copy;
  }
  const auto checksum = packing.checksum();
  const bool same = entry.copy && entry.checksum == checksum;
  if (same) {
    ++shelf.counts.verified;
    return entry.copy;
  }
  shelf.counts.stale += entry.copy ? 1 : 0;
  ++shelf.counts.packed;
  if (entry.copy && entry.copy.use_count() == 1) {
    packing.pack(entry.copy->data());  // nobody reads it: no new memory
  } else {
    entry.copy = make_copy(packing);
  }
  entry.checksum = checksum;
  return entry.copy;
}

void freeze(const at::Tensor& weight) {
  auto& shelf = Shelf::instance();
  const std::lock_guard lock(shelf.mutex);
  if (!Shelf::listed(shelf.frozen, weight)) shelf.frozen.push_back(weight.storage().getWeakStorageImpl());
  // A copy from before the promise may be stale.
  std::erase_if(shelf.entries, [&](const Entry& e) {
    return e.source.storage._unsafe_get_target() == weight.storage().unsafeGetStorageImpl();
  });
}

void thaw(const at::Tensor& weight) {
  auto& shelf = Shelf::instance();
  const std::lock_guard lock(shelf.mutex);
  std::erase_if(shelf.frozen,
                [&](const StorageRef& s) { return s._unsafe_get_target() == weight.storage().unsafeGetStorageImpl(); });
}

int64_t packed_bytes() {
  auto& shelf = Shelf::instance();
  const std::lock_guard lock(shelf.mutex);
  shelf.trim(shelf.limit);
  return shelf.bytes();
}

int64_t packing_limit() {
  auto& shelf = Shelf::instance();
  const std::lock_guard lock(shelf.mutex);
  return shelf.limit;
}

void set_packing_limit(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "set_packing_limit: got ", bytes, " bytes, expected 0 or more.");
  auto& shelf = Shelf::instance();
  const std::lock_guard lock(shelf.mutex);
  shelf.limit = bytes;
  shelf.trim(bytes);
}

PackingCounts packing_counts() {
  auto& shelf = Shelf::instance();
  const std::lock_guard lock(shelf.mutex);
  return shelf.counts;
}

}  // namespace weft::kernels
