#include "weft/overlap/costs.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>

#include "weft/kernels/gemm.h"
#include "weft/overlap/blocks.h"
#include "weft/overlap/clock.h"

namespace weft::overlap {
namespace {

constexpr double kMaxNetworkRatio = 0.85;  // largest accepted overlapped / plain
constexpr int kArrivalBlocks = 4;          // GEMM blocks over a network: each multiplies the rows that have arrived
constexpr int64_t kLastBlockRows = 64;     // rows of the last block

double cpu_now() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// Seconds of the fastest run.
template <class Fn>
double min_seconds(int runs, Fn&& fn) {
  double best = 1e9;
  for (int i = 0; i < runs; ++i) {
    const double start = now();
    fn();
    best = std::min(best, now() - start);
  }
  return best;
}

at::Tensor square_weight(int64_t width, at::ScalarType dtype) {
  return at::zeros({width, width}, at::TensorOptions().dtype(dtype));
}

/// Multiplies `rows` rows by a square weight.
struct TimedGemm {
  TimedGemm(int64_t rows, at::Tensor weight)
      : x(at::zeros({rows, weight.size(1)}, weight.options())), w(std::move(weight)) {}

  void operator()() const { kernels::gemm(x, kernels::transposed(w), {.b_is_weight = true}); }

  /// Median over rounds of the mean time. Each round begins at the same time on all ranks, which multiply together, as
  /// in a step: they may share cores, clocks and memory.
  double median_seconds(const comm::Group& group, int runs) const {
    std::array<double, 3> rounds{};
    for (auto& mean : rounds) {
      group.all_gather(at::zeros({1, 1})).wait();  // a barrier
      const double start = now();
      for (int i = 0; i < runs; ++i) (*this)();
      mean = (now() - start) / runs;
    }
    std::ranges::sort(rounds);
    return rounds[1];
  }

