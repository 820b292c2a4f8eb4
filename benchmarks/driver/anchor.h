#pragma once

namespace bench {

/// Anchors: two fixed workloads that show the current speed of the machine. Each returns a rate that is meaningful only
/// in comparison.

/// About 2 ms of AMX tile multiplications on random data in registers, or of multiply-adds without AMX. Does not access
/// memory.
double compute_rate();
/// A copy of 8 MiB: larger than L2.
double copy_rate();

}  // namespace bench
