#pragma once
#include <torch/nn/pimpl.h>

#include <utility>

#include "weft/nn/fusible.h"

namespace weft::nn {

/// A module of one basic operation.
class OperationImpl : public Fusible {
 public:
  explicit OperationImpl(ops::OpPtr op);

  /// Reads extra input `index` from a channel; with an empty name, the caller passes it.
  void set_extra_input_channel(size_t index, const std::string& channel);
  /// Writes extra output `index` to a channel. With `output_to_caller` or an empty name, forward_extra also returns it.
  void set_extra_output_channel(size_t index, const std::string& channel, bool output_to_caller = true);

  const ops::BasicOp& op() const { return *stage_.op; }
  std::vector<fuser::Stage> stages() const override { return {stage_}; }
  std::vector<at::Tensor> op_parameters() const override { return parameters(/*recurse=*/false); }
  void reset_parameters() override { initialize(*stage_.op); }
  std::shared_ptr<torch::nn::Module> clone(const std::optional<at::Device>& device = std::nullopt) const override;
  void pretty_print(std::ostream& stream) const override { stream << stage_.op->brief(); }

 private:
  fuser::Stage stage_;
};
TORCH_MODULE(Operation);

/// Creates an operation by type: `nn::op<ops::RMSNorm>({.normalized_shape = {64}})`.
template <class Type>
Operation op(typename Type::Options options = {}) {
  return Operation(std::make_shared<const Type>(std::move(options)));
}
/// Creates an operation by registered name: `nn::op("GELU")`.
Operation op(const std::string& name);

}  // namespace weft::nn
