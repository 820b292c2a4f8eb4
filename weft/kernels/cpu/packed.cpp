#include "weft/kernels/cpu/packed.h"

#include <c10/util/DimVector.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <list>
#include <mutex>
#include <string_view>
#include <vector>

#include "weft/kernels/huge_pages.h"
#include "weft/kernels/packing.h"

namespace weft::kernels {
namespace {

using StorageRef = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// The memory of a tensor. Its storage is held weakly, never locked: that may ask for the GIL. While a weak reference
/// exists no other storage has its address, so another weight in the same memory is told apart.
struct Memory {
  StorageRef storage;
  const void* base;  // of the storage
  const char *begin, *end;

  explicit Memory(const at::Tensor& t)
      : storage(t.storage().getWeakStorageImpl()),
        base(t.storage().data()),
        begin(static_cast<const char*>(t.const_data_ptr())),
        end(begin) {
    if (t.numel() == 0) return;
    int64_t last = 0;
    for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    end += (last + 1) * static_cast<int64_t>(t.element_size());
  }
  bool in_storage_of(const Memory& m) const { return storage._unsafe_get_target() == m.storage._unsafe_get_target(); }
  bool contains(const Memory& m) const { return in_storage_of(m) && begin <= m.begin && m.end <= end; }
  bool overlaps(const Memory& m) const { return in_storage_of(m) && begin < m.end && m.begin < end; }
  bool gone() const { return storage.expired(); }
  /// FSDP frees the memory of a parameter between uses and keeps the storage.
  bool moved() const { return !gone() && storage._unsafe_get_target()->data() != base; }
};

/// What a copy stands for.
struct Source {
  Memory memory;
  at::DimVector sizes, strides;
  int64_t half;

  Source(const at::Tensor& t, int64_t h) : memory(t), sizes(t.sizes()), strides(t.strides()), half(h) {}
  bool operator==(const Source& s) const {
    return memory.begin == s.memory.begin && half == s.half && sizes == s.sizes && strides == s.strides &&
           memory.in_storage_of(s.memory);
  }
};

using Copy = std::shared_ptr<const PackedCopy>;

/// A weight that was used before, with its copy if one is kept.
struct Entry {
  explicit Entry(Source s) : source(std::move(s)) {}
  Source source;
  Copy copy = {};
  Checksum checksum = {};
  int64_t unchanged = 0;  // uses in a row that found the copy to hold
  int64_t changed = 0;    // uses in a row that found it stale
  int64_t pause = 0;      // uses that will not look for a copy
  int64_t patience = 2;   // so many before a product starts without looking first
  int64_t bytes() const { return copy ? copy->bytes() : 0; }
};

int64_t limit_from_environment() {
  const char* word = std::getenv("WEFT_PACKED_BYTES");
  if (!word) return int64_t{1} << 30;
  const std::string_view text(word);
  int64_t bytes = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), bytes);
  TORCH_CHECK_VALUE(error == std::errc() && end == text.data() + text.size() && bytes >= 0, "WEFT_PACKED_BYTES is '",
                    text, "', expected a number of bytes, 0 or more.");
  return bytes;
}

/// What a product finds.
struct Found {
  bool keep = false;      // false: no copy is to be kept
  bool trusted = false;   // frozen: the copy holds without a checksum
  bool may_wait = false;  // the checksum may come after the product
  Copy copy = {};
  Checksum checksum = {};
  int64_t promise = 0;
};

/// All copies. The lock is held for looking only, not while a weight is read.
class Shelf {
 public:
  static Shelf& instance() {
    static Shelf shelf;
    return shelf;
  }

  /// A weight gets a copy at its second use, so that one computed for a single use, as under autocast, gets none. A
  /// frozen one gets it at once.
  Found look_up(const Source& source, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (bytes > limit_) return {};
    if (++uses_ % kUsesBetweenSweeps == 0) sweep();
    const bool frozen = is_frozen(source.memory);
    auto e = find(source);
    if (e == entries_.end()) {
      sweep();
      if (is_moving(source.memory)) return {};
      e = entries_.emplace(entries_.begin(), source);
      if (!frozen) return {};
    }
    const bool waits = !frozen && pauses(*e);
    const bool keep = !waits && (e->copy || make_room(e, bytes));
    entries_.splice(entries_.begin(), entries_, e);
    if (!keep) return {};
    const bool trusted = frozen && e->copy;
    counts_.frozen += trusted ? 1 : 0;
    return {.keep = true,
            .trusted = trusted,
            .may_wait = e->copy && e->unchanged >= e->patience,
            .copy = e->copy,
            .checksum = e->checksum,
            .promise = promises_};
  }

