#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <vector>

#include "weft/ops/context.h"

namespace weft::fused {

/// The properties of one tensor that a plan may depend on.
struct TensorMeta {
  at::ScalarType dtype = at::kFloat;
  c10::DeviceType device = c10::DeviceType::CPU;
  bool defined = true, requires_grad = false, contiguous = true;

  uint32_t pack() const {
    return static_cast<uint32_t>(dtype) | static_cast<uint32_t>(device) << 8 | uint32_t{defined} << 16 |
           uint32_t{requires_grad} << 17 | uint32_t{contiguous} << 18;
  }
  static TensorMeta unpack(uint32_t word) {
    return {static_cast<at::ScalarType>(word & 0xff), static_cast<c10::DeviceType>(word >> 8 & 0xff),
            (word >> 16 & 1) != 0, (word >> 17 & 1) != 0, (word >> 18 & 1) != 0};
  }
  static TensorMeta of(const at::Tensor& t, bool grad_mode) {
    if (!t.defined()) return {.defined = false};
    return {t.scalar_type(), t.device().type(), true, grad_mode && t.requires_grad(), t.is_contiguous()};
  }
};

/// Everything that a fusion rule or a plan may depend on, packed into words for one cheap comparison per call. It has
/// no row counts: a plan serves any number of rows. Words: grad mode and autocast dtype, version of the rules, recipe,
/// evaluation mask (2), then one TensorMeta each for x, the extra inputs passed by the caller and the parameters. In
/// the mask, bit `Pipeline::eval_bit(i)` is set if operation i is in evaluation mode.
class PlanKey {
 public:
  static constexpr int kHeaderWords = 5;  // words before x

  PlanKey() = default;
  PlanKey(bool grad_mode, at::ScalarType autocast, uint32_t recipe, uint32_t rules_version, uint64_t eval_mask) {
    words_.push_back(uint32_t{grad_mode} | static_cast<uint32_t>(autocast) << 8);
    words_.push_back(rules_version);
    words_.push_back(recipe);
    words_.push_back(static_cast<uint32_t>(eval_mask));
    words_.push_back(static_cast<uint32_t>(eval_mask >> 32));
  }
  /// Appends a packed TensorMeta.
  void add(uint32_t meta) { words_.push_back(meta); }
  /// Clears requires_grad of tensor i; 0 is x.
  void drop_grad(int i) {
    auto meta = tensor_meta(i);
    meta.requires_grad = false;
    words_[kHeaderWords + i] = meta.pack();
  }

  bool grad_mode() const { return (words_[0] & 1) != 0; }
  /// The autocast dtype; Undefined if autocast is off.
  at::ScalarType autocast() const { return static_cast<at::ScalarType>(words_[0] >> 8 & 0xff); }
  uint32_t rules_version() const { return words_[1]; }
  /// The id of the quantization recipe (quant::find_recipe); 0: none.
  uint32_t recipe() const { return words_[2]; }
  uint64_t eval_mask() const { return words_[3] | static_cast<uint64_t>(words_[4]) << 32; }
  TensorMeta tensor_meta(int i) const { return TensorMeta::unpack(words_[kHeaderWords + i]); }
  int num_tensors() const { return static_cast<int>(words_.size()) - kHeaderWords; }

  bool operator==(const PlanKey& other) const { return words_ == other.words_; }

 private:
  c10::SmallVector<uint32_t, 28> words_;
};

/// The key applied to a pipeline: the required gradients, input dtype and compute dtype of each operation.
struct PlanView {
  const PlanKey& key;
  const std::vector<ops::OpPlan>& plans;
  std::vector<at::ScalarType> input_dtypes;    // of x at each operation; Undefined after DtypeRule::unknown
  std::vector<at::ScalarType> compute_dtypes;  // by each operation's DtypeRule
};

}  // namespace weft::fused
