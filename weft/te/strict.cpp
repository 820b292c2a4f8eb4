#include "weft/te/strict.h"

#include <c10/util/Exception.h>

#include <atomic>

#include "weft/te/bind.h"

namespace weft::te {
namespace {

std::atomic<bool> is_strict{true};
/// Whether torch.distributed has more than one rank.
bool has_ranks() {
  const py::gil_scoped_acquire acquire;
  const auto distributed = py::module_::import("torch.distributed");
  return distributed.attr("is_available")().cast<bool>() && distributed.attr("is_initialized")().cast<bool>() &&
         distributed.attr("get_world_size")().cast<int>() > 1;
}

}  // namespace

bool strict() { return is_strict.load(std::memory_order_relaxed); }
void set_strict(bool strict) { is_strict.store(strict, std::memory_order_relaxed); }

void refuse(const char* who, const std::string& what) { TORCH_CHECK_VALUE(false, who, ": ", what, kRelax); }

void check_whole_blocks(const char* who, int64_t rows, int64_t columns, int64_t block) {
  if (rows % block == 0 && columns % block == 0) return;
  const bool over_ranks = !strict() && has_ranks();
  TORCH_CHECK_VALUE(!strict() && !over_ranks, who, " requires dims that are divisible by ", block, ", got ", rows,
                    " rows and ", columns, " columns. Pad the tensor",
                    over_ranks
                        ? ": Transformer Engine gathers whole blocks from ranks, so that strict=False is ignored."
                        : ", or call torchweft.te.install(strict=False) to compute it here only.");
}

}  // namespace weft::te
