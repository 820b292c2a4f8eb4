#include "weft/kernels/cpu/packed.h"

#include <c10/util/DimVector.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "weft/kernels/packing.h"

namespace weft::kernels {
namespace {

using Copy = std::shared_ptr<const PackedCopy>;

/// The memory of a tensor, from its first value to its last.
struct Range {
  const c10::StorageImpl* storage;
  const char *begin, *end;

  explicit Range(const at::Tensor& t)
      : storage(t.storage().unsafeGetStorageImpl()), begin(static_cast<const char*>(t.const_data_ptr())), end(begin) {
    if (t.numel() == 0) return;
    int64_t last = 0;
    for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    end += (last + 1) * static_cast<int64_t>(t.element_size());
  }
  bool operator==(const Range& r) const { return storage == r.storage && begin == r.begin && end == r.end; }
  bool overlaps(const Range& r) const { return storage == r.storage && begin < r.end && r.begin < end; }
};

struct HashRange {
  size_t operator()(const Range& r) const { return c10::get_hash(r.storage, r.begin, r.end); }
};

/// How the values lie in that memory, and in which order they are packed.
struct Layout {
  at::DimVector sizes, strides;
  int64_t half;

  explicit Layout(const Packing& p) : sizes(p.source.sizes()), strides(p.source.strides()), half(p.half) {}
  bool operator==(const Layout& l) const { return half == l.half && sizes == l.sizes && strides == l.strides; }
};

using Version = std::optional<uint32_t>;  // none: the tensor has no counter, as in inference mode

struct KeptCopy {
  Layout layout;
  Copy copy;
  Version version;  // of the weight, read before it was packed
};

/// A weight that was frozen. Its storage is held weakly, so that no other storage gets its address, and never locked:
/// that may ask for the GIL. The version counter is that of the caller's tensor: views made below autograd have others.
struct Frozen {
  Frozen(const at::Tensor& weight, std::string n, int64_t i)
      : storage(weight.storage().getWeakStorageImpl()),
        counter(weight.unsafeGetTensorImpl()->version_counter()),
        name(std::move(n)),
        id(i) {}

  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  c10::VariableVersion counter;
  std::string name;
  int64_t id;  // another one after each `freeze`
  std::vector<KeptCopy> copies = {};

  Version version() const { return counter.enabled() ? Version(counter.current_version()) : std::nullopt; }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const auto& kept : copies) sum += kept.copy->bytes();
    return sum;
  }
  std::vector<KeptCopy>::iterator find(const Layout& layout) {
    return std::find_if(copies.begin(), copies.end(), [&](const KeptCopy& kept) { return kept.layout == layout; });
  }
};

/// What a GEMM finds.
struct Found {
  int64_t id;
  Version version;     // now
  Copy copy = {};      // null: none yet
  bool holds = false;  // no change of the weight was recorded since the copy was made
  std::string name = {};
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

/// All frozen weights with their copies. The lock is held for looking only, not while a weight is read.
class FrozenWeights {
 public:
  static FrozenWeights& instance() {
    static auto* weights = new FrozenWeights;  // never destroyed: a thread may multiply while the process exits
    return *weights;
  }

  bool none() const { return count_.load(std::memory_order_relaxed) == 0; }

  /// Nothing if no copy is to be kept.
  std::optional<Found> look_up(const Range& range, const Layout& layout, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (++uses_ % kUsesBetweenSweeps == 0) sweep();
    const auto w = weights_.find(range);
    if (w == weights_.end()) return {};
    auto& weight = w->second;
    Found found{.id = weight.id, .version = weight.version()};
    if (const auto kept = weight.find(layout); kept != weight.copies.end()) {
      found.copy = kept->copy;
      found.holds = kept->version == found.version;
      if (!found.holds) found.name = weight.name;
      ++counts_.reused;
      return found;
    }
    if (sum_ + bytes > limit_) sweep();
    if (sum_ + bytes > limit_) return {};
    return found;
  }

  /// Keeps a copy, unless there is one, or the weight was frozen again or thawed meanwhile.
  void put(const Range& range, const Layout& layout, const Found& found, const Copy& copy) {
    const std::lock_guard lock(mutex_);
    const auto w = weights_.find(range);
    if (w == weights_.end() || w->second.id != found.id) return;
    if (w->second.find(layout) != w->second.copies.end() || sum_ + copy->bytes() > limit_) return;
    w->second.copies.push_back({layout, copy, found.version});
    sum_ += copy->bytes();
    ++counts_.packed;
  }

  /// A copy still has the weight's values although its version counter moved.
  void holds(const Range& range, const Layout& layout, const Found& found) {
    const std::lock_guard lock(mutex_);
    const auto w = weights_.find(range);
    if (w == weights_.end() || w->second.id != found.id) return;
    if (const auto kept = w->second.find(layout); kept != w->second.copies.end()) kept->version = found.version;
  }