  at::Tensor x, w;
};

constexpr int64_t kFew = 64, kMany = 1024;  // rows of the timed GEMMs

/// Seconds of the slowest rank for a GEMM with the fewest rows and the smallest weight.
double probe(const comm::Group& group, at::ScalarType dtype) {
  const TimedGemm gemm(kFew, square_weight(kSlowWidth, dtype));
  gemm();
  const auto seconds = at::full({1, 1}, min_seconds(3, gemm), at::TensorOptions().dtype(at::kDouble));
  return group.all_gather(seconds).wait().max().item<double>();
}

/// Fits time = per_weight·N·K + per_row·rows to two GEMMs with the same weight. The lower bound on per_row limits the
/// effect of timer noise.
void measure_gemm(Costs& out, const comm::Group& group, at::ScalarType dtype) {
  const int64_t width = timed_width(probe(group, dtype));
  const auto w = square_weight(width, dtype);
  const double few = TimedGemm(kFew, w).median_seconds(group, 4);
  const double many = TimedGemm(kMany, w).median_seconds(group, 2);
  const double per_row = std::max(many - few, 0.2 * many) / static_cast<double>(kMany - kFew);
  out.per_flop = per_row / static_cast<double>(2 * width * width);
  out.per_weight = std::max(0.0, few - per_row * kFew) / static_cast<double>(width * width);
  // Below AMX each chunk is a GEMM of its own (weft/kernels/row_chunks.cpp).
  const auto tier = kernels::choose_gemm_tier(c10::DeviceType::CPU, dtype, width, width).tier;
  out.per_chunk = tier == kernels::Tier::amx ? 0 : out.per_weight;
}

/// An all-gather that also reads every incoming block.
void gather(comm::Transport& transport, const at::Tensor& local) {
  const auto collective = transport.all_gather(local);
  for (const int peer : peers(transport)) {
    collective->wait(peer, local.size(0));
    if (transport.zero_copy()) collective->incoming(peer).clone();
  }
  collective->finish();
}

constexpr int64_t kRows = 256, kColumns = 2048;  // of the message that measures the bandwidth: 2 MB in float32

void measure_transport(Costs& out, comm::Transport& transport) {
  const auto small = at::zeros({1, 1}), large = at::zeros({kRows, kColumns});
  const double bytes = static_cast<double>(large.nbytes()) * (transport.size() - 1);
  gather(transport, large);
  out.latency = min_seconds(10, [&] { gather(transport, small); });
  const double cpu = cpu_now();
  const double spent = std::max(0.0, min_seconds(2, [&] { gather(transport, large); }) - out.latency);
  out.per_byte = spent / bytes;
  out.cpu_per_byte = transport.zero_copy() ? out.per_byte : std::min(out.per_byte, (cpu_now() - cpu) / 2 / bytes);
}

void measure_collectives(Costs& out, const comm::Group& group) {
  const auto small = at::zeros({1, 1}), large = at::zeros({kRows, kColumns});
  out.plain_latency = min_seconds(5, [&] { group.all_gather(small).wait(); });
  const double spent = min_seconds(2, [&] { group.all_gather(large).wait(); });
  out.plain_per_byte =
      std::max(0.0, spent - out.plain_latency) / (static_cast<double>(large.nbytes()) * (group.size() - 1));
}

/// Element-wise maximum over the ranks, so that all ranks use the same costs.
Costs max_over_ranks(const Costs& local, const comm::Group& group) {
  static constexpr std::array kFields{&Costs::per_flop,      &Costs::per_weight,    &Costs::per_chunk,
                                      &Costs::latency,       &Costs::per_byte,      &Costs::cpu_per_byte,
                                      &Costs::plain_latency, &Costs::plain_per_byte};
  static_assert(sizeof(Costs) == kFields.size() * sizeof(double), "a field is missing");
  const auto values = at::empty({1, static_cast<int64_t>(kFields.size())}, at::TensorOptions().dtype(at::kDouble));
  for (size_t i = 0; i < kFields.size(); ++i) values.mutable_data_ptr<double>()[i] = local.*kFields[i];
  const auto all = std::get<0>(group.all_gather(values).wait().max(0)).contiguous();
  Costs out;
  for (size_t i = 0; i < kFields.size(); ++i) out.*kFields[i] = all.const_data_ptr<double>()[i];
  return out;
}

struct MeasuredCosts {
  std::weak_ptr<comm::Transport> transport;  // detects a new transport at the same address
  Costs costs;
};

struct CostTable {
  std::mutex mutex;
  std::map<std::pair<comm::Transport*, at::ScalarType>, MeasuredCosts> measured;
};

CostTable& cost_table() {
  static auto* instance = new CostTable;  // never destroyed: may be used at exit
  return *instance;
}

}  // namespace

int64_t timed_width(double probe) { return probe > 3e-3 ? kSlowWidth : kFastWidth; }

double Costs::gemm(int64_t rows, int64_t n, int64_t k) const {
  const double weight = static_cast<double>(n) * static_cast<double>(k);
  return weight * (per_weight + 2 * static_cast<double>(rows) * per_flop);
}

double OverlapShape::bytes() const {
  const int64_t columns = op == comm::CommOp::all_gather ? k : n;
  return static_cast<double>(ranks - 1) * static_cast<double>(rows * columns) *
         static_cast<double>(c10::elementSize(dtype));
}

Prediction predict(const OverlapShape& shape, const Costs& costs, bool zero_copy) {
  const bool twice = shape.op == comm::CommOp::all_reduce;
  const double bytes = shape.bytes() * (twice ? 2 : 1);
  const double gemm = costs.gemm(shape.rows * shape.ranks, shape.n, shape.k);
  Prediction out;
  out.plain = gemm + (twice ? 2 : 1) * costs.plain_latency + bytes * costs.plain_per_byte;
  if (zero_copy) {
    const double chunks = (shape.ranks - 1) * static_cast<double>(shape.n * shape.k) * costs.per_chunk;
    out.overlapped = gemm + chunks + (twice ? 2 : 1) * costs.latency + bytes * costs.cpu_per_byte;
    return out;
  }
  const double weight_reloads = (kArrivalBlocks - 1) * costs.gemm(0, shape.n, shape.k);
  const double last_block = costs.gemm(std::min(shape.rows, kLastBlockRows), shape.n, shape.k);
  out.overlapped =
      std::max(gemm + weight_reloads + bytes * costs.cpu_per_byte, costs.latency + bytes * costs.per_byte + last_block);
  return out;
}

std::string rejection_reason(const OverlapShape& shape, const Prediction& predicted, bool zero_copy) {
  if (shape.rows == 0) return "the input has no rows";
  if (predicted.overlapped <= (zero_copy ? 1.0 : kMaxNetworkRatio) * predicted.plain) return {};
  return "overlapping is predicted to take " + format_ms(predicted.overlapped) + ", plain collectives " +
         format_ms(predicted.plain) + (zero_copy ? "" : "; over a network it must save at least 15 %");
}

Costs costs(const std::shared_ptr<comm::Transport>& transport, const comm::Group& group, at::ScalarType dtype) {
  auto& table = cost_table();
  {
    const std::lock_guard lock(table.mutex);
    const auto found = table.measured.find({transport.get(), dtype});
    if (found != table.measured.end() && found->second.transport.lock() == transport) return found->second.costs;
  }
  Costs local;
  measure_gemm(local, group, dtype);
  measure_transport(local, *transport);
  measure_collectives(local, group);
  const auto all = max_over_ranks(local, group);
  const std::lock_guard lock(table.mutex);
  table.measured.insert_or_assign({transport.get(), dtype}, MeasuredCosts{transport, all});
  return all;
}

}  // namespace weft::overlap
