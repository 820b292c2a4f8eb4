#include "weft/overlap/costs.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>

#include "weft/kernels/gemm.h"
#include "weft/overlap/clock.h"

namespace weft::overlap {
namespace {

constexpr double kNetworkGain = 0.85;  // overlapped / plain, at most
constexpr int kBlocks = 4;             // in which rows arrive over a network, each half of what is left
constexpr int64_t kLastRows = 64;      // of the smallest block

double cpu_now() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// The quickest of a few runs, in seconds.
template <class Run>
double quickest(int runs, Run&& run) {
  double best = 1e9;
  for (int i = 0; i < runs; ++i) {
    const double start = now();
    run();
    best = std::min(best, now() - start);
  }
  return best;
}

/// Two products of the same weight give the slope and the part that does not depend on rows.
void measure_products(Costs& out, at::ScalarType dtype) {
  constexpr int64_t kFew = 32, kMany = 256, kWidth = 512;
  const auto options = at::TensorOptions().dtype(dtype);
  const auto w = at::zeros({kWidth, kWidth}, options);
  const auto time = [&](int64_t rows) {
    const auto x = at::zeros({rows, kWidth}, options);
    return quickest(5, [&] { kernels::gemm(x, kernels::transposed(w), {.b_is_weight = true}); });
  };
  const double few = time(kFew), many = time(kMany);
  const double per_row = std::max(many - few, 0.2 * many) / static_cast<double>(kMany - kFew);
  out.per_flop = per_row / static_cast<double>(2 * kWidth * kWidth);
  out.per_weight = std::max(0.0, few - per_row * kFew) / static_cast<double>(kWidth * kWidth);
}

void gather(comm::Link& link, const at::Tensor& mine) {
  const auto round = link.all_gather(mine);
  for (int from = 0; from < link.size(); ++from) {
    if (from == link.rank()) continue;
    round->wait(from, mine.size(0));
    if (link.in_place()) round->incoming(from).clone();
  }
  round->finish();
}

constexpr int64_t kRows = 256, kColumns = 2048;  // of a message that shows the rate: 2 MB in float32

void measure_link(Costs& out, comm::Link& link) {
  const auto little = at::zeros({1, 1}), much = at::zeros({kRows, kColumns});
  const double bytes = static_cast<double>(much.nbytes()) * (link.size() - 1);
  gather(link, much);
  out.latency = quickest(10, [&] { gather(link, little); });
  const double cpu = cpu_now();
  const double spent = std::max(0.0, quickest(2, [&] { gather(link, much); }) - out.latency);
  out.per_byte = spent / bytes;
  out.cpu_per_byte = link.in_place() ? out.per_byte : std::min(out.per_byte, (cpu_now() - cpu) / 2 / bytes);
}

void measure_collectives(Costs& out, const comm::Group& group) {
  const auto little = at::zeros({1, 1}), much = at::zeros({kRows, kColumns});
  out.plain_latency = quickest(5, [&] { group.all_gather(little).wait(); });
  const double spent = quickest(2, [&] { group.all_gather(much).wait(); });
  out.plain_per_byte =
      std::max(0.0, spent - out.plain_latency) / (static_cast<double>(much.nbytes()) * (group.size() - 1));
}

/// The slowest rank's numbers are everybody's.
Costs agreed(const Costs& mine, const comm::Group& group) {
  static constexpr std::array kFields{&Costs::per_flop,      &Costs::per_weight,   &Costs::latency,
                                      &Costs::per_byte,      &Costs::cpu_per_byte, &Costs::plain_latency,
                                      &Costs::plain_per_byte};
  static_assert(sizeof(Costs) == kFields.size() * sizeof(double), "a field is missing");
  const auto words = at::empty({1, static_cast<int64_t>(kFields.size())}, at::TensorOptions().dtype(at::kDouble));
  for (size_t i = 0; i < kFields.size(); ++i) words.mutable_data_ptr<double>()[i] = mine.*kFields[i];
  const auto all = std::get<0>(group.all_gather(words).wait().max(0)).contiguous();
  Costs out;
  for (size_t i = 0; i < kFields.size(); ++i) out.*kFields[i] = all.const_data_ptr<double>()[i];
  return out;
}

struct Measured {
  std::weak_ptr<comm::Link> link;  // another one may come to lie at its address
  Costs costs;
};

struct Known {
  std::mutex mutex;
  std::map<std::string, Costs> given;
  std::map<std::pair<comm::Link*, at::ScalarType>, Measured> measured;
};

Known& known() {
  static auto* instance = new Known;  // never destroyed: may be used at exit
  return *instance;
}

}  // namespace

double Costs::product(int64_t rows, int64_t n, int64_t k) const {
  const double weight = static_cast<double>(n) * static_cast<double>(k);
  return weight * (per_weight + 2 * static_cast<double>(rows) * per_flop);
}

double Shape::bytes() const {
  const int64_t columns = operation == comm::Operation::all_gather ? k : n;
  return static_cast<double>(ranks - 1) * static_cast<double>(rows * columns) *
         static_cast<double>(c10::elementSize(dtype));
}

Prediction predict(const Shape& shape, const Costs& costs, bool in_place) {
  const bool twice = shape.operation == comm::Operation::all_reduce;
  const double bytes = shape.bytes() * (twice ? 2 : 1);
  const double product = costs.product(shape.rows * shape.ranks, shape.n, shape.k);
  Prediction out;
  out.plain = product + (twice ? 2 : 1) * costs.plain_latency + bytes * costs.plain_per_byte;
  if (in_place) {
    out.overlapped = product + (twice ? 2 : 1) * costs.latency + bytes * costs.cpu_per_byte;
    return out;
  }
  const double again = (kBlocks - 1) * costs.product(0, shape.n, shape.k);
  const double last = costs.product(std::min(shape.rows, kLastRows), shape.n, shape.k);
  out.overlapped =
      std::max(product + again + bytes * costs.cpu_per_byte, costs.latency + bytes * costs.per_byte + last);
  return out;
}

std::string refuse(const Shape& shape, const Prediction& predicted, bool in_place) {
  if (shape.rows == 0) return "there are no rows";
  if (predicted.overlapped <= (in_place ? 1.0 : kNetworkGain) * predicted.plain) return {};
  return "overlapped it would take " + milliseconds(predicted.overlapped) + ", plain " + milliseconds(predicted.plain) +
         (in_place ? "" : ", and 15 % must be gained");
}

Costs costs(const std::shared_ptr<comm::Link>& link, const comm::Group& group, const std::string& name,
            at::ScalarType dtype) {
  auto& k = known();
  {
    const std::lock_guard lock(k.mutex);
    if (const auto found = k.given.find(name); found != k.given.end()) return found->second;
    const auto found = k.measured.find({link.get(), dtype});
    if (found != k.measured.end() && found->second.link.lock() == link) return found->second.costs;
  }
  Costs mine;
  measure_products(mine, dtype);
  measure_link(mine, *link);
  measure_collectives(mine, group);
  const auto all = agreed(mine, group);
  const std::lock_guard lock(k.mutex);
  k.measured.insert_or_assign({link.get(), dtype}, Measured{link, all});
  return all;
}

void give_costs(const std::string& group, const Costs& costs) {
  auto& k = known();
  const std::lock_guard lock(k.mutex);
  k.given.insert_or_assign(group, costs);
}

}  // namespace weft::overlap
