#pragma once
// A fixed point at which a rank of a test kills or stops itself, set by KILL_POINT=ROUND:STEP:SIGNAL.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

/// Steps of a collective: 0 before it starts, 1 started, 2 first rows marked ready, 3 first block arrived, 4 all blocks
/// arrived, 5 finished.
inline void kill_point(int64_t round, int step) {
  struct Point {
    long long round = -1;
    int step = 0, signal = 0;
    Point() {
      const char* text = std::getenv("KILL_POINT");
      if (text && std::sscanf(text, "%lld:%d:%d", &round, &step, &signal) != 3) std::abort();
    }
  };
  static Point point;
  if (point.round != round || point.step != step) return;
  point.round = -1;  // once: a stopped rank may be continued
  std::raise(point.signal);
}
