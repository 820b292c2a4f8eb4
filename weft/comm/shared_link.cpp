#include "weft/comm/shared_link.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <cstring>

#include "weft/comm/free_memory.h"

namespace weft::comm {
namespace {

constexpr size_t kAlign = 128;             // of a block
constexpr size_t kStep = size_t{1} << 20;  // slots are multiples of it
constexpr int64_t kCopyBytes = 256 << 10;  // published at a time

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

size_t row_bytes(const Agreement& about) { return static_cast<size_t>(about.columns) * c10::elementSize(about.dtype); }

/// Bytes between two blocks of a slot.
size_t block_bytes(const Agreement& about) {
  uint64_t row = 0, block = 0;
  const bool too_large = c10::mul_overflows<uint64_t>(about.columns, c10::elementSize(about.dtype), &row) ||
                         c10::mul_overflows<uint64_t>(about.rows, row, &block) || block > (uint64_t{1} << 48);
  TORCH_CHECK_VALUE(!too_large, "A block of [", about.rows, ", ", about.columns, "] ", about.dtype, " is too large.");
  return round_up(block, kAlign);
}

}  // namespace

struct SharedLink::Core {
  std::shared_ptr<Meeting> meeting;
  Memories pads;
  Signals signals;
};

struct SharedLink::Slots {
  Memories memories;
  size_t bytes = 0;  // of one of the two slots of a rank
};

// ---- one round ----------------------------------------------------------------------------------------------------

class SharedLink::Round final : public Exchange {
 public:
  Round(std::shared_ptr<Core> core, const Agreement& about, uint64_t free_memory)
      : core_(std::move(core)),
        about_(about),
        published_(signals().size()),
        round_(signals().start(about, free_memory)) {}
  ~Round() override {
    if (!finished_) signals().abandon(round_);
  }

  uint64_t number() const { return round_; }
  const Agreement& about() const { return about_; }
  void use(std::shared_ptr<const Slots> slots) { slots_ = std::move(slots); }

  at::Tensor outgoing(int to) override {
    if (common() && to == rank()) return own();
    check_peer(to);
    TORCH_CHECK(!common(), "An all-gather has no outgoing blocks: its block was given.");
    return block(rank(), to);
  }
  void publish(int to, int64_t rows) override {
    if (common() && to == rank()) return publish_rows(to, rows);
    check_peer(to);
    TORCH_CHECK(!common(), "An all-gather publishes its block by itself.");
    publish_rows(to, rows);
  }
  at::Tensor incoming(int from) override {
    check_peer(from);
    return block(from, rank());
  }
  int64_t arrived(int from) override {
    check_peer(from);
    return signals().arrived(round_, from, common());
  }
  void wait(int from, int64_t rows) override {
    check_peer(from);
    TORCH_CHECK_VALUE(rows <= about_.rows, "Row ", rows, " of a block of ", about_.rows, " was asked for.");
    signals().wait(round_, from, common(), rows);
  }
  void advance() override { signals().check(); }
  void finish() override;

  /// This rank's block of an all-gather.
  at::Tensor own() const { return block(rank(), rank()); }
  /// Copies `mine` there, unless it is there, and publishes it.
  void give(const at::Tensor& mine);

 private:
  Signals& signals() const { return core_->signals; }
  int rank() const { return signals().rank(); }
  bool common() const { return about_.operation == Operation::all_gather; }
  void check_peer(int peer) const {
    TORCH_CHECK_INDEX(peer >= 0 && peer < signals().size() && peer != rank(), "Rank ", peer, " is no peer of rank ",
                      rank(), " among ", signals().size(), ".");
  }
  void publish_rows(int to, int64_t rows) {
    TORCH_CHECK_VALUE(rows >= published_[to] && rows <= about_.rows, rows, " rows were published for rank ", to,
                      " after ", published_[to], " of ", about_.rows, ".");
    published_[to] = rows;
    signals().publish(round_, to, rows);
  }
  at::Tensor block(int from, int to) const;

