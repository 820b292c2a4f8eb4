#pragma once
#include <torch/library.h>

#include <string>
#include <unordered_set>
#include <utility>

namespace weft::device {

/// The kernels of torch's operations for simulated devices. The first kernel that is added for an operation stays.
class OperationTable {
 public:
  OperationTable() : library_(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__) {}

  template <class Kernel>
  void add(const char* operation, Kernel&& kernel) {
    if (added_.insert(operation).second) library_.impl(operation, std::forward<Kernel>(kernel));
  }

 private:
  torch::Library library_;
  std::unordered_set<std::string> added_;
};

}  // namespace weft::device
