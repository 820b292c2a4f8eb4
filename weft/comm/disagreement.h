#pragma once
#include <c10/util/ArrayRef.h>

#include <string>

#include "weft/comm/exchange.h"

namespace weft::comm {

/// What one rank is about to do, and the how many-th collective of the group that is to it.
struct Statement {
  int64_t number = 0;
  Agreement about;
  bool operator==(const Statement&) const = default;
};

/// Who says what, if not all ranks say the same; else empty. Equal on every rank.
std::string disagreement(c10::ArrayRef<Statement> by_rank);

}  // namespace weft::comm
