#include "weft/ops/qkv.h"

namespace weft::ops {

QkvHeads make_heads(std::string_view op, int64_t heads, std::optional<int64_t> groups, int64_t head_dim) {
  const auto positive = [&](const char* what, int64_t value) {
    TORCH_CHECK_VALUE(value > 0, op, ": ", what, " is ", value, ", expected 1 or more.");
    constexpr int64_t kMaxSize = 1 << 24;  // products of three such numbers do not overflow
    TORCH_CHECK_VALUE(value <= kMaxSize, op, ": ", what, " is ", value, ", expected at most ", kMaxSize, ".");
  };
  positive("num_attention_heads", heads);
  positive("kv_channels", head_dim);
  const auto kv = groups.value_or(heads);
  positive("num_gqa_groups", kv);
  TORCH_CHECK_VALUE(heads % kv == 0, op, ": num_attention_heads is ", heads, ", num_gqa_groups ", kv,
                    "; expected a number of groups that divides the heads.");
  return {heads, kv, head_dim};
}

namespace {

/// The dimension of an activation of one sequence that is not 1; the first one if all are.
size_t only_dimension(c10::SymIntArrayRef leading, c10::SymIntArrayRef sizes) {
  std::optional<size_t> found;
  for (size_t i = 0; i < leading.size(); ++i) {
    if (leading[i].sym_eq(1).guard_bool(__FILE__, __LINE__)) continue;
    TORCH_CHECK_VALUE(
        !found, "input has shape ", sizes, ", which is more than one sequence, and qkv_format is not given. ",
        "Pass qkv_format=\"bshd\" for (batch, sequence, width), or \"sbhd\" for (sequence, batch, width).");
    found = i;
  }
  return found.value_or(0);
}

}  // namespace

SequenceDims::SequenceDims(std::optional<QkvFormat> format, c10::SymIntArrayRef sizes) {
  const auto leading = sizes.slice(0, sizes.size() - 1);
  if (leading.empty()) return;
  const size_t sequence = !format ? only_dimension(leading, sizes) : format == QkvFormat::bshd ? leading.size() - 1 : 0;
  for (size_t i = 0; i < leading.size(); ++i) {
    if (format == QkvFormat::thd || i == sequence)
      length = length * leading[i];
    else if (i < sequence)
      outer = outer * leading[i];
    else
      inner = inner * leading[i];
  }
}

std::array<int64_t, 4> SequenceDims::sizes(int64_t width) const {
  const auto known = [](const c10::SymInt& size) { return size.guard_int(__FILE__, __LINE__); };
  return {known(outer), known(length), known(inner), width};
}

void check_cu_seqlens(const Spec& cu_seqlens, const char* name) {
  TORCH_CHECK_TYPE(cu_seqlens.dtype == at::kInt || cu_seqlens.dtype == at::kLong, name, " is ",
                   dtype_name(cu_seqlens.dtype), ", expected int32 or int64.");
  TORCH_CHECK_VALUE(cu_seqlens.sizes.size() == 1 && cu_seqlens.sizes[0] > 0, name, " has shape ", cu_seqlens.sizes,
                    ", expected one dimension with the number of sequences + 1.");
}

}  // namespace weft::ops
