#include "weft/comm/local_socket.h"

#include <c10/util/error.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

namespace weft::comm {
namespace {

struct Address {
  sockaddr_un name = {};
  socklen_t bytes = 0;

  /// A leading zero byte selects the abstract namespace.
  explicit Address(const std::string& abstract_name) {
    name.sun_family = AF_UNIX;
    const size_t length = std::min(abstract_name.size(), sizeof(name.sun_path) - 1);
    std::memcpy(name.sun_path + 1, abstract_name.data(), length);
    bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

UniqueFd make_socket() { return UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

/// Control message with one file descriptor.
struct Control {
  alignas(cmsghdr) char bytes[CMSG_SPACE(sizeof(int))] = {};
};

}  // namespace

UniqueFd listen_at(const std::string& name, int backlog) {
  auto socket = make_socket();
  const Address address(name);
  if (socket && ::bind(socket.get(), address.get(), address.bytes) == 0 && ::listen(socket.get(), backlog) == 0)
    return socket;
  return {};
}

UniqueFd connect_to(const std::string& name) {
  auto socket = make_socket();
  const Address address(name);
  if (socket && ::connect(socket.get(), address.get(), address.bytes) == 0) return socket;
  return {};
}

UniqueFd accept_one(const UniqueFd& listener) {
  return UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

std::optional<PeerCredentials> peer_credentials(const UniqueFd& socket) {
  ucred credentials = {};
  socklen_t bytes = sizeof(credentials);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0 || bytes != sizeof(credentials))
    return {};
  return PeerCredentials{credentials.pid, credentials.uid};
}

bool send_fd(const UniqueFd& socket, const void* message, size_t bytes, const UniqueFd& file) {
  iovec iov{const_cast<void*>(message), bytes};
  Control control;
  msghdr header = {};
  header.msg_iov = &iov;
  header.msg_iovlen = 1;
  header.msg_control = control.bytes;
  header.msg_controllen = sizeof(control.bytes);
  cmsghdr* rights = CMSG_FIRSTHDR(&header);
  rights->cmsg_level = SOL_SOCKET;
  rights->cmsg_type = SCM_RIGHTS;
  rights->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = file.get();
  std::memcpy(CMSG_DATA(rights), &fd, sizeof(fd));
  return ::sendmsg(socket.get(), &header, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

ReceivedFd receive_fd(const UniqueFd& socket, void* message, size_t bytes) {
  iovec iov{message, bytes};
  Control control;
  msghdr header = {};
  header.msg_iov = &iov;
  header.msg_iovlen = 1;
  header.msg_control = control.bytes;
  header.msg_controllen = CMSG_LEN(sizeof(int));  // not CMSG_SPACE: its padding has space for a second descriptor
  const auto got = ::recvmsg(socket.get(), &header, MSG_CMSG_CLOEXEC);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return {};
  if (got < 0) return {true, c10::utils::str_error(errno), {}};
  UniqueFd file;
  const cmsghdr* rights = CMSG_FIRSTHDR(&header);
  if (rights && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS &&
      rights->cmsg_len == CMSG_LEN(sizeof(int))) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(rights), sizeof(fd));
    file = UniqueFd(fd);
  }
  if (got == 0) return {true, "it closed the connection", {}};
  if (got != static_cast<ssize_t>(bytes) || (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 || !file)
    return {true, "malformed message, expected " + std::to_string(bytes) + " bytes with one file descriptor", {}};
  return {true, "", std::move(file)};
}

}  // namespace weft::comm
