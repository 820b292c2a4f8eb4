#include "weft/te/strict.h"

#include <c10/util/Exception.h>

#include <atomic>

namespace weft::te {
namespace {

std::atomic<bool> is_strict{true};
constexpr const char* kHowToRelax =
    "Pad the tensor, or call torchweft.te.install(strict=False) to compute it here only.";

}  // namespace

bool strict() { return is_strict.load(std::memory_order_relaxed); }
void set_strict(bool strict) { is_strict.store(strict, std::memory_order_relaxed); }

void check_whole_blocks(const char* who, int64_t rows, int64_t columns, int64_t block) {
  TORCH_CHECK_VALUE(!strict() || (rows % block == 0 && columns % block == 0), who,
                    " requires dims that are divisible by ", block, ", got ", rows, " rows and ", columns, " columns. ",
                    kHowToRelax);
}

}  // namespace weft::te
