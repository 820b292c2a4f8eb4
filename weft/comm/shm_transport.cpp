#include "weft/comm/shm_transport.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <cstring>

#include "weft/comm/free_memory.h"
#include "weft/core/value.h"

namespace weft::comm {
namespace {

constexpr size_t kBlockAlign = 128;
constexpr size_t kSlotGranularity = size_t{1} << 20;  // slot sizes are multiples of it
constexpr int64_t kCopyChunkBytes = 256 << 10;        // bytes copied between two updates of the ready count

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

size_t row_bytes(const CollectiveFingerprint& fingerprint) {
  return static_cast<size_t>(fingerprint.columns) * c10::elementSize(fingerprint.dtype);
}

/// Distance in bytes between two blocks of a slot.
size_t block_bytes(const CollectiveFingerprint& fingerprint) {
  uint64_t row = 0, block = 0;
  const bool too_large = c10::mul_overflows<uint64_t>(fingerprint.columns, c10::elementSize(fingerprint.dtype), &row) ||
                         c10::mul_overflows<uint64_t>(fingerprint.rows, row, &block) || block > (uint64_t{1} << 48);
  TORCH_CHECK_VALUE(!too_large, "A block of [", fingerprint.rows, ", ", fingerprint.columns, "] ",
                    dtype_name(fingerprint.dtype), " is too large: expected at most 2^48 bytes.");
  return round_up(block, kBlockAlign);
}

}  // namespace

struct ShmTransport::SharedState {
  std::shared_ptr<Rendezvous> rendezvous;
  SharedMemories control_blocks;
  Signals signals;
};

struct ShmTransport::Slots {
  SharedMemories memories;
  size_t bytes = 0;  // size of one slot; a rank has two
};

// ---- one collective -----------------------------------------------------------------------------------------------

class ShmTransport::ShmCollective final : public InFlightCollective {
 public:
  ShmCollective(std::shared_ptr<SharedState> shared, const CollectiveFingerprint& fingerprint, uint64_t free_memory)
      : shared_(std::move(shared)),
        fingerprint_(fingerprint),
        ready_rows_(signals().size()),
        seq_(signals().start(fingerprint, free_memory)) {}
  ~ShmCollective() override {
    if (!finished_) signals().abandon(seq_);
  }

  uint64_t seq() const { return seq_; }
  void set_slots(std::shared_ptr<const Slots> slots) { slots_ = std::move(slots); }

  at::Tensor outgoing(int to) override {
    check_destination(to, "outgoing");
    return block(rank(), to);
  }
  void mark_ready(int to, int64_t rows) override {
    check_destination(to, "mark_ready");
    TORCH_CHECK_VALUE(rows >= ready_rows_[to] && rows <= fingerprint_.rows, "mark_ready: expected ", ready_rows_[to],
                      " (already marked) to ", fingerprint_.rows, " rows for rank ", to, ", got ", rows, ".");
    ready_rows_[to] = rows;
    signals().mark_ready(seq_, to, rows);
  }
  at::Tensor incoming(int from) override {
    check_peer(from);
    return block(from, rank());
  }
  int64_t arrived(int from) override {
    check_peer(from);
    return signals().arrived(seq_, from, broadcast());
  }
  void wait(int from, int64_t rows) override {
    check_peer(from);
    TORCH_CHECK_VALUE(rows <= fingerprint_.rows, "wait: expected at most ", fingerprint_.rows, " rows, got ", rows,
                      ".");
    signals().wait(seq_, from, broadcast(), rows);
  }
  void progress() override { signals().check(); }
  void finish() override;

  /// All-gather: copies `local` into this rank's slot and marks its rows ready.
  void write_own_block(const at::Tensor& local);

 private:
  Signals& signals() const { return shared_->signals; }
  int rank() const { return signals().rank(); }
  bool broadcast() const { return fingerprint_.op == CommOp::all_gather; }
  void check_peer(int peer) const {
    TORCH_CHECK_INDEX(peer >= 0 && peer < signals().size() && peer != rank(), "Rank ", peer, " is not a peer of rank ",
                      rank(), " in a group of ", signals().size(), ".");
  }
  void check_destination(int to, const char* call) const {
    if (broadcast() && to == rank()) return;
    check_peer(to);
    TORCH_CHECK(!broadcast(), call, ": an all-gather has one block for all ranks. Pass this rank, ", rank(), ".");
  }
  at::Tensor block(int from, int to) const;

