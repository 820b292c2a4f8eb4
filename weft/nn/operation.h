#pragma once
#include <torch/nn/pimpl.h>

#include <utility>

#include "weft/nn/fusible.h"

namespace weft::nn {

/// One basic operation with its parameters.
class OperationImpl : public Fusible {
 public:
  explicit OperationImpl(ops::OpPtr op);

  /// Feeds extra input `index` from a channel of the pipeline; an empty name: from the caller again.
  void set_extra_input_channel(size_t index, const std::string& channel);
  /// Names extra output `index`; with `output_to_caller` false it is routed but not returned.
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

/// An operation by its type: `nn::op<ops::RMSNorm>({.normalized_shape = {64}})`.
template <class Type>
Operation op(typename Type::Options options = {}) {
  return Operation(std::make_shared<const Type>(std::move(options)));
}
/// An operation by its registered name: `nn::op("GELU")`.
Operation op(const std::string& name);

}  // namespace weft::nn
