#pragma once
#include <cstdint>

namespace weft::fuser {

/// Called by each forward pass: if it runs inside a backward (a checkpoint recomputes activations), remembers that
/// backward as the outer one of whatever backward this thread starts until it ends.
void track_recompute();

/// Identifies the backward that this thread executes. A nested backward, as a reentrant checkpoint starts it, has the
/// id of the outermost one. Raises if a nested backward's outermost one is not known.
int64_t outermost_graph_task_id();

}  // namespace weft::fuser