  /// A copy was found to hold.
  void holds(const Source& source) {
    const std::lock_guard lock(mutex_);
    ++counts_.verified;
    if (const auto e = find(source); e != entries_.end()) {
      ++e->unchanged;
      e->changed = 0;
    }
  }

  /// A product that started without looking was in vain: next time it takes longer to trust.
  void was_in_vain(const Source& source) {
    const std::lock_guard lock(mutex_);
    if (const auto e = find(source); e != entries_.end()) e->patience = std::min(2 * e->patience, kMostPatience);
  }

  /// The memory of a copy that no longer holds, if nobody reads it; else null.
  Copy reclaim(const Source& source, Copy copy) {
    const std::lock_guard lock(mutex_);
    ++counts_.packed;
    if (!copy) return {};
    ++counts_.stale;
    if (const auto e = find(source); e != entries_.end() && e->copy == copy) {
      e->copy.reset();
      ++e->changed;
    }
    if (copy.use_count() > 1) return {};
    std::atomic_thread_fence(std::memory_order_acquire);  // after the last reader
    return copy;
  }

  /// Not kept if a weight was frozen meanwhile: what was read may be older than the promise.
  void put(const Source& source, const Copy& copy, const Checksum& checksum, int64_t promise) {
    const std::lock_guard lock(mutex_);
    const auto e = find(source);
    if (e == entries_.end() || promise != promises_) return;
    e->copy = copy;
    e->checksum = checksum;
    e->unchanged = 0;
    shrink(limit_);
  }

  void freeze(const Memory& memory) {
    const std::lock_guard lock(mutex_);
    ++promises_;
    std::erase_if(entries_, [&](const Entry& e) { return e.source.memory.overlaps(memory); });
    if (!is_frozen(memory)) frozen_.push_back(memory);
  }
  void thaw(const Memory& memory) {
    const std::lock_guard lock(mutex_);
    std::erase_if(frozen_, [&](const Memory& m) { return m.overlaps(memory); });
  }

  int64_t bytes() {
    const std::lock_guard lock(mutex_);
    sweep();
    return sum();
  }
  int64_t limit() {
    const std::lock_guard lock(mutex_);
    return limit_;
  }
  void set_limit(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    limit_ = bytes;
    shrink(bytes);
  }
  PackingCounts counts() {
    const std::lock_guard lock(mutex_);
    return counts_;
  }

 private:
  using Entries = std::list<Entry>;
  static constexpr int64_t kUsesBetweenSweeps = 64;
  static constexpr size_t kMostEntries = 4096;
  static constexpr int64_t kMostPatience = 1 << 20;
  static constexpr int64_t kMostChanges = 4, kPause = 30;

