#pragma once
#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string>

#include "weft/comm/unique_fd.h"

namespace weft::comm {

/// SO_PEERCRED: the process at the other end of a socket.
struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
};

/// Result of one non-blocking receive.
struct ReceivedFd {
  bool arrived = false;  // a message arrived, or the peer closed the connection
  std::string error;     // empty: a message of the expected length with exactly one file descriptor
  UniqueFd file;
};

// Non-blocking SOCK_SEQPACKET Unix sockets in the abstract namespace: no file remains when a process dies. On error the
// functions return an empty value or false and set errno.
UniqueFd listen_at(const std::string& name, int backlog);
UniqueFd connect_to(const std::string& name);
UniqueFd accept_one(const UniqueFd& listener);
std::optional<PeerCredentials> peer_credentials(const UniqueFd& socket);

/// Sends or receives one message of `bytes` bytes with one file descriptor (SCM_RIGHTS).
bool send_fd(const UniqueFd& socket, const void* message, size_t bytes, const UniqueFd& file);
ReceivedFd receive_fd(const UniqueFd& socket, void* message, size_t bytes);

}  // namespace weft::comm
