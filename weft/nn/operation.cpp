#include "weft/nn/operation.h"

#include "weft/ops/registry.h"

namespace weft::nn {

OperationImpl::OperationImpl(ops::OpPtr op) : Fusible(std::string(op->name())), stage_{.op = std::move(op)} {
  stage_.in.resize(stage_.op->extra_inputs());
  stage_.out.resize(stage_.op->extra_outputs());
  register_op_parameters(*stage_.op);
}

void OperationImpl::set_extra_input_channel(size_t index, const std::string& channel) {
  TORCH_CHECK_INDEX(index < stage_.in.size(), name(), ": extra input ", index, " is out of range, the operation has ",
                    stage_.in.size(), " extra inputs.");
  stage_.in[index] = channel;
  reset_fuser();
}

void OperationImpl::set_extra_output_channel(size_t index, const std::string& channel, bool output_to_caller) {
  TORCH_CHECK_INDEX(index < stage_.out.size(), name(), ": extra output ", index, " is out of range, the operation has ",
                    stage_.out.size(), " extra outputs.");
  stage_.out[index] = {channel, channel.empty() || output_to_caller};
  reset_fuser();
}

std::shared_ptr<torch::nn::Module> OperationImpl::clone(const std::optional<at::Device>& device) const {
  auto copy = std::make_shared<OperationImpl>(stage_.op);
  copy->stage_ = stage_;
  copy->copy_values(*this, device);
  return copy;
}

Operation op(const std::string& name) { return Operation(ops::op_type(name).make({})); }

}  // namespace weft::nn
