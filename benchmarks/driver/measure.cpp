#include "benchmarks/driver/measure.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <random>

#include "benchmarks/driver/anchor.h"
#include "benchmarks/driver/clock.h"

namespace bench {
namespace {

constexpr double kMinAnchorRatio = 0.85, kReferenceQuantile = 0.90;
constexpr double kQuietWait = 0.25;  // seconds to wait for a fast anchor, per round to keep
constexpr double kLongPass = 50e-3;  // seconds; longer passes do not depend on what ran before

double quantile(std::vector<double> values, double part) {
  const auto nth = values.begin() + static_cast<std::ptrdiff_t>(part * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), nth, values.end());
  return *nth;
}

double median(const std::vector<double>& values) { return quantile(values, 0.5); }

/// CPU time of all processors since boot, and the part that the hypervisor gave to other guests.
struct CpuTimes {
  double all = 0, steal = 0;
};
CpuTimes read_cpu_times() {
  std::ifstream stat("/proc/stat");
  std::string word;
  stat >> word;
  CpuTimes out;
  double ticks = 0;
  for (int i = 0; i < 8 && stat >> ticks; ++i) {  // user nice system idle iowait irq softirq steal
    out.all += ticks;
    if (i == 7) out.steal = ticks;
  }
  return out;
}

double seconds_per_pass(const Side& side, int passes, int threads) {
  const auto start = now(threads);
  for (int i = 0; i < passes; ++i) side.run();
  return (now(threads) - start) / passes;
}

}  // namespace

MedianInterval bootstrap(const std::vector<double>& values) {
  constexpr int kResamples = 1000;
  std::minstd_rand rng(1);  // NOLINT(bugprone-random-generator-seed): the same interval for the same values
  std::uniform_int_distribution<size_t> pick(0, values.size() - 1);
  std::vector<double> medians, drawn(values.size());
  for (int i = 0; i < kResamples; ++i) {
    for (auto& value : drawn) value = values[pick(rng)];
    medians.push_back(median(drawn));
  }
  return {median(values), quantile(medians, 0.025), quantile(medians, 0.975)};
}

void Meter::wait(double until) {
  while (now(/*threads=*/0) < until && compute_.size() > 20) {
    compute_.push_back(compute_rate());
    if (compute_.back() >= kMinAnchorRatio * quantile(compute_, kReferenceQuantile)) return;
  }
}

Meter::Round Meter::round(const std::vector<Side>& sides, const std::vector<Passes>& passes, int threads) {
  const auto order = sides.size() + 1;  // the last is the control: the second side again
  const auto which = [&](size_t i) { return i < sides.size() ? i : 1; };
  Round out{compute_rate(), copy_rate(), std::vector<double>(order)};
  compute_.push_back(out.compute);
  copy_.push_back(out.copy);
  const auto sample = [&](size_t i) {
    const auto [count, lead_in] = passes[which(i)];
    if (lead_in) sides[which(i)].run();
    return seconds_per_pass(sides[which(i)], count, threads);
  };
  for (size_t i = 0; i < order; ++i) out.spent[i] += sample(i);
  for (size_t i = order; i-- > 0;) out.spent[i] += sample(i);
  compute_.push_back(compute_rate());
  copy_.push_back(copy_rate());
  out.compute = std::min(out.compute, compute_.back());
  out.copy = std::min(out.copy, copy_.back());
  return out;
}

std::vector<const Meter::Round*> Meter::kept(const std::vector<Round>& rounds) const {
  const double compute = kMinAnchorRatio * quantile(compute_, kReferenceQuantile),
               copy = kMinAnchorRatio * quantile(copy_, kReferenceQuantile);
  std::vector<const Round*> out;
  for (const auto& round : rounds)
    if (round.compute >= compute && round.copy >= copy) out.push_back(&round);
  return out;
}

Measured Meter::summary(const std::vector<Side>& sides, const std::vector<const Round*>& rounds) {
  const auto over = [&](const auto& value) {
    std::vector<double> values;
    for (const auto* round : rounds) values.push_back(value(round->spent));
    return values;
  };
  const auto ms = [&](size_t i) { return median(over([&](const auto& spent) { return spent[i] * 1e3 / 2; })); };
  Measured out;
  out.ms = ms(0);
  for (size_t i = 1; i < sides.size(); ++i) {
    const auto found = bootstrap(over([&](const auto& spent) { return spent[0] / spent[i]; }));
    out.ratios.push_back({sides[i].name, found.median, found.low, found.high, ms(i)});
  }
  out.control = median(over([](const auto& spent) { return spent.back() / spent[1]; }));
  return out;
}

Measured Meter::measure(const std::vector<Side>& sides, const Method& method) {
  std::vector<Passes> passes;
  for (const auto& side : sides) {
    seconds_per_pass(side, 2, method.threads);
    const auto one = seconds_per_pass(side, 1, method.threads);
    passes.push_back({std::max(1, static_cast<int>(std::lround(method.sample_seconds / one))), one < kLongPass});
  }
  const auto before = read_cpu_times();
  const auto until = now(/*threads=*/0) + kQuietWait * method.rounds;
  std::vector<Round> rounds;
  const auto enough = [&](size_t count) { return static_cast<int>(count) >= method.rounds; };
  while (static_cast<int>(rounds.size()) < method.max_rounds &&
         !(enough(rounds.size()) && enough(kept(rounds).size()))) {
    wait(until);
    rounds.push_back(round(sides, passes, method.threads));
  }
  const auto after = read_cpu_times();
  auto used = kept(rounds);
  const auto count = static_cast<int>(used.size());
  if (used.empty())  // no round counted: use all rounds and report 0 kept
    for (const auto& each : rounds) used.push_back(&each);
  auto out = summary(sides, used);
  out.kept = count;
  out.rounds = static_cast<int>(rounds.size());
  out.steal = after.all > before.all ? (after.steal - before.steal) / (after.all - before.all) : 0;
  return out;
}

}  // namespace bench