  std::shared_ptr<SharedState> shared_;
  CollectiveFingerprint fingerprint_;
  std::vector<int64_t> ready_rows_;  // by destination rank; an all-gather uses only the entry of this rank
  uint64_t seq_;
  std::shared_ptr<const Slots> slots_;
  bool finished_ = false;
};

/// Block of rank `from` for rank `to`. A slot holds one block for an all-gather, otherwise one per peer in rank order.
at::Tensor ShmTransport::ShmCollective::block(int from, int to) const {
  const size_t index = broadcast() ? 0 : static_cast<size_t>(to < from ? to : to - 1);
  const auto& memory = slots_->memories[from];
  auto* data = memory->data() + seq_ % 2 * slots_->bytes + index * block_bytes(fingerprint_);
  return at::from_blob(
      data, {fingerprint_.rows, fingerprint_.columns}, [memory](void*) {}, at::dtype(fingerprint_.dtype));
}

void ShmTransport::ShmCollective::write_own_block(const at::Tensor& local) {
  const auto slot = block(rank(), rank());
  const auto row = static_cast<int64_t>(row_bytes(fingerprint_));
  const int64_t chunk_rows = std::max<int64_t>(1, kCopyChunkBytes / std::max<int64_t>(1, row));
  for (int64_t from = 0; from < fingerprint_.rows; from += chunk_rows) {
    const int64_t rows = std::min(chunk_rows, fingerprint_.rows - from);
    if (local.is_contiguous()) {
      std::memcpy(static_cast<char*>(slot.data_ptr()) + from * row,
                  static_cast<const char*>(local.data_ptr()) + from * row, static_cast<size_t>(rows * row));
    } else {
      slot.narrow(0, from, rows).copy_(local.narrow(0, from, rows));
    }
    mark_ready(rank(), from + rows);
  }
}

void ShmTransport::ShmCollective::finish() {
  for (int peer = 0; peer < signals().size(); ++peer) {
    const int target = broadcast() ? rank() : peer;
    if (peer == rank()) continue;
    TORCH_CHECK(ready_rows_[target] == fingerprint_.rows, "finish: only ", ready_rows_[target], " of ",
                fingerprint_.rows, " rows for rank ", peer, " are marked ready in collective ", seq_, ".");
    signals().wait_for_match(seq_, peer);
  }
  signals().finish(seq_);
  finished_ = true;
}

// ---- the transport ------------------------------------------------------------------------------------------------

namespace {

Signals::Options signal_options(const Rendezvous& rendezvous, const SharedMemories& control_blocks) {
  Signals::Options options{rendezvous.rank(), {}, rendezvous.group_id(), rendezvous.timeout()};
  for (int r = 0; r < rendezvous.size(); ++r)
    options.peers.push_back({control_blocks[r]->data(), &rendezvous.process(r)});
  return options;
}

}  // namespace

ShmTransport::ShmTransport(std::shared_ptr<Rendezvous> rendezvous) : slots_(std::make_shared<Slots>()) {
  auto local = SharedMemory::make(Signals::control_block_bytes(rendezvous->size()));
  auto control_blocks = rendezvous->exchange_memory(local, [] {});
  local->close_file();
  const auto options = signal_options(*rendezvous, control_blocks);
  shared_ = std::make_shared<SharedState>(std::move(rendezvous), std::move(control_blocks), Signals(options));
}

ShmTransport::~ShmTransport() = default;
int ShmTransport::rank() const { return shared_->signals.rank(); }
int ShmTransport::size() const { return shared_->signals.size(); }

std::unique_ptr<ShmTransport::ShmCollective> ShmTransport::start(const CollectiveFingerprint& fingerprint) {
  const size_t blocks = fingerprint.op == CommOp::all_gather ? 1 : static_cast<size_t>(size()) - 1;
  const size_t needed = blocks * block_bytes(fingerprint);
  const bool must_grow = needed > slots_->bytes || slots_->memories.empty();
  auto collective = std::make_unique<ShmCollective>(shared_, fingerprint, must_grow ? free_memory() : 0);
  try {
    if (must_grow) grow(collective->seq(), needed);
  } catch (const c10::Error& error) {
    shared_->signals.abandon(collective->seq(), error.what_without_backtrace());
    throw;
  }
  collective->set_slots(slots_);
  return collective;
}

/// Allocates and exchanges larger slots. First compares the announcements of all ranks, so every rank needs the same
/// size. Each announcement holds the free memory before any rank allocated.
void ShmTransport::grow(uint64_t seq, size_t slot_bytes) {
  auto& signals = shared_->signals;
  const uint64_t available = signals.min_free_memory(seq);
  auto slots = std::make_shared<Slots>();
  slots->bytes = round_up(std::max({slot_bytes, slots_->bytes / 4 * 5, size_t{1}}), kSlotGranularity);
  const auto ranks = static_cast<size_t>(size());
  if (2 * slots->bytes > available / ranks)
    C10_THROW_ERROR(OutOfMemoryError,
                    c10::str("Cannot allocate ", 2 * slots->bytes, " bytes of shared memory for each of ", ranks,
                             " ranks: only ", available, " bytes are available in total."));
  auto local = SharedMemory::make(2 * slots->bytes);
  slots->memories = shared_->rendezvous->exchange_memory(local, [&] { signals.check(); });
  local->close_file();
  slots_ = std::move(slots);
}

std::unique_ptr<InFlightCollective> ShmTransport::all_gather(const at::Tensor& local) {
  TORCH_CHECK_VALUE(local.dim() == 2 && local.device().is_cpu() && local.layout() == at::kStrided,
                    "all_gather: expected a 2-D strided CPU tensor, got ", local.toString(), " of shape ",
                    local.sizes(), ".");
  const CollectiveFingerprint fingerprint{CommOp::all_gather, local.scalar_type(), local.size(0), local.size(1)};
  auto collective = start(fingerprint);
  collective->write_own_block(local);
  return collective;
}

std::unique_ptr<InFlightCollective> ShmTransport::all_gather(int64_t rows, int64_t columns, at::ScalarType dtype) {
  return start({CommOp::all_gather, dtype, rows, columns});
}

std::unique_ptr<InFlightCollective> ShmTransport::reduce_scatter(int64_t rows, int64_t columns, at::ScalarType dtype) {
  return start({CommOp::reduce_scatter, dtype, rows, columns});
}

}  // namespace weft::comm
