#pragma once
#include <filesystem>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace weft::comm::ucx {

/// Ports of the host's RDMA devices, e.g. "mlx5_0:1,mlx5_1:1"; empty if it has none.
std::string rdma_ports(const std::filesystem::path& devices = "/sys/class/infiniband");

/// The network interface that Gloo would choose for the group: GLOO_SOCKET_IFNAME (may be a list), otherwise the
/// interface to the TCPStore server, otherwise the one with the address of the host name, otherwise loopback.
std::string group_interface(const c10::intrusive_ptr<c10d::Store>& store);

/// UCX_NET_DEVICES for the group: the RDMA ports, if any, and `group_interface`. UCX listens on nothing else.
std::string net_devices(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace weft::comm::ucx
