#include "weft/comm/ucx/devices.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "weft/comm/unique_fd.h"

namespace weft::comm::ucx {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses resolve(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) found = nullptr;
  return {found, freeaddrinfo};
}

/// The IP address as bytes, without port and scope.
std::string bytes_of(const sockaddr* address) {
  if (address && address->sa_family == AF_INET) {
    const auto& in = reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
    return {reinterpret_cast<const char*>(&in), sizeof(in)};
  }
  if (address && address->sa_family == AF_INET6) {
    const auto& in = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
    return {reinterpret_cast<const char*>(&in), sizeof(in)};
  }
  return "";
}

/// The interface with this address; empty if there is none.
std::string interface_with(const sockaddr* address) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> list(all, freeifaddrs);
  const auto target = bytes_of(address);
  for (const auto* i = all; i && !target.empty(); i = i->ifa_next)
    if (bytes_of(i->ifa_addr) == target) return i->ifa_name;
  return "";
}

/// The interface that routes to `host`. Connects a UDP socket, which sends no packet.
std::string interface_to(const std::string& host) {
  const auto addresses = resolve(host);
  for (const auto* a = addresses.get(); a; a = a->ai_next) {
    const UniqueFd socket(::socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage to{}, from{};
    std::memcpy(&to, a->ai_addr, a->ai_addrlen);
    (to.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(to).sin6_port
                              : reinterpret_cast<sockaddr_in&>(to).sin_port) = htons(9);
    socklen_t length = sizeof(from);
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), a->ai_addrlen) == 0 &&
        ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&from), &length) == 0) {
      auto name = interface_with(reinterpret_cast<const sockaddr*>(&from));
      if (!name.empty()) return name;
    }
  }
  return "";
}

/// The interface with an address of the host name.
std::string named_interface() {
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) return "";
  const auto addresses = resolve(host.data());
  for (const auto* a = addresses.get(); a; a = a->ai_next) {
    auto name = interface_with(a->ai_addr);
    if (!name.empty()) return name;
  }
  return "";
}

std::string loopback() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto name = interface_with(reinterpret_cast<const sockaddr*>(&address));
  return name.empty() ? "lo" : name;
}

}  // namespace

std::string rdma_ports(const std::filesystem::path& devices) {
  std::error_code ignored;  // a missing directory has no entries
  std::vector<std::string> names;
  for (const auto& device : std::filesystem::directory_iterator(devices, ignored))
    for (const auto& port : std::filesystem::directory_iterator(device.path() / "ports", ignored))
      names.push_back(device.path().filename().string() + ":" + port.path().filename().string());
  std::sort(names.begin(), names.end());
  std::string list;
  for (const auto& name : names) list += (list.empty() ? "" : ",") + name;
  return list;
}

std::string group_interface(const c10::intrusive_ptr<c10d::Store>& store) {
  if (const char* gloo = std::getenv("GLOO_SOCKET_IFNAME"); gloo && *gloo) return gloo;
  auto base = store;
  if (auto* prefix = dynamic_cast<c10d::PrefixStore*>(base.get())) base = prefix->getUnderlyingNonPrefixStore();
  std::string name;
  if (const auto* tcp = dynamic_cast<const c10d::TCPStore*>(base.get())) name = interface_to(tcp->getHost());
  if (name.empty()) name = named_interface();
  return name.empty() ? loopback() : name;
}

std::string net_devices(const c10::intrusive_ptr<c10d::Store>& store) {
  const auto rdma = rdma_ports();
  return rdma.empty() ? group_interface(store) : rdma + "," + group_interface(store);
}

}  // namespace weft::comm::ucx
