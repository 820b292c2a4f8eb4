#pragma once
#include <functional>
#include <string>
#include <vector>

namespace bench {

/// One of the things compared: a name and one pass of it.
struct Side {
  std::string name;
  std::function<void()> run;
};

/// The time of the first side over that of another: the median over rounds and the bootstrap interval (95 %) of that
/// median. `ms` is the other side's own time.
struct Ratio {
  std::string against;
  double median, low, high, ms;
};

struct Measured {
  double ms = 0;  // of the first side
  std::vector<Ratio> ratios;
  double control = 1;        // the second side against itself
  int kept = 0, rounds = 0;  // rounds used, rounds run
  double steal = 0;          // part of the CPU time that the host took away meanwhile
};

struct Method {
  int threads = 1;
  int rounds = 21;                // to keep
  int max_rounds = 84;            // to run
  double sample_seconds = 10e-3;  // a sample repeats a short pass
};

/// Compares sides on a machine whose speed changes. A round runs both anchors, each side in order, the second side once
/// more as a control, all of that in reverse, and both anchors: with two sides A, B, B, A. A short pass is run once
/// before it is timed, so that no side meets the caches and clocks another left. A round waits a while for a quick
/// anchor, and counts only if each of its anchors reached 85 % of the 90th percentile of all anchors so far.
class Meter {
 public:
  explicit Meter(Method method) : method_(method) {}

  Measured measure(const std::vector<Side>& sides) { return measure(sides, method_); }
  /// By another method; anchors are judged by the whole run all the same.
  Measured measure(const std::vector<Side>& sides, const Method& method);

 private:
  struct Round {
    double compute, copy;       // the lower rate of the two before and after
    std::vector<double> spent;  // by each side in both samples, then by the control; seconds a pass
  };
  /// Runs the first anchor until it is quick enough for a round to count, or the wall clock shows `until`.
  void wait(double until);
  /// How often a sample runs its side, and whether one pass before it is not timed.
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

/// The median, and the middle 95 % of the medians of resampled values.
struct MedianInterval {
  double median, low, high;
};
MedianInterval bootstrap(const std::vector<double>& values);

}  // namespace bench
