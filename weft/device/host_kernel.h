#pragma once
#include "weft/device/operation_table.h"

// Operations of a simulated device that run torch's kernel for the CPU on the same memory.

namespace weft::device {

/// Which arguments may be tensors of the CPU, as the kernels of a GPU decide it.
enum class Mixing {
  same,      // none: torch's generated check
  iterator,  // one input without dimensions: TensorIterator's check
  scalars,   // inputs without dimensions
  indices,   // the indices of a tensor on a device, and a value without dimensions
  mask,      // a value without dimensions, but not the mask of `masked_fill_`
  weights,   // of a convolution: none
  parts,     // a call with tensors of the CPU is divided into calls that check themselves
  any,       // the kernel checks nothing
};

/// Registers the operations that have a kernel for CUDA in torch's native_functions.yaml. An operation that has none
/// raises torch's "Could not run", as on a GPU; one that has a kernel for CUDA only says so.
void register_host_kernels(OperationTable& table);

}  // namespace weft::device
