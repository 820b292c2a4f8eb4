#pragma once
// A fixed point at which a rank of a test ends or stops: KILL_POINT=ROUND:STEP:SIGNAL in its environment.
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

/// Steps of a round: 0 before it starts, 1 it has started, 2 the first rows are published, 3 the first block is here,
/// 4 all are, 5 it is finished.
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
  point.round = -1;  // once: a rank that was stopped may go on
  std::raise(point.signal);
}
