#pragma once
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <string>

// Shapes that the kernels of a GPU refuse. In strict mode weft refuses them too, so that a program that runs here runs
// there; otherwise it computes them.

namespace weft::te {

/// Whether shapes that a GPU refuses raise; true unless set.
bool strict();
void set_strict(bool strict);

constexpr const char* kRelax = " Call torchweft.te.install(strict=False) to compute it here only.";

[[noreturn]] void refuse(const char* who, const std::string& what);
/// Raises ValueError in strict mode unless `holds`; `what` says what GPUs require.
template <class... Words>
void require_on_gpu(bool holds, const char* who, const Words&... what) {
  if (!holds && strict()) refuse(who, c10::str(what...));
}

/// Raises ValueError in strict mode, or if there are several ranks, unless both sizes are multiples of `block`, the
/// values that share a scale: Transformer Engine's gathers would move parts of blocks.
void check_whole_blocks(const char* who, int64_t rows, int64_t columns, int64_t block);

}  // namespace weft::te
