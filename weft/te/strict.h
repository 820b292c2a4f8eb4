#pragma once
#include <cstdint>

// Shapes that the kernels of a GPU refuse. In strict mode weft refuses them too, so that a program that runs here runs
// there; otherwise it computes them.

namespace weft::te {

/// Whether shapes that a GPU refuses raise; true unless set.
bool strict();
void set_strict(bool strict);

/// Raises ValueError in strict mode, or if there are several ranks, unless both sizes are multiples of `block`, the
/// values that share a scale: Transformer Engine's gathers would move parts of blocks.
void check_whole_blocks(const char* who, int64_t rows, int64_t columns, int64_t block);

}  // namespace weft::te
