#pragma once
#include <functional>
#include <string>
#include <vector>

namespace bench {

/// One of the alternatives that are compared: a name, and a function that runs one pass.
struct Side {
  std::string name;
  std::function<void()> run;
};

/// The time of the first side over that of another: median over rounds and its bootstrap interval (95 %). `ms` is the
/// time of the other side.
struct Ratio {
  std::string against;
  double median, low, high, ms;
};

struct Measured {
  double ms = 0;  // of the first side
  std::vector<Ratio> ratios;
  double control = 1;        // the second side against itself
  int kept = 0, rounds = 0;  // rounds used, rounds run
  double steal = 0;          // fraction of CPU time that the hypervisor took
};

struct Method {
  int threads = 1;
  int rounds = 21;                // rounds to keep
  int max_rounds = 84;            // rounds to run
  double sample_seconds = 10e-3;  // duration of a sample; a short pass is repeated
};

/// Compares sides on a machine of varying speed. A round runs both anchors, each side in order, the second side again
/// as a control, all of that in reverse, and both anchors: with two sides A, B, B, A. A short pass runs once untimed
/// before it is timed, so that the state of caches and clocks left by another side does not matter. A round waits for a
/// fast anchor for a limited time, and counts only if each of its anchors reached 85 % of the 90th percentile of all
/// anchors so far.
class Meter {
 public:
  explicit Meter(Method method) : method_(method) {}

  Measured measure(const std::vector<Side>& sides) { return measure(sides, method_); }
  /// With another method. Anchors are still compared with those of the whole run.
  Measured measure(const std::vector<Side>& sides, const Method& method);

 private:
  struct Round {
    double compute, copy;       // lower of the rates before and after
    std::vector<double> spent;  // seconds per pass of each side, summed over both samples; the control is last
  };
  /// Runs the first anchor until it is fast enough for a round to count, or until the wall-clock time `until`.
  void wait(double until);
  /// Passes per sample, and whether an untimed pass runs before it.
  struct Passes {
    int count;
    bool lead_in;
  };
  Round round(const std::vector<Side>& sides, const std::vector<Passes>& passes, int threads);
  std::vector<const Round*> kept(const std::vector<Round>& rounds) const;
  static Measured summary(const std::vector<Side>& sides, const std::vector<const Round*>& rounds);

  Method method_;
  std::vector<double> compute_, copy_;  // of the whole run
};

/// The median, and its 95 % bootstrap interval.
struct MedianInterval {
  double median, low, high;
};
MedianInterval bootstrap(const std::vector<double>& values);

}  // namespace bench
