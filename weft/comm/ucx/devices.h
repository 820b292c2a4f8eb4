#pragma once
#include <filesystem>

namespace weft::comm::ucx {

/// Whether this host has better than sockets. If it has, memory is registered with the device, and UCX knows best.
inline bool has_rdma() {
  std::error_code none;
  return std::filesystem::directory_iterator("/sys/class/infiniband", none) != std::filesystem::directory_iterator();
}

}  // namespace weft::comm::ucx
