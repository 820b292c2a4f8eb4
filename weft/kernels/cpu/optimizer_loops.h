#pragma once
#include "weft/kernels/cpu/loops.h"
#include "weft/kernels/optimizer.h"

// Loops of the steps of optimizers, compiled once per instruction set. Each call handles the first `count` elements.

namespace weft::kernels {

/// The elements of a tensor from some index on; null if the tensor is undefined.
struct Elements {
  void* data = nullptr;
  at::ScalarType dtype = at::kFloat;
};

struct AdamCall {
  AdamOptions options = {};
  Elements grad = {}, exp_avg = {}, exp_avg_sq = {};
  Elements weight = {};   // is updated
  Elements rounded = {};  // may be null: becomes the new weight
};
struct SgdCall {
  SgdOptions options = {};
  Elements grad = {}, weight = {}, momentum = {}, copy = {};
};

struct OptimizerLoops {
  void (*adam)(const AdamCall& call, int64_t count);
  void (*sgd)(const SgdCall& call, int64_t count);
  /// out = scale·x. Returns whether all of x is finite.
  bool (*scale)(const Elements& out, const Elements& x, float scale, int64_t count);
  /// Σ (scale·x)², summed in float32.
  float (*sum_of_squares)(const Elements& x, float scale, int64_t count);
};

#define WEFT_DECLARE(set)                      \
  namespace set {                              \
  extern const OptimizerLoops optimizer_loops; \
  }
WEFT_INSTRUCTION_SETS(WEFT_DECLARE)
#undef WEFT_DECLARE

namespace ref {
extern const OptimizerLoops optimizer_loops;
}
inline const OptimizerLoops& optimizer_loops(Tier tier) {
  return tier == Tier::ref ? ref::optimizer_loops : WEFT_LOOPS(tier, optimizer_loops);
}

}  // namespace weft::kernels
