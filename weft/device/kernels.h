#pragma once
#include "weft/device/operation_table.h"

namespace weft::device {

/// Registers the operations whose kernels differ from those for the CPU: allocation, storages, copies between devices,
/// views, dropout, and what torch compiles for CUDA only.
void register_kernels(OperationTable& table);

/// Registers the fused cells of LSTM and GRU.
void register_rnn_kernels(OperationTable& table);

}  // namespace weft::device
