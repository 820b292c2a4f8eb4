#pragma once
#include <filesystem>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace weft::comm::ucx {

/// "mlx5_0:1,mlx5_1:1": the ports of the host's RDMA devices; empty if it has none.
std::string rdma_ports(const std::filesystem::path& devices = "/sys/class/infiniband");

/// The network interface that a group's own traffic takes, as Gloo chooses it: GLOO_SOCKET_IFNAME (may be a list), the
/// one that reaches the server of the group's TCPStore, the one whose address the host's name has, else loopback.
std::string group_interface(const c10::intrusive_ptr<c10d::Store>& store);

/// UCX_NET_DEVICES for the group: that interface, and RDMA ports if there are any. UCX listens on nothing else.
std::string net_devices(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace weft::comm::ucx
