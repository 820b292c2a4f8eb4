#pragma once

namespace weft::device {

/// Lets torch.profiler take CUDA activities: their events hold the time of the CPU.
void register_profiler();

}  // namespace weft::device