  Entries::iterator find(const Source& source) {
    return std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.source == source; });
  }
  int64_t sum() const {
    int64_t bytes = 0;
    for (const auto& e : entries_) bytes += e.bytes();
    return bytes;
  }
  bool is_frozen(const Memory& m) const {
    return std::any_of(frozen_.begin(), frozen_.end(), [&](const Memory& f) { return f.contains(m); });
  }
  bool is_moving(const Memory& m) const {
    return std::any_of(moving_.begin(), moving_.end(), [&](const Memory& x) { return x.in_storage_of(m); });
  }
  /// A weight that changes before each use, as in training without accumulation, is packed for each use anyway: looking
  /// for changes and keeping a copy would only cost. Now and then it gets another chance.
  static bool pauses(Entry& e) {
    if (e.pause > 0) return --e.pause, true;
    if (e.changed < kMostChanges) return false;
    e.copy.reset();
    e.changed = kMostChanges - 1;
    e.pause = kPause - 1;
    return true;
  }
  /// Drops what is known of weights that are gone, and copies of those whose memory comes and goes.
  void sweep() {
    for (const auto& e : entries_)
      if (e.source.memory.moved() && !is_moving(e.source.memory)) moving_.push_back(e.source.memory);
    std::erase_if(entries_, [](const Entry& e) { return e.source.memory.gone() || e.source.memory.moved(); });
    for (auto* list : {&frozen_, &moving_}) std::erase_if(*list, [](const Memory& m) { return m.gone(); });
    while (entries_.size() > kMostEntries) entries_.pop_back();
  }
  /// Drops the least recently used copies until at most `most` bytes are left.
  void shrink(int64_t most) {
    int64_t kept = sum();
    for (auto e = entries_.rbegin(); e != entries_.rend() && kept > most; ++e) {
      kept -= e->bytes();
      e->copy.reset();
    }
  }
  /// Room for a copy of `e` by dropping copies that were last used before it. False if they are too small: a model
  /// larger than the limit, used layer by layer, keeps the copies it has and does not push out one by the other.
  bool make_room(Entries::iterator e, int64_t bytes) {
    int64_t newer = 0;
    for (auto x = entries_.begin(); x != e; ++x) newer += x->bytes();
    if (newer + bytes > limit_) return false;
    shrink(limit_ - bytes);
    return true;
  }

  std::mutex mutex_;
  Entries entries_;  // most recently used first
  std::vector<Memory> frozen_;
  std::vector<Memory> moving_;  // memory that comes and goes between uses: not worth a copy
  int64_t limit_ = limit_from_environment();
  int64_t uses_ = 0, promises_ = 0;
  PackingCounts counts_;
};

}  // namespace

PackedCopy::PackedCopy(int64_t bytes) : bytes_(bytes) {
  constexpr size_t kPage = 4096;
  const auto size = static_cast<size_t>(bytes);
  void* memory = nullptr;
  const bool failed = posix_memalign(&memory, size < kHugePage ? kPage : kHugePage, std::max<size_t>(size, 64)) != 0;
  TORCH_CHECK(!failed, "weft: no memory for a packed weight of ", bytes, " bytes. Lower WEFT_PACKED_BYTES.");
  data_ = static_cast<uint16_t*>(memory);
  ask_for_huge_pages(memory, size);
}

PackedCopy::~PackedCopy() { std::free(data_); }

KeptCopy kept_copy(const Packing& packing, bool may_wait) {
  auto& shelf = Shelf::instance();
  const Source source(packing.source, packing.half);
  auto found = shelf.look_up(source, packing.bytes);
  if (!found.keep || found.trusted) return {.copy = found.copy};
  if (found.may_wait && may_wait) return {.copy = found.copy, .promised = found.checksum};
  // The checksum comes before the copy: if another thread writes in between, the next use sees a difference.
  const auto checksum = packing.checksum();
  if (found.copy && found.checksum == checksum) {
    shelf.holds(source);
    return {.copy = found.copy};
  }
  auto copy = shelf.reclaim(source, std::move(found.copy));
  if (!copy) copy = std::make_shared<const PackedCopy>(packing.bytes);
  packing.pack(copy->data());
  shelf.put(source, copy, checksum, found.promise);
  return {.copy = copy};
}

void compared(const Packing& packing, bool same) {
  const Source source(packing.source, packing.half);
  same ? Shelf::instance().holds(source) : Shelf::instance().was_in_vain(source);
}

void freeze(const at::Tensor& weight) {
  if (weight.numel() == 0) return;
  const Memory memory(weight);
  TORCH_CHECK_VALUE(
      memory.base,
      "prepack: a weight has no memory of its own: it is on the meta device, or sharded as by FSDP2. Give "
      "it values first; leave prepack out for sharded modules, whose memory comes and goes.");
  Shelf::instance().freeze(memory);
}

void thaw(const at::Tensor& weight) {
  if (weight.numel() > 0) Shelf::instance().thaw(Memory(weight));
}

int64_t packed_bytes() { return Shelf::instance().bytes(); }

int64_t packing_limit() { return Shelf::instance().limit(); }

void set_packing_limit(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "set_packing_limit: got ", bytes, " bytes, expected 0 or more.");
  Shelf::instance().set_limit(bytes);
}

PackingCounts packing_counts() { return Shelf::instance().counts(); }

}  // namespace weft::kernels