  void freeze(const at::Tensor& weight, std::string name) {
    const Range range(weight);
    const std::lock_guard lock(mutex_);
    weights_.erase(range);
    for (auto& [other, frozen] : weights_)
      if (other.overlaps(range)) frozen.copies.clear();
    weights_.emplace(range, Frozen(weight, std::move(name), ++ids_));
    sweep();
  }
  void thaw(const Range& range) {
    const std::lock_guard lock(mutex_);
    std::erase_if(weights_, [&](const auto& w) { return w.first.overlaps(range); });
    sweep();
  }

  int64_t bytes() {
    const std::lock_guard lock(mutex_);
    sweep();
    return sum_;
  }
  int64_t limit() {
    const std::lock_guard lock(mutex_);
    return limit_;
  }
  void set_limit(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    limit_ = bytes;
    sweep();
    for (auto& [range, weight] : weights_) {
      if (sum_ <= limit_) break;
      sum_ -= weight.bytes();
      weight.copies.clear();
    }
  }
  PackingCounts counts() {
    const std::lock_guard lock(mutex_);
    return counts_;
  }

 private:
  static constexpr int64_t kUsesBetweenSweeps = 64;

  /// Forgets weights that are gone.
  void sweep() {
    std::erase_if(weights_, [](const auto& w) { return w.second.storage.expired(); });
    sum_ = 0;
    for (const auto& [range, weight] : weights_) sum_ += weight.bytes();
    count_.store(weights_.size(), std::memory_order_relaxed);
  }

  std::mutex mutex_;
  std::unordered_map<Range, Frozen, HashRange> weights_;
  std::atomic<size_t> count_ = 0;  // of weights: a process that freezes none takes no lock
  int64_t limit_ = limit_from_environment();
  int64_t sum_ = 0;  // bytes of all copies
  int64_t uses_ = 0, ids_ = 0;
  PackingCounts counts_;
};

/// Memory that `borrow` lends. Never destroyed: tensors may give theirs back while the process exits.
class Lender {
 public:
  static Lender& instance() {
    static auto* lender = new Lender;
    return *lender;
  }

  std::unique_ptr<PackedCopy> take(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    for (auto& copy : free_)
      if (copy && copy->bytes() >= bytes) return std::move(copy);
    return nullptr;
  }
  /// Takes the place of nothing, or of the smaller piece.
  void give_back(std::unique_ptr<PackedCopy> copy) {
    constexpr int64_t kMostKept = 64 << 20;
    if (copy->bytes() > kMostKept) return;
    const std::lock_guard lock(mutex_);
    const auto size = [](const auto& c) { return c ? c->bytes() : 0; };
    auto& place = size(free_[0]) <= size(free_[1]) ? free_[0] : free_[1];
    if (size(place) < copy->bytes()) std::swap(place, copy);
  }

 private:
  std::mutex mutex_;
  std::array<std::unique_ptr<PackedCopy>, 2> free_;
};

}  // namespace

std::shared_ptr<const PackedCopy> frozen_copy(const Packing& packing) {
  auto& weights = FrozenWeights::instance();
  if (weights.none()) return nullptr;
  const Range range(packing.source);
  const Layout layout(packing);
  const auto found = weights.look_up(range, layout, packing.bytes);
  if (!found) return nullptr;
  if (found->holds) return found->copy;
  auto copy = std::make_shared<const PackedCopy>(packing.bytes);
  packing.pack(copy->data());
  if (!found->copy) {
    weights.put(range, layout, *found, copy);
    return copy;
  }
  const bool same = std::memcmp(copy->data(), found->copy->data(), static_cast<size_t>(packing.bytes)) == 0;
  TORCH_CHECK(same, "prepack: ", found->name, " was changed in place while it was frozen. Call prepack again after a ",
              "change, or prepack(module, frozen=False) before it.");
  weights.holds(range, layout, *found);
  return found->copy;
}

std::shared_ptr<PackedCopy> borrow(int64_t bytes) {
  auto memory = Lender::instance().take(bytes);
  if (!memory) memory = std::make_unique<PackedCopy>(bytes);
  return {memory.release(), [](PackedCopy* copy) { Lender::instance().give_back(std::unique_ptr<PackedCopy>(copy)); }};
}

void freeze(const at::Tensor& weight, std::string name) {
  if (weight.numel() == 0) return;
  TORCH_CHECK_VALUE(weight.storage().data(), "prepack: ", name,
                    " has no memory of its own: it is on the meta device, or sharded as by FSDP2. Give "
                    "it values first; leave prepack out for sharded modules, whose memory comes and goes.");
  FrozenWeights::instance().freeze(weight, std::move(name));
}

void thaw(const at::Tensor& weight) {
  if (weight.numel() > 0) FrozenWeights::instance().thaw(Range(weight));
}

int64_t packed_bytes() { return FrozenWeights::instance().bytes(); }

int64_t packing_limit() { return FrozenWeights::instance().limit(); }

void set_packing_limit(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes >= 0, "set_packing_limit: got ", bytes, " bytes, expected 0 or more.");
  FrozenWeights::instance().set_limit(bytes);
}

PackingCounts packing_counts() { return FrozenWeights::instance().counts(); }

}  // namespace weft::kernels
