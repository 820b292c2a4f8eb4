#pragma once

namespace bench {

/// Two fixed loads that tell in which state the machine is. Each returns its rate, of no meaning but by comparison.

/// About 2 ms of tile products on random data in registers, on the tiles if the machine has them, else of
/// multiply-adds. Does not see memory.
double compute_rate();
/// A copy of 8 MiB: more than the second cache holds.
double copy_rate();

}  // namespace bench