  std::shared_ptr<Core> core_;
  Agreement about_;
  std::vector<int64_t> published_;  // for each rank; in an all-gather, for everybody at this rank's place
  uint64_t round_;
  std::shared_ptr<const Slots> slots_;
  bool finished_ = false;
};

/// Block of rank `from` for rank `to`: the only one of an all-gather, else one of those for its peers, in their order.
at::Tensor SharedLink::Round::block(int from, int to) const {
  const size_t place = common() ? 0 : static_cast<size_t>(to < from ? to : to - 1);
  const auto& memory = slots_->memories[from];
  auto* data = memory->data() + round_ % 2 * slots_->bytes + place * block_bytes(about_);
  return at::from_blob(data, {about_.rows, about_.columns}, [memory](void*) {}, at::dtype(about_.dtype));
}

void SharedLink::Round::give(const at::Tensor& mine) {
  const auto there = own();
  const auto row = static_cast<int64_t>(row_bytes(about_));
  if (mine.data_ptr() == there.data_ptr() && mine.is_contiguous()) return publish_rows(rank(), about_.rows);
  const int64_t step = std::max<int64_t>(1, kCopyBytes / std::max<int64_t>(1, row));
  for (int64_t from = 0; from < about_.rows; from += step) {
    const int64_t rows = std::min(step, about_.rows - from);
    if (mine.is_contiguous()) {
      std::memcpy(static_cast<char*>(there.data_ptr()) + from * row,
                  static_cast<const char*>(mine.data_ptr()) + from * row, static_cast<size_t>(rows * row));
    } else {
      there.narrow(0, from, rows).copy_(mine.narrow(0, from, rows));
    }
    publish_rows(rank(), from + rows);
  }
}

void SharedLink::Round::finish() {
  for (int peer = 0; peer < signals().size(); ++peer) {
    const int word = common() ? rank() : peer;
    if (peer == rank()) continue;
    TORCH_CHECK(published_[word] == about_.rows, "Round ", round_, " cannot be finished: of the block for rank ", peer,
                " ", published_[word], " of ", about_.rows, " rows are published.");
    signals().meet(round_, peer);
  }
  signals().finish(round_);
  finished_ = true;
}

// ---- the link -----------------------------------------------------------------------------------------------------

namespace {

Signals::Options signal_options(const Meeting& meeting, const Memories& pads) {
  Signals::Options options{meeting.rank(), {}, meeting.group(), meeting.timeout()};
  for (int r = 0; r < meeting.size(); ++r) options.peers.push_back({pads[r]->data(), &meeting.process(r)});
  return options;
}

}  // namespace

SharedLink::SharedLink(std::shared_ptr<Meeting> meeting) : slots_(std::make_shared<Slots>()) {
  auto mine = Memory::make(Signals::pad_bytes(meeting->size()));
  auto pads = meeting->meet(mine, [] {});
  mine->close_file();
  const auto options = signal_options(*meeting, pads);
  core_ = std::make_shared<Core>(std::move(meeting), std::move(pads), Signals(options));
}

SharedLink::~SharedLink() = default;
int SharedLink::rank() const { return core_->signals.rank(); }
int SharedLink::size() const { return core_->signals.size(); }

std::unique_ptr<SharedLink::Round> SharedLink::start(const Agreement& about) {
  const size_t blocks = about.operation == Operation::all_gather ? 1 : static_cast<size_t>(size()) - 1;
  const size_t needed = blocks * block_bytes(about);
  const bool grows = needed > slots_->bytes || slots_->memories.empty();
  auto round = std::make_unique<Round>(core_, about, grows ? free_memory() : 0);
  try {
    if (grows) grow(round->number(), needed);
  } catch (const c10::Error& error) {
    core_->signals.abandon(round->number(), error.what_without_backtrace());
    throw;
  }
  round->use(slots_);
  return round;
}

/// Meets with new memory, now that all are known to do the same round and so to need as much. All said how much the
/// host has left before any of them took some.
void SharedLink::grow(uint64_t round, size_t slot_bytes) {
  auto& signals = core_->signals;
  const uint64_t left = signals.least_free_memory(round);
  auto slots = std::make_shared<Slots>();
  slots->bytes = round_up(std::max({slot_bytes, slots_->bytes / 4 * 5, size_t{1}}), kStep);
  const auto ranks = static_cast<size_t>(size());
  if (2 * slots->bytes > left / ranks)
    C10_THROW_ERROR(OutOfMemoryError, c10::str("No ", 2 * slots->bytes, " bytes of shared memory for each of ", ranks,
                                               " ranks: they can take ", left, " at most together."));
  auto mine = Memory::make(2 * slots->bytes);
  slots->memories = core_->meeting->meet(mine, [&] { signals.check(); });
  mine->close_file();
  slots_ = std::move(slots);
}

std::unique_ptr<Exchange> SharedLink::all_gather(const at::Tensor& mine) {
  TORCH_CHECK_VALUE(mine.dim() == 2 && mine.device().is_cpu() && mine.layout() == at::kStrided,
                    "all_gather: expected a dense matrix on the CPU, got ", mine.toString(), " ", mine.sizes(), ".");
  const Agreement about{Operation::all_gather, mine.scalar_type(), mine.size(0), mine.size(1)};
  const bool in_place =
      placed_ && placed_->about() == about && placed_->own().data_ptr() == mine.data_ptr() && mine.is_contiguous();
  auto round = in_place ? std::move(placed_) : start(about);
  round->give(mine);
  return round;
}

std::unique_ptr<Exchange> SharedLink::all_gather(int64_t rows, int64_t columns, at::ScalarType dtype) {
  return start({Operation::all_gather, dtype, rows, columns});
}

std::unique_ptr<Exchange> SharedLink::reduce_scatter(int64_t rows, int64_t columns, at::ScalarType dtype) {
  return start({Operation::reduce_scatter, dtype, rows, columns});
}

at::Tensor SharedLink::place(int64_t rows, int64_t columns, at::ScalarType dtype) {
  TORCH_CHECK(!placed_, "The block given before is not gathered yet.");
  placed_ = start({Operation::all_gather, dtype, rows, columns});
  return placed_->own();
}

}  // namespace weft::comm
